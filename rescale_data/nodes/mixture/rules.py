"""The rules of a mixture, each its weights or schedule with its caps: of now, and of the legs of a run before.

A position goes on by the rule it was begun with, whose number is in it, until it is settled.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from rescale_data.nodes.base import Node
from rescale_data.nodes.form import BEFORE, History
from rescale_data.nodes.mixture.caps import cap_of
from rescale_data.nodes.mixture.row import MixtureRow
from rescale_data.nodes.mixture.schedule import Schedule, as_json, mix_of
from rescale_data.nodes.mixture.sizes import Sizes
from rescale_data.nodes.mixture.weights import MixtureWeights


def rule_of(
    row: MixtureRow,
    sources: Mapping[str, tuple[Node[Any], slice]],
    shard: tuple[int, int],
    weights: Mapping[str, float] | Schedule,
    caps: Mapping[str, Any],
    sizes: Sizes | None = None,
) -> MixtureWeights:
    """What `MixtureWeights` makes of weights and caps by name; caps of sources that are gone count no more.

    Args:
        row: Where the mixture keeps what.
        sources: By name, and the slots of each.
        shard: The index of the logical shard, and how many there are.
    """
    limits = {
        row.names.index(name): cap_of(name, cap, *sources[name], row, shard)
        for name, cap in caps.items()
        if name in sources
    }
    return MixtureWeights(row, weights, shard, sizes, limits, number_of(as_json(weights), caps))


def number_of(weights: Any, caps: Mapping[str, Any]) -> int:
    """What tells a schedule or caps, as they stand in a state, from others of which the weights are the same so far."""
    if not caps and not isinstance(weights.get("keys"), list):
        return 0
    return mix_of([json.dumps([weights, caps], sort_keys=True)], [1.0])


def earlier(saved: Mapping[str, Any], now: int, used: Callable[[], set[int]]) -> History:
    """Those of the rules of a saved mixture, but that of now, by which some positions go on.

    Args:
        saved: Its parameters.
        now: The number of the rule of now.
        used: Asked for the numbers in the positions, if they can be of several.
    """
    last = {"weights": saved["weights"], "caps": saved.get("caps", {})}
    known = {number_of(rule["weights"], rule["caps"]): rule for rule in [*(r for _, r in saved.get(BEFORE, ())), last]}
    numbers = used() if now or any(known) else set[int]()
    if 0 in numbers and 0 not in known:  # a state of before schedules had numbers
        numbers.add(number_of(**last))
    return [(0, rule) for number, rule in known.items() if number in numbers and number != now]
