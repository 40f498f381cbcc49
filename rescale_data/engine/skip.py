"""Skips micro batches that the trainer leaves out, or that were delivered before a load.

Positions move as if the micro batches were consumed, also over the ends of epochs. `Layout` and `Remainder` compute which
rank serves what. Each rank reads its own block of logical shards, so the ranks that read need not be the ranks that served.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np

from rescale_data.engine.agreement import call_on_all_ranks
from rescale_data.engine.cursor import Cursor
from rescale_data.engine.ends import EpochEnds
from rescale_data.engine.next_segment import next_segment
from rescale_data.engine.recipe import SAMPLES, STAMP_LIMIT
from rescale_data.engine.segment import Segment
from rescale_data.layout.clock import Clock
from rescale_data.layout.layout import Layout

_NOT_ENDED = 1 << 40  # samples: more than a shard has left of any epoch
_STEPS_PER_CHECK = 16
"""The number of steps that ranks read between checks for the end of the epoch, if only reading can find it."""


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


def skip(cursor: Cursor, ends: EpochEnds, num_micro_batches: int) -> Cursor:
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


def _enter_segment(cursor: Cursor, ends: EpochEnds) -> Cursor:
    """Return the cursor in the segment of its next micro batch, or at the end of the epoch if no segment follows."""
    while cursor.segment is not None and cursor.segment.stop == cursor.u:
        cursor = next_segment(cursor, ends)
    return cursor


def _move_cursor(cursor: Cursor, segment: Segment, ends: EpochEnds, u: int) -> Cursor:
    """Return the cursor at micro batch ``u`` of its segment; each rank advances the table rows that it owns (collective)."""
    table = call_on_all_ranks(ends.ranks, partial(ends.table_after_skip, cursor, segment.samples_before(u)))
    return cursor._replace(u=u, table=table, owners=ends.owners)


def _read_until(cursor: Cursor, segment: Segment, ends: EpochEnds, u: int) -> Cursor:
    """Read up to micro batch ``u``, or to the end of an epoch's main phase before it; return the cursor there (collective)."""
    layout, samples, table = ends.layout, segment.samples_before(cursor.u), cursor.table.copy()
    step_end = (u // layout.gradient_accumulation_steps + 1) * layout.gradient_accumulation_steps
    delivered_at_u, delivered_at_step_end = segment.samples_before(u), segment.samples_before(step_end)

    def find() -> int:
        samples_left = np.full(len(table), _NOT_ENDED)
        ends.runner.load(table, segment.histories)
        for shard in ends.owned.tolist():
            num_drawn, next_slots = ends.runner.look_ahead(shard, int(delivered_at_u[shard] - samples[shard]))
            table[shard] = ends.runner.table[shard]
            if next_slots is None:  # it does not end before u; does it end within the next step?
                num_more_samples, next_slots = ends.runner.look_ahead(
                    shard, int(delivered_at_step_end[shard] - delivered_at_u[shard])
                )
                num_drawn += num_more_samples
            if next_slots is not None:
                samples_left[shard] = num_drawn
        return max(cursor.u, layout.main_phase_end(samples, samples_left, cursor.u))

    stop_batch = int(ends.ranks.gather_ints([call_on_all_ranks(ends.ranks, find)]).min())
    if stop_batch > u:
        table[ends.owned, SAMPLES] = delivered_at_u[ends.owned]
        return cursor._replace(table=table, u=u)
    return _move_cursor(cursor, segment, ends, stop_batch)._replace(segment=replace(segment, stop=stop_batch))
