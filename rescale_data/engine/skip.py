"""Skips micro batches that the trainer leaves out, or that were delivered before a load.

Positions move as if the micro batches were consumed, also over the ends of epochs. `Layout` and `Remainder` compute which
rank serves what. Each rank reads its own block of logical shards, so the ranks that read need not be the ranks that served.
"""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial

import numpy as np

from rescale_data.engine.agreement import call_on_all_ranks
from rescale_data.engine.cursor import Cursor
from rescale_data.engine.ends import EpochEnds
from rescale_data.engine.next_segment import next_segment
from rescale_data.engine.recipe import SAMPLES, STAMP_LIMIT
from rescale_data.engine.segment import Segment
from rescale_data.layout.clock import Clock
from rescale_data.state import Ints

_NOT_ENDED = 1 << 40  # samples: more than a shard has left of any epoch
_STEPS_PER_CHECK = 16
"""The number of steps that ranks read between checks for the end of the epoch, if only reading can find it."""
_COUNT_NAMES = [field.name for field in fields(Clock) if field.name != "skipped"]


def require_countable(call: str, num_samples: int, num_logical_shards: int) -> None:
    """Raise ``ValueError`` if a run would deliver more samples than the stamps in a state can represent (`STAMP`)."""
    max_samples = STAMP_LIMIT // num_logical_shards - 1
    if num_samples > max_samples:
        raise ValueError(
            f"{call}: it would end at sample {num_samples}, and a state with num_logical_shards={num_logical_shards} counts up "
            f"to {max_samples}. Give less."
        )


def skip(cursor: Cursor, ends: EpochEnds, num_micro_batches: int) -> Cursor:
    """Return the cursor advanced by `num_micro_batches` micro batches (collective if only reading can find epoch ends).

    Args:
        cursor: A cursor whose `last_rows` is `None`.
    """
    epoch_starts: list[tuple[int, Ints]] = []  # of epochs: the micro batches left to skip, and the numbers of the run
    verify = ends.setup.recipe.verify
    while num_micro_batches:
        if cursor.epoch_ended:
            cursor = next_segment(cursor, ends)
            epoch_starts = [*epoch_starts[-2:], (num_micro_batches, _to_run_array(cursor, ends))]
            if not verify:
                cursor, num_micro_batches = _skip_epochs(cursor, ends, epoch_starts)
        cursor = _enter_segment(next_segment(cursor, ends) if cursor.segment is None else cursor, ends)
        segment, u = cursor.segment, cursor.u
        if segment is None:
            continue
        num_to_skip = num_micro_batches if segment.stop is None else min(num_micro_batches, segment.stop - u)
        if segment.stop is None and not ends.setup.recipe.repeat:
            cursor = _read_until(
                cursor, segment, ends, u + min(num_to_skip, _STEPS_PER_CHECK * ends.layout.gradient_accumulation_steps)
            )
        else:
            num_left = segment.micro_batches_left_at(u)
            if num_left is None or num_micro_batches < num_left or verify:  # else no more of this epoch is delivered
                cursor = _move_cursor(cursor, segment, ends, u + num_to_skip)
            cursor = cursor._replace(u=u + num_to_skip)
        num_micro_batches -= cursor.u - u
        cursor = _enter_segment(
            cursor._replace(empty_epochs=0 if cursor.u > u else cursor.empty_epochs, resumed=False), ends
        )
    return cursor


def _enter_segment(cursor: Cursor, end_finder: EpochEnds) -> Cursor:
    """Return the cursor in the segment of its next micro batch, or at the end of the epoch if no segment follows."""
    while cursor.segment is not None and cursor.segment.stop == cursor.u:
        cursor = next_segment(cursor, end_finder)
    return cursor


def _move_cursor(cursor: Cursor, segment: Segment, end_finder: EpochEnds, u: int) -> Cursor:
    """Return the cursor at micro batch ``u`` of its segment; each rank advances the table rows that it owns (collective)."""
    table = call_on_all_ranks(end_finder.ranks, partial(end_finder.move, cursor, segment.samples_before(u)))
    return cursor._replace(u=u, table=table, owners=end_finder.owners)


def _read_until(cursor: Cursor, segment: Segment, ends: EpochEnds, u: int) -> Cursor:
    """Read up to micro batch ``u`` of a main phase, or to its end if that comes first; return the cursor there (collective)."""
    layout, samples, table = ends.layout, segment.samples_before(cursor.u), cursor.table.copy()
    step_end = (u // layout.gradient_accumulation_steps + 1) * layout.gradient_accumulation_steps
    until_u, delivered_at_step_end = segment.samples_before(u), segment.samples_before(step_end)

    def find() -> int:
        samples_left = np.full(len(table), _NOT_ENDED)
        ends.runner.load(table, segment.histories)
        for shard in ends.owned.tolist():
            num_drawn, next_slots = ends.runner.look_ahead(shard, int(until_u[shard] - samples[shard]))
            table[shard] = ends.runner.table[shard]
            if next_slots is None:  # it does not end before u; does it end within the next step?
                num_more, next_slots = ends.runner.look_ahead(shard, int(delivered_at_step_end[shard] - until_u[shard]))
                num_drawn += num_more
            if next_slots is not None:
                samples_left[shard] = num_drawn
        return max(cursor.u, layout.main_phase_end(samples, samples_left, cursor.u))

    stop_u = ends.ranks.min_and_max(call_on_all_ranks(ends.ranks, find))[0]
    if stop_u > u:
        table[ends.owned, SAMPLES] = until_u[ends.owned]
        return cursor._replace(table=table, u=u)
    return _move_cursor(cursor, segment, ends, stop_u)._replace(segment=replace(segment, stop=stop_u))


def _skip_epochs(cursor: Cursor, ends: EpochEnds, epoch_starts: list[tuple[int, Ints]]) -> tuple[Cursor, int]:
    """Skip whole epochs by arithmetic, if the last two epochs advanced the run by the same amount.

    Returns:
        The cursor, and the number of micro batches that are then left to skip, at least 1.
    """
    num_micro_batches, current = epoch_starts[-1]
    whole_steps = ends.layout.aligned or ends.setup.tail == "pad"  # else the dropped samples depend on earlier epochs
    if len(epoch_starts) < 3 or not whole_steps or not ends.schema.epochs_are_alike(cursor.table):
        return cursor, num_micro_batches
    (_, oldest_counts), (batches_left_before, previous), _ = epoch_starts
    if (current - previous != previous - oldest_counts).any():
        return cursor, num_micro_batches
    epoch_size = batches_left_before - num_micro_batches
    epochs = (num_micro_batches - 1) // epoch_size  # at least one micro batch is left: an epoch ends with its last one
    return _from_run_array(
        cursor, ends, current + epochs * (current - previous)
    ), num_micro_batches - epochs * epoch_size


def _to_run_array(cursor: Cursor, end_finder: EpochEnds) -> Ints:
    """Return the table and the counts of a run at the start of an epoch as one array, ``int64[any]``."""
    run_counts = [getattr(cursor.clock_now(end_finder.layout), name) for name in _COUNT_NAMES]
    return np.concatenate([cursor.table.flatten(), np.array(run_counts, dtype=np.int64)])


def _from_run_array(cursor: Cursor, end_finder: EpochEnds, numbers: Ints) -> Cursor:
    table, run_counts = numbers[: cursor.table.size].reshape(cursor.table.shape), numbers[cursor.table.size :].tolist()
    clock = replace(cursor.clock, **dict(zip(_COUNT_NAMES, run_counts, strict=True)))
    return cursor._replace(clock=clock, table=table, u=clock.micro_batch(end_finder.layout))
