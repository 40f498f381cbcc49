"""Plans the segments of a run, one after the other; each ends at a step boundary that is the same on every rank.

In the main phase of an epoch, the layout determines which rank serves what. With ``repeat=False`` the remainder follows, in a
segment of its own; then the next epoch begins.

    origin                        stop, origin                 stop, origin
      |  main phase, u = 0, 1, ...  |  remainder, u = 0, 1, ...  |  next epoch

If only reading can find how much is left, the remainder is redistributed in rounds (`EpochEnds`), each a segment of its own.
"""

from __future__ import annotations

import sys
from dataclasses import replace

from rescale_data.engine.cursor import Cursor
from rescale_data.engine.ends import EpochEnds
from rescale_data.engine.recipe import EPOCH_ENDED, FIRST_SLOT, NO_REMAINDER, REMAINDER_COLUMN, SAMPLES
from rescale_data.engine.segment import Segment
from rescale_data.errors import DataStateError
from rescale_data.layout.clock import Clock
from rescale_data.layout.remainder import Remainder
from rescale_data.state import Ints


def next_segment(cursor: Cursor, ends: EpochEnds) -> Cursor:
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
        return _next_round(cursor, ends)
    samples_left = cursor.segment.samples_left - cursor.segment.samples_delivered(cursor.u)
    num_delivered = cursor.segment.samples_before(cursor.u)
    return _begin_remainder(cursor, cursor.positions.copy(), samples_left, num_delivered, ends, is_known=True)


def _plan_segment(cursor: Cursor, ends: EpochEnds) -> Cursor:
    """Return the cursor with a planned segment, given a cursor without one whose table rows are all up to date."""
    table, layout = cursor.positions, ends.layout
    samples, planned = table[:, SAMPLES].copy(), table[:, REMAINDER_COLUMN].copy()
    num_left = ends.samples_left_in_epoch(table)
    if (planned == NO_REMAINDER).all():
        stop = None if num_left is None else max(layout.main_phase_end(samples, num_left, cursor.u), cursor.u)
        segment = _segment(ends, cursor.u, stop, samples, num_left)
    elif num_left is None and not cursor.u:  # a round that has not begun: perhaps planned for another global batch
        return _next_round(cursor, ends)
    else:
        drawn = samples - Remainder(layout, planned, samples, False).samples_delivered(cursor.u)
        segment = _remainder_segment(ends, cursor.u, planned, drawn, is_known=num_left is not None)
    return cursor._replace(segment=segment, owners=ends.owners)


def _next_round(cursor: Cursor, ends: EpochEnds) -> Cursor:
    """Return the cursor at the next round of a remainder (the end of an epoch) if the size of an epoch is found by reading."""
    table, num_left = ends.plan_round(cursor)
    return _begin_remainder(cursor, table.copy(), num_left, table[:, SAMPLES].copy(), ends, is_known=False)


def _begin_remainder(
    cursor: Cursor, table: Ints, num_left: Ints, drawn: Ints, ends: EpochEnds, *, is_known: bool
) -> Cursor:
    """Return the cursor at the start of a remainder, in which `samples_left` samples of each shard are redistributed."""
    table[:, REMAINDER_COLUMN] = num_left
    clock = cursor.clock_now(ends.layout).restarted(ends.layout.global_batch_size)
    segment = _remainder_segment(ends, 0, num_left, drawn, is_known=is_known)
    return _moved_cursor(cursor, clock, table, ends)._replace(segment=segment, owners=ends.owners)


def _end_epoch(cursor: Cursor, remainder: Remainder, ends: EpochEnds) -> Cursor:
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
    table[:, SAMPLES] = remainder.start_samples + delivered
    table[:, REMAINDER_COLUMN] = EPOCH_ENDED
    num_dropped = remainder.num_samples - int(delivered.sum())
    _log_tail(cursor, ends, num_dropped, remainder.num_padded)
    clock = replace(
        clock.restarted(layout.global_batch_size),
        dropped_samples=clock.dropped_samples + num_dropped,
        padded_samples=clock.padded_samples + remainder.num_padded,
    )
    return _moved_cursor(cursor, clock, table, ends)._replace(segment=None, epoch_ended=True)


def _begin_epoch(cursor: Cursor, ends: EpochEnds) -> Cursor:
    table = cursor.positions.copy()
    table[:, REMAINDER_COLUMN] = NO_REMAINDER
    clock = cursor.clock_now(ends.layout).next_epoch(ends.layout.global_batch_size)
    return _moved_cursor(cursor, clock, table, ends)._replace(
        epoch_ended=False, resumed=False, empty_epochs=cursor.empty_epochs + 1
    )


def _moved_cursor(cursor: Cursor, clock: Clock, table: Ints, ends: EpochEnds) -> Cursor:
    return cursor._replace(clock=clock, table=table, u=clock.micro_batch(ends.layout), last_rows=None)


def _remainder_segment(ends: EpochEnds, u: int, samples_left: Ints, samples: Ints, *, is_known: bool) -> Segment:
    """Return the segment of a remainder from micro batch ``u`` on; it has no micro batches if nothing is left."""
    is_last = is_known or samples_left.sum() < ends.layout.global_batch_size
    remainder = Remainder(ends.layout, samples_left, samples, ends.setup.options.tail == "pad" and is_last)
    stop = max(remainder.num_micro_batches, u)
    return _segment(ends, u, stop, samples, samples_left if is_known else None, remainder)


def _segment(
    ends: EpochEnds,
    u: int,
    stop: int | None,
    samples: Ints,
    samples_left: Ints | None,
    remainder: Remainder | None = None,
) -> Segment:
    """Return the segment from micro batch ``u`` on: the part of an epoch before a shard runs out, or the remainder after it."""
    setup, pads = ends.setup, ends.setup.options.tail == "pad"
    first_check = stop if stop is not None else sys.maxsize if setup.recipe.repeat else 0
    first_check = 0 if setup.recipe.verify or remainder is not None else first_check  # a failed proof stays failed
    balanced, histories = setup.options.balance is not None, ends.schema.histories
    return Segment(
        ends.layout, ends.ranks.rank, stop, u, samples, samples_left, remainder, histories, pads, first_check, balanced
    )


def _log_tail(cursor: Cursor, ends: EpochEnds, num_dropped: int, num_padded: int) -> None:
    if num_dropped or num_padded or cursor.empty_epochs:
        # Too few samples, or a load changed the global batch
        log = ends.ranks.warn if cursor.empty_epochs else ends.ranks.info
        log(
            "Epoch %d ended with less than a global batch of %d samples: %d dropped, %d repeated to fill the last one.",
            cursor.clock.epoch,
            ends.layout.global_batch_size,
            num_dropped,
            num_padded,
        )
