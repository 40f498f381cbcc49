"""Moves a cursor without a batch: into the next segment of the run, or over samples that are skipped.

Segments follow one another; each ends at a step boundary that is the same on every rank. In the main phase of an epoch, the
layout determines which rank serves what. With ``repeat=False`` the remainder follows, in a segment of its own; then the next
epoch begins.

    origin                        stop, origin                 stop, origin
      |  main phase, u = 0, 1, ...  |  remainder, u = 0, 1, ...  |  next epoch

If only reading can find how much is left, the remainder is redistributed in rounds (`EpochEndFinder`), each a segment
of its own.

Samples are skipped that the trainer leaves out, or that were delivered before a load. Positions move as if the micro batches
were consumed, also over the ends of epochs. `Layout` and `Remainder` compute which rank serves what. Each rank reads its own
block of logical shards, so the ranks that read need not be the ranks that served.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial

import numpy as np

from rescale_data.engine.cursor import Cursor
from rescale_data.engine.ends import EpochEndFinder
from rescale_data.engine.ranks.ranks import call_on_all_ranks
from rescale_data.engine.recipe import EPOCH_ENDED, FIRST_SLOT, NO_REMAINDER, REMAINDER_COLUMN, SAMPLES, STAMP_LIMIT
from rescale_data.engine.segment import EpochSegment
from rescale_data.errors import DataStateError
from rescale_data.layout.clock import Clock
from rescale_data.layout.layout import Layout
from rescale_data.layout.remainder import Remainder
from rescale_data.state import Ints

_NO_END_SEEN = 1 << 40  # samples: more than a shard has left of any epoch
_STEPS_PER_CHECK = 16
"""The number of steps that ranks read between checks for the end of the epoch, if only reading can find it."""


def next_segment(cursor: Cursor, ends: EpochEndFinder) -> Cursor:
    """Return the cursor moved into the next segment, given a cursor after the last micro batch of its segment.

    The result depends on the cursor and on the ends that `ends` finds, and on nothing else. Collective if only reading can find
    them.
    """
    if cursor.epoch_ended:
        return _begin_epoch(cursor, ends)
    if cursor.segment is None:
        return _plan_segment(cursor, ends)
    if cursor.segment.remainder is not None and cursor.segment.is_last:
        return _end_epoch(cursor, cursor.segment.remainder, ends)
    if cursor.segment.samples_left is None:
        return _next_remainder_round(cursor, ends)
    samples_left = cursor.segment.samples_left - cursor.segment.samples_delivered(cursor.u)
    num_delivered = cursor.segment.samples_before(cursor.u)
    return _begin_remainder(cursor, cursor.positions.copy(), samples_left, num_delivered, ends, is_size_known=True)


def _plan_segment(cursor: Cursor, ends: EpochEndFinder) -> Cursor:
    """Return the cursor with a planned segment, given a cursor without one whose table rows are all up to date."""
    table, layout = cursor.positions, ends.layout
    samples, planned = table[:, SAMPLES].copy(), table[:, REMAINDER_COLUMN].copy()
    num_left = ends.samples_left_in_epoch(table)
    if (planned == NO_REMAINDER).all():
        stop = None if num_left is None else max(layout.epoch_remainder_start(samples, num_left, cursor.u), cursor.u)
        segment = _segment(ends, cursor.u, stop, samples, num_left, None)
    elif num_left is None and not cursor.u:  # a round that has not begun: perhaps planned for another global batch
        return _next_remainder_round(cursor, ends)
    else:
        drawn = samples - Remainder(layout, planned, samples, False).samples_delivered(cursor.u)
        segment = _remainder_segment(ends, cursor.u, planned, drawn, is_size_known=num_left is not None)
    return cursor._replace(segment=segment, owners=ends.owners)


def _next_remainder_round(cursor: Cursor, ends: EpochEndFinder) -> Cursor:
    """Return the cursor at the next round of a remainder (the end of an epoch) if the size of an epoch is found by reading."""
    table, samples_left = ends.plan_remainder_round(cursor)
    return _begin_remainder(cursor, table.copy(), samples_left, table[:, SAMPLES].copy(), ends, is_size_known=False)


def _begin_remainder(
    cursor: Cursor, table: Ints, samples_left: Ints, drawn: Ints, ends: EpochEndFinder, *, is_size_known: bool
) -> Cursor:
    """Return the cursor at the start of a remainder, in which `samples_left` samples of each shard are redistributed."""
    table[:, REMAINDER_COLUMN] = samples_left
    clock = cursor.clock_now(ends.layout).with_origin_now(ends.layout.global_batch_size)
    segment = _remainder_segment(ends, 0, samples_left, drawn, is_size_known=is_size_known)
    return _cursor_at_clock(cursor, clock, table, ends)._replace(segment=segment, owners=ends.owners)


def _end_epoch(cursor: Cursor, remainder: Remainder, ends: EpochEndFinder) -> Cursor:
    """Return the cursor at the end of an epoch, given a cursor after the last micro batch of the epoch."""
    layout, clock = ends.layout, cursor.clock_now(ends.layout)
    if cursor.empty_epochs > 1:
        raise DataStateError(
            f"Two epochs in a row hold less than one global batch of {layout.global_batch_size} samples. Use a smaller "
            f"global_batch_size, more data, tail='pad', or repeat=True."
        )
    next_positions = ends.next_epoch(cursor)  # before all else: it may read, fail, and have to go on
    delivered = remainder.samples_delivered(cursor.u)
    ends.verify_epoch(cursor, remainder.samples_left - delivered)
    table = cursor.positions.copy()
    table[:, FIRST_SLOT:] = next_positions
    table[:, SAMPLES] = remainder.samples_at_start + delivered
    table[:, REMAINDER_COLUMN] = EPOCH_ENDED
    num_dropped = remainder.num_samples - int(delivered.sum())
    _log_tail(cursor, ends, num_dropped, remainder.num_padding_samples)
    clock = replace(
        clock.with_origin_now(layout.global_batch_size),
        dropped_samples=clock.dropped_samples + num_dropped,
        padded_samples=clock.padded_samples + remainder.num_padding_samples,
    )
    return _cursor_at_clock(cursor, clock, table, ends)._replace(segment=None, epoch_ended=True)


def _begin_epoch(cursor: Cursor, ends: EpochEndFinder) -> Cursor:
    table = cursor.positions.copy()
    table[:, REMAINDER_COLUMN] = NO_REMAINDER
    clock = cursor.clock_now(ends.layout).next_epoch(ends.layout.global_batch_size)
    return _cursor_at_clock(cursor, clock, table, ends)._replace(
        epoch_ended=False, resumed=False, empty_epochs=cursor.empty_epochs + 1
    )


def _cursor_at_clock(cursor: Cursor, clock: Clock, table: Ints, ends: EpochEndFinder) -> Cursor:
    return cursor._replace(clock=clock, table=table, u=clock.micro_batch(ends.layout), last_rows=None)


def _remainder_segment(
    ends: EpochEndFinder, u: int, samples_left: Ints, samples: Ints, *, is_size_known: bool
) -> EpochSegment:
    """Return the segment of a remainder from micro batch ``u`` on; it has no micro batches if nothing is left."""
    is_last = is_size_known or samples_left.sum() < ends.layout.global_batch_size
    remainder = Remainder(ends.layout, samples_left, samples, ends.setup.options.tail == "pad" and is_last)
    stop = max(remainder.num_micro_batches, u)
    return _segment(ends, u, stop, samples, samples_left if is_size_known else None, remainder)


def _segment(
    ends: EpochEndFinder,
    u: int,
    stop: int | None,
    samples: Ints,
    samples_left: Ints | None,
    remainder: Remainder | None,
) -> EpochSegment:
    """Return the segment from micro batch ``u`` on: the part of an epoch before a shard runs out, or the remainder after it."""
    setup, pads = ends.setup, ends.setup.options.tail == "pad"
    end_check_u = stop if stop is not None else sys.maxsize if setup.recipe.repeat else 0
    end_check_u = 0 if setup.recipe.verify or remainder is not None else end_check_u  # a failed proof stays failed
    balanced, histories = setup.options.balance is not None, ends.schema.histories
    return EpochSegment(
        ends.layout, ends.ranks.rank, stop, u, samples, samples_left, remainder, histories, pads, end_check_u, balanced
    )


def _log_tail(cursor: Cursor, ends: EpochEndFinder, num_dropped: int, num_padding_samples: int) -> None:
    if num_dropped or num_padding_samples or cursor.empty_epochs:
        # Too few samples, or a load changed the global batch
        log = ends.ranks.warn if cursor.empty_epochs else ends.ranks.info
        log(
            "Epoch %d ended with less than a global batch of %d samples: %d dropped, %d repeated to fill the last one.",
            cursor.clock.epoch,
            ends.layout.global_batch_size,
            num_dropped,
            num_padding_samples,
        )


# Skipping


def require_micro_batches(call: str, num_samples: int, layout: Layout, clock: Clock, *, whole_steps: bool) -> int:
    """Return how many micro batches ``num_samples`` samples after ``clock`` fill; raise ``ValueError`` if they do not.

    Args:
        call: The call of the user, for messages.
        num_samples: A number of samples over all ranks; a state can count no more than the stamps of rows (`STAMP`).
        whole_steps: True if steps are balanced: samples of a step change places within it.
    """
    unit, max_samples = layout.micro_step_samples, STAMP_LIMIT // layout.num_logical_shards - 1
    if num_samples < 0 or num_samples % unit:
        raise ValueError(
            f"{call}: give a multiple of dp_world_size * micro_batch_size = {layout.dp_world_size} * {layout.micro_batch_size} "
            f"= {unit}, counted over all ranks."
        )
    if clock.samples + num_samples > max_samples:
        raise ValueError(
            f"{call}: it would end at sample {clock.samples + num_samples}, and a state with num_logical_shards="
            f"{layout.num_logical_shards} counts up to {max_samples}. Give less."
        )
    if whole_steps and num_samples and (clock.samples + num_samples - clock.origin) % layout.global_batch_size:
        raise ValueError(
            f"{call} with balance= ends within a step, whose samples change places: give whole steps, of "
            f"global_batch_size={layout.global_batch_size} samples."
        )
    return num_samples // unit


def skip(cursor: Cursor, ends: EpochEndFinder, num_micro_batches: int) -> Cursor:
    """Return the cursor advanced by `num_micro_batches` micro batches (collective if only reading can find epoch ends).

    Args:
        cursor: A cursor whose `last_rows` is `None`.
    """
    verify = ends.setup.recipe.verify
    while num_micro_batches:
        segment, u = cursor.segment, cursor.u
        if segment is None:
            cursor = _enter_segment(next_segment(cursor, ends), ends)
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
        cursor = _enter_segment(cursor._replace(empty_epochs=0 if cursor.u > u else cursor.empty_epochs), ends)
    return cursor._replace(end_of_steps_seen=False, resumed=False)


def _enter_segment(cursor: Cursor, ends: EpochEndFinder) -> Cursor:
    """Return the cursor in the segment of its next micro batch, or at the end of the epoch if no segment follows."""
    while cursor.segment is not None and cursor.segment.stop == cursor.u:
        cursor = next_segment(cursor, ends)
    return cursor


def _move_cursor(cursor: Cursor, segment: EpochSegment, ends: EpochEndFinder, u: int) -> Cursor:
    """Return the cursor at micro batch ``u`` of its segment; each rank advances the table rows that it owns (collective)."""
    skip_owned = partial(ends.table_after_skip, cursor, segment.samples_before(u))
    table = call_on_all_ranks(ends.ranks_at(cursor, u), skip_owned)
    return cursor._replace(u=u, table=table, owners=ends.owners)


def _read_until(cursor: Cursor, segment: EpochSegment, ends: EpochEndFinder, u: int) -> Cursor:
    """Read up to micro batch ``u``, or to the end of an epoch's main phase before it; return the cursor there (collective)."""
    layout, samples, table = ends.layout, segment.samples_before(cursor.u), cursor.table.copy()
    step_end = (u // layout.gradient_accumulation_steps + 1) * layout.gradient_accumulation_steps
    delivered_so_far, delivered_at_step_end = segment.samples_before(u), segment.samples_before(step_end)

    def find_segment_stop() -> int:
        samples_left = np.full(len(table), _NO_END_SEEN)
        runner = ends.setup.runner
        runner.load(table, segment.histories)
        for shard in ends.owned.tolist():
            num_drawn, next_slots = runner.look_ahead(shard, int(delivered_so_far[shard] - samples[shard]))
            table[shard] = runner.table[shard]
            if next_slots is None:  # it does not end before u; does it end within the next step?
                num_more_samples, next_slots = runner.look_ahead(
                    shard, int(delivered_at_step_end[shard] - delivered_so_far[shard])
                )
                num_drawn += num_more_samples
            if next_slots is not None:
                samples_left[shard] = num_drawn
        return max(cursor.u, layout.epoch_remainder_start(samples, samples_left, cursor.u))

    ranks = ends.ranks_at(cursor, step_end)  # not u, to which `_move_cursor` may go
    stop_batch = int(ranks.begin_gather_ints([call_on_all_ranks(ranks, find_segment_stop)], "ends")().min())
    if stop_batch > u:
        table[ends.owned, SAMPLES] = delivered_so_far[ends.owned]
        return cursor._replace(table=table, u=u)
    return _move_cursor(cursor, segment, ends, stop_batch)._replace(segment=replace(segment, stop=stop_batch))
