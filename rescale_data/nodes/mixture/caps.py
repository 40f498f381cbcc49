"""`Cap`: how much a mixture may draw from a source in the whole run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rescale_data.errors import require, require_int
from rescale_data.nodes.base import Node, View
from rescale_data.nodes.below import readers_of
from rescale_data.nodes.mixture.row import MixtureRow
from rescale_data.state import Ints

UNITS = ("epochs", "samples", "tokens")


@dataclass(frozen=True)
class Cap:
    """That of one source in one logical shard.

    Args:
        unit: "epochs", "samples" or "tokens".
        total: Of all logical shards, but of epochs, which each shard has as many of.
        limit: Of this one.
        slot: Of the mixture's position, which counts them since the run began.
    """

    unit: str
    total: int
    limit: int
    slot: int

    @property
    def given(self) -> dict[str, int]:
        """As the user gave it."""
        return {self.unit: self.total}

    def of(self, shard: int, num_logical_shards: int) -> Cap:
        """The same in another logical shard."""
        return replace(self, limit=part_of(self.unit, self.total, shard, num_logical_shards))

    def limits(self, shards: Iterable[int], num_logical_shards: int) -> Ints:
        """Of each of the logical shards."""
        return np.array([part_of(self.unit, self.total, shard, num_logical_shards) for shard in shards])

    def drawn(self, position: View) -> int:
        count: int = position[self.slot]
        return max(count, ~count)

    def reached(self, position: View) -> bool:
        return self.drawn(position) >= self.limit


def part_of(unit: str, total: int, shard: int, num_logical_shards: int) -> int:
    """What a logical shard gets of a cap."""
    if unit == "epochs":
        return total
    return total * (shard + 1) // num_logical_shards - total * shard // num_logical_shards


def cap_of(
    name: str, given: Mapping[str, int], node: Node[Any], slots: slice, row: MixtureRow, shard: tuple[int, int]
) -> Cap:
    """The cap of a source, and where the mixture counts what it holds for.

    Args:
        node: The source.
        slots: The part of the mixture's position that is its own.
        row: What the mixture itself keeps there.
        shard: The index of the logical shard, and how many there are.
    """
    unit, total = next(iter(given.items()))
    slot = {"samples": row.drawn, "tokens": row.tokens}.get(unit, row.drawn).start + row.names.index(name)
    if unit == "epochs":
        readers = readers_of(node, slots.start)
        if len(readers) != 1:
            raise ValueError(
                f"caps[{name!r}]={{'epochs': {total}}}: the source reads {len(readers)} rd.Reader, so its epochs are not "
                f"those of one. Cap its samples, or the readers in a mixture of their own."
            )
        slot = readers[0][1]
    return Cap(unit, total, part_of(unit, total, *shard), slot)


def check_caps(caps: Mapping[str, Mapping[str, int]], names: list[str], unit: str) -> None:
    """``ValueError`` where caps are none, or of sources that are not there."""
    require(Mapping, "a dict", caps=caps)
    require(Mapping, "a dict", **{f"caps[{name!r}]": cap for name, cap in caps.items()})
    for name, cap in caps.items():
        if name not in names:
            raise ValueError(f"caps has {name!r}, and the sources are {names}: cap one of them.")
        if len(cap) != 1 or (given := next(iter(cap))) not in UNITS:
            raise ValueError(
                f"caps[{name!r}]={dict(cap)}: give one of {{'epochs': n}}, {{'samples': n}}, {{'tokens': n}}."
            )
        if given == "tokens" and unit != "tokens":
            raise ValueError(f"caps[{name!r}]={dict(cap)}: tokens are counted by unit='tokens', with column=.")
        require_int(**{f"caps[{name!r}][{given!r}]": cap[given]})
        if cap[given] < 1:
            raise ValueError(f"caps[{name!r}]={dict(cap)}: give at least 1; for a source that rests, weight 0.")
