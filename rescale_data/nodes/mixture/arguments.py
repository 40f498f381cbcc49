"""Checks the arguments of `WeightedSampler`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rescale_data.errors import require_int, require_type
from rescale_data.nodes.abilities import Mixes
from rescale_data.nodes.base import BaseNode, Node
from rescale_data.nodes.below import readers_of
from rescale_data.nodes.mixture.row import FIELD_NAMES
from rescale_data.nodes.mixture.rules import Schedule, require_weights


def check_mixture(
    nodes: Mapping[str, BaseNode[Any]],
    weights_or_schedule: Mapping[str, float] | Schedule,
    unit: str,
    column: str | None,
    stop: str,
) -> None:
    """Raise ``ValueError`` if the names, weights, unit, column or ``stop`` of a mixture are not valid."""
    require_type(Mapping, "a dict", nodes=nodes)
    names: list[object] = list(nodes)
    reserved_names = [*FIELD_NAMES, "self", "root"]
    bad_names = [
        name for name in names if not isinstance(name, str) or not name or "." in name or name in reserved_names
    ]
    if bad_names:
        raise ValueError(
            f"The names {bad_names} of sources cannot be part of a state's path: give strings without dots, and none of "
            f"{reserved_names}."
        )
    weights = weights_or_schedule.keys[0][1] if isinstance(weights_or_schedule, Schedule) else weights_or_schedule
    require_type(Mapping, "a dict", weights=weights)
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


def check_max_epochs(max_epochs: Mapping[str, int], names: list[str]) -> None:
    """Raise ``ValueError`` if a limit on epochs is below 1, or if its source does not exist."""
    require_type(Mapping, "a dict", max_epochs=max_epochs)
    for name, num_epochs in max_epochs.items():
        if name not in names:
            raise ValueError(f"max_epochs has {name!r}, and the sources are {names}: give the epochs of one of them.")
        require_int(**{f"max_epochs[{name!r}]": num_epochs})
        if num_epochs < 1:
            raise ValueError(f"max_epochs[{name!r}]={num_epochs}: give at least 1; for a source that rests, weight 0.")


def epoch_slot(name: str, node: Node[Any], slots: slice) -> int:
    """Return the index of a source's epoch counter in the position of a mixture; ``ValueError`` if there is no single one."""
    readers = readers_of(node, slots.start)
    if len(readers) != 1 or any(isinstance(child, Mixes) or len(child.children) > 1 for _, child in node.walk()):
        raise ValueError(
            f"max_epochs[{name!r}]: the source reads {len(readers)} rd.Reader, or one in a mixture of its own, so its epochs "
            f"are not those of one reader. Give max_epochs in a mixture right above the readers."
        )
    reader, slot = readers[0]
    if reader.shard.repeat and reader.rows.is_small:
        raise ValueError(
            f"max_epochs[{name!r}]: {reader.source.name} has fewer rows than there are logical shards "
            f"({reader.shard.num_logical_shards}), and in an endless stream (repeat=True) a shard passes over epochs in which "
            f"it has none. Give fewer logical shards, repeat=False, or a rd.Schedule that gives the source weight 0."
        )
    return slot
