"""The ends of a mixture's sources, as far as they are known without drawing, and errors if a source may not end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn

import numpy as np

from rescale_data.errors import DataStateError
from rescale_data.nodes.base import Node, View
from rescale_data.nodes.below import epoch_end, readers_of, skip
from rescale_data.nodes.bound import SILENT_EPOCHS
from rescale_data.nodes.mixture.circle import Arc, Circle
from rescale_data.nodes.mixture.row import NUM, MixtureRow
from rescale_data.state import Ints

ENDLESS = 1 << 62
"""Number of samples left of a source that goes on from epoch to epoch."""


def end_of_all(
    row: MixtureRow, sources: Mapping[str, tuple[Node[Any], slice]], weights: Sequence[float], rows: Ints, shards: Ints
) -> tuple[Ints, Ints] | None:
    """Return `rescale_data.nodes.below.epoch_end` of a mixture by samples that reads each source to its end.

    Args:
        row: The slots of the mixture's own values.
        sources: Node and slots of each source, by name.
        weights: Weights of the sources, equal at all positions in ``rows``.
        rows, shards: As in `rescale_data.nodes.below.epoch_end`.
    """
    left, after = np.zeros(len(rows), dtype=np.int64), rows.copy()
    drawn = after[:, row.drawn]
    going = (drawn >= 0) & (np.array(weights) != 0)
    drawn[:] = np.maximum(drawn, ~drawn)
    for i, (node, slots) in enumerate(sources.values()):
        end = epoch_end(node, rows[:, slots], shards)
        if end is None:
            return None
        taken = np.where(going[:, i], end[0], 0)
        left += taken
        drawn[:, i] += taken
        after[:, slots] = np.where(going[:, i, None], end[1], rows[:, slots])
    after[:, NUM] += left
    return left, after


def samples_left(
    sources: Iterable[tuple[Node[Any], slice]],
    position: View,
    shard: tuple[int, int],
    stops: Mapping[int, int],
    *,
    endless: bool,
) -> list[int] | None:
    """Return the number of samples that a mixture can still draw from each source before it ends; `None` if it is not known.

    Args:
        sources: Node and slots of each source.
        position: The position of the mixture.
        shard: The index of the logical shard, and the number of logical shards.
        stops: By number of the source, the epoch at which the mixture has had enough of it.
        endless: True if all other sources never end.
    """
    row, shards = np.array(position)[None], np.array([shard[0]])
    lefts: list[int] = []
    for source, (node, slots) in enumerate(sources):
        if endless and source not in stops:
            lefts.append(ENDLESS)
            continue
        end = epoch_end(node, row[:, slots], shards)
        if end is None:
            return None
        lefts.append(int(end[0][0]))
        if source in stops:
            reader, slot = readers_of(node, 0)[0]
            lefts[-1] += reader.rows.num_rows(int(end[1][0, slot]), stops[source], shard[0])
    return lefts


def first_end(circle: Circle, first: int, stop: int, parts: list[Arc], lefts: list[int]) -> tuple[int, int]:
    """Return the first draw at which a source has nothing left, and that source; ``stop`` and -1 if there is none."""
    ended = -1
    for source, (part, left) in enumerate(zip(parts, lefts, strict=True)):
        if circle.count(first, stop, part) > left:
            stop, ended = circle.find(first, part, left), source
    return stop, ended


def leave_out_of_epoch(node: Node[Any], shard: int, most: int) -> int:
    """Leave out up to ``most`` samples of a source and return their number; it is smaller if the epoch ends."""
    num = 0
    end = epoch_end(node, np.array(node.position)[None], np.array([shard]))
    if end is not None:
        num = min(most, int(end[0][0]))
        skip(node, num)
    else:
        with suppress(StopIteration):
            while num < most:
                skip(node, 1)
                num += 1
    return num


def refuse_silent(name: str, unit: str, shard: tuple[int, int]) -> NoReturn:
    """Raise ``DataStateError``: a source has begun again too often without yielding anything."""
    raise DataStateError(
        f"The source {name!r} of a mixture yielded no {unit[:-1]} in {SILENT_EPOCHS} whole epochs "
        f"of logical shard {shard[0]} of {shard[1]}: all of its rows were filtered out or are empty, or "
        f"it has none. Use fewer logical shards, more data, or weight 0."
    )


def refuse_end(max_epochs: Mapping[str, int], shard: tuple[int, int]) -> NoReturn:
    """Raise ``DataStateError``: an endless stream has ended, because all sources have reached their `max_epochs`."""
    raise DataStateError(
        f"All sources of a mixture have reached their max_epochs, {dict(max_epochs)}, in logical shard {shard[0]} of "
        f"{shard[1]}, and the stream is to be endless (repeat=True). Give more epochs, a source without max_epochs, or "
        f"repeat=False, where the stream ends."
    )
