"""What a `WeightedSampler` can be given."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rescale_data.errors import require
from rescale_data.nodes.base import BaseNode
from rescale_data.nodes.mixture.row import KINDS
from rescale_data.nodes.mixture.schedule import Schedule, require_weights


def check_mixture(
    nodes: Mapping[str, BaseNode[Any]],
    given: Mapping[str, float] | Schedule | str,
    unit: str,
    column: str | None,
    stop: str,
) -> None:
    """``ValueError`` where names, weights, the unit and its column, or what happens at ends do not fit."""
    if isinstance(given, str) and given not in ("rows", "tokens"):
        raise ValueError(f"weights={given!r}: give numbers by name, a rd.Schedule, 'rows' or 'tokens'.")
    require(Mapping, "a dict", nodes=nodes)
    names: list[object] = list(nodes)
    bad = [name for name in names if not isinstance(name, str) or not name or "." in name or name in (*KINDS, "self")]
    if bad:
        raise ValueError(
            f"The names {bad} of sources cannot be part of a state's path: give strings without dots, and none of "
            f"{[*KINDS, 'self']}."
        )
    weights = dict.fromkeys(nodes, 1.0) if isinstance(given, str) else given
    weights = weights.keys[0][1] if isinstance(weights, Schedule) else weights
    require(Mapping, "a dict", weights=weights)
    if not nodes or set(nodes) != set(weights):
        raise ValueError(
            f"WeightedSampler was given the nodes {sorted(nodes)} and the weights {sorted(weights, key=str)}: give a weight "
            f"for each."
        )
    require_weights(weights)
    if unit not in ("samples", "tokens") or stop not in ("never", "first", "all"):
        raise ValueError(f"unit={unit!r}, stop={stop!r}: give 'samples' or 'tokens', and 'never', 'first' or 'all'.")
    if (unit == "tokens") != (column is not None):
        raise ValueError(f"unit={unit!r} with column={column!r}: tokens are counted in a column; samples are not.")


def check_temperature(temperature: float, given: object) -> None:
    """``ValueError`` where it is none, or would be ignored."""
    if isinstance(temperature, bool | str) or not hasattr(temperature, "__float__"):
        raise TypeError(f"temperature={temperature!r} is a {type(temperature).__name__}; give a number.")
    if not (math.isfinite(temperature) and temperature > 0):
        raise ValueError(f"temperature={temperature}: give a number above 0; 1 for weights as large as the sources.")
    if temperature != 1 and not isinstance(given, str):
        raise ValueError(
            f"temperature={temperature} is for weights='rows' and 'tokens': numbers count as they are given."
        )
