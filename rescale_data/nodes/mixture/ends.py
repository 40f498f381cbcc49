"""Ends of a mixture's sources: predicted without drawing, where possible; and errors if a source must not end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from rescale_data.errors import DataStateError
from rescale_data.nodes.base import Node, View
from rescale_data.nodes.below import epoch_end, readers_of
from rescale_data.nodes.bound import MAX_EMPTY_EPOCHS
from rescale_data.nodes.mixture.circle import Arc, Circle
from rescale_data.nodes.mixture.row import DRAWS_SLOT, MixtureRow
from rescale_data.state import Ints

ENDLESS_NUM_SAMPLES = 1 << 62
"""Number of samples left in a source that never ends, because it begins its next epoch at once."""


def mixture_epoch_end(
    row: MixtureRow, sources: Mapping[str, tuple[Node[Any], slice]], weights: Sequence[float], rows: Ints, shards: Ints
) -> tuple[Ints, Ints] | None:
    """Return the number of samples left in the epoch and the positions at its end; each source is read to its end.

    Args:
        row: The slots of the mixture's own values.
        sources: Node and slots of each source, by name.
        weights: Weights of the sources, equal at all positions in ``rows``.
        rows, shards: As in `rescale_data.nodes.below.epoch_end`.
    """
    num_left, end_positions = np.zeros(len(rows), dtype=np.int64), rows.copy()
    drawn_counts = end_positions[:, row.drawn_slots]
    is_active = (drawn_counts >= 0) & (np.array(weights) != 0)
    drawn_counts[:] = np.maximum(drawn_counts, ~drawn_counts)
    for i, (node, slots) in enumerate(sources.values()):
        source_end = epoch_end(node, rows[:, slots], shards)
        if source_end is None:
            return None
        num_drawn = np.where(is_active[:, i], source_end[0], 0)
        num_left += num_drawn
        drawn_counts[:, i] += num_drawn
        end_positions[:, slots] = np.where(is_active[:, i, None], source_end[1], rows[:, slots])
    end_positions[:, DRAWS_SLOT] += num_left
    return num_left, end_positions


def samples_left(
    sources: Iterable[tuple[Node[Any], slice]],
    position: View,
    shard_and_count: tuple[int, int],
    final_epochs: Mapping[int, int],
    *,
    is_endless: bool,
) -> list[int] | None:
    """Return how many samples a mixture can still draw from each source before that source ends; `None` if not known.

    Args:
        sources: Node and slots of each source.
        position: The position of the mixture.
        shard_and_count: The index of the logical shard, and the number of logical shards.
        final_epochs: By number of the source, the epoch at which the mixture stops drawing from it.
        is_endless: True if sources begin their next epoch at once, up to ``final_epochs``; else each epoch is an end.
    """
    position_row, shards = np.array(position)[None], np.array([shard_and_count[0]])
    num_left: list[int] = []
    for source, (node, slots) in enumerate(sources):
        if is_endless and source not in final_epochs:
            num_left.append(ENDLESS_NUM_SAMPLES)
            continue
        source_end = epoch_end(node, position_row[:, slots], shards)
        if source_end is None:
            return None
        num_left.append(int(source_end[0][0]))
        if is_endless and source in final_epochs:
            reader, slot = readers_of(node, 0)[0]
            num_left[-1] += reader.rows.num_rows(int(source_end[1][0, slot]), final_epochs[source], shard_and_count[0])
    return num_left


def first_end(circle: Circle, first_draw: int, stop_draw: int, arcs: list[Arc], num_left: list[int]) -> tuple[int, int]:
    """Return the first draw at which a source has no sample left, and that source; ``stop_draw`` and -1 if there is none."""
    ended_source = -1
    for source, (arc, limit) in enumerate(zip(arcs, num_left, strict=True)):
        if circle.count(first_draw, stop_draw, arc) > limit:
            stop_draw, ended_source = circle.find_draw(first_draw, arc, limit), source
    return stop_draw, ended_source


def refuse_empty_source(name: str, unit: str, shard: tuple[int, int]) -> NoReturn:
    """Raise ``DataStateError`` for a source that began again too often without yielding anything."""
    raise DataStateError(
        f"The source {name!r} of a mixture yielded no {unit[:-1]} in {MAX_EMPTY_EPOCHS} whole epochs "
        f"of logical shard {shard[0]} of {shard[1]}: all of its rows were filtered out or are empty, or "
        f"it has none. Use fewer logical shards, more data, or weight 0."
    )


def refuse_stream_end(max_epochs: Mapping[str, int], shard: tuple[int, int]) -> NoReturn:
    """Raise ``DataStateError`` for an endless stream that has ended, because all sources have reached their `max_epochs`."""
    raise DataStateError(
        f"All sources of a mixture have reached their max_epochs, {dict(max_epochs)}, in logical shard {shard[0]} of "
        f"{shard[1]}, and the stream is to be endless (repeat=True). Give more epochs, a source without max_epochs, or "
        f"repeat=False, where the stream ends."
    )
