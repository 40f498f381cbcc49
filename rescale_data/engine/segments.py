"""The segments of a run, one after the other. Each ends at a step boundary, which is the same on every rank.

In the main phase of an epoch, the layout determines which rank serves what. With ``repeat=False`` the remainder follows, in a
segment of its own; then the next epoch begins.

    origin                        stop, origin                 stop, origin
      |  main phase, u = 0, 1, ...  |  remainder, u = 0, 1, ...  |  next epoch

If only reading can find how much is left, the remainder is redistributed in rounds (`Ends`), each a segment of its own.
"""

from __future__ import annotations

import sys
from dataclasses import replace

from rescale_data.engine.cursor import Cursor
from rescale_data.engine.ends import Ends
from rescale_data.engine.leg import Leg
from rescale_data.engine.recipe import DEALT, ENDED, FIRST_SLOT, SAMPLES, UNDEALT
from rescale_data.errors import DataStateError
from rescale_data.layout.clock import Clock
from rescale_data.layout.deal import Deal
from rescale_data.state import Ints


def next_segment(at: Cursor, ends: Ends) -> Cursor:
    """Return the cursor in the next segment, for a cursor after the last micro batch of its segment.

    The result depends on the cursor and on the ends that `ends` finds, and on nothing else. Collective if only reading can find
    them.
    """
    if at.ended:
        return _begin_epoch(at, ends)
    if at.leg is None:
        return _plan(at, ends)
    if at.leg.deal is not None and at.leg.is_last:
        return _end_epoch(at, at.leg.deal, ends)
    if at.leg.left is None:
        return _next_round(at, ends)
    reached, left = at.leg.reached(at.u), at.leg.left - at.leg.delivered(at.u)
    return _deal(at, at.positions.copy(), left, reached, ends, is_known=True)


def _plan(at: Cursor, ends: Ends) -> Cursor:
    """Return the cursor in the segment of its next micro batch; none was planned, and all rows are right."""
    table, layout = at.positions, ends.layout
    samples, left = table[:, SAMPLES].copy(), ends.left(table)
    if (table[:, DEALT] == UNDEALT).all():
        stop = None if left is None else max(layout.last_whole(samples, left, at.u), at.u)
        return at._replace(leg=_leg(ends, at.u, stop, samples, left), owners=ends.owners)
    if left is None and not at.u:  # a round that has not begun: it may have been planned for another global batch
        return _next_round(at, ends)
    dealt = table[:, DEALT].copy()
    before = samples - Deal(layout, dealt, samples, False).delivered(at.u)
    return at._replace(leg=_leg_of_deal(ends, at.u, dealt, before, is_known=left is not None), owners=ends.owners)


def _next_round(at: Cursor, ends: Ends) -> Cursor:
    """Return the cursor in the next round of a remainder whose size only reading can find."""
    table, left = ends.look(at)
    return _deal(at, table.copy(), left, table[:, SAMPLES].copy(), ends, is_known=False)


def _deal(at: Cursor, table: Ints, left: Ints, samples: Ints, ends: Ends, *, is_known: bool) -> Cursor:
    """Return the cursor at the beginning of a remainder: the samples `left` of each shard, for the same ranks."""
    table[:, DEALT] = left
    clock = at.now(ends.layout).restarted(ends.layout.global_batch_size)
    leg = _leg_of_deal(ends, 0, left, samples, is_known=is_known)
    return _moved(at, clock, table, ends)._replace(leg=leg, owners=ends.owners)


def _end_epoch(at: Cursor, deal: Deal, ends: Ends) -> Cursor:
    """Return the cursor at the end of an epoch whose last micro batch was consumed."""
    layout, clock = ends.layout, at.now(ends.layout)
    if at.idle > 1:
        raise DataStateError(
            f"Two epochs in a row hold less than one global batch of {layout.global_batch_size} samples. Use a smaller "
            f"global_batch_size, more data, tail='pad', or repeat=True."
        )
    begins = ends.next_epoch(at)  # before all else: it may read, fail, and have to go on
    delivered = deal.delivered(at.u)
    ends.prove(at, deal.left - delivered)
    table = at.positions.copy()
    table[:, FIRST_SLOT:] = begins
    table[:, SAMPLES] = deal.samples + delivered
    table[:, DEALT] = ENDED
    num_dropped = deal.num_samples - int(delivered.sum())
    _say_tail(at, ends, num_dropped, deal.num_padded)
    clock = replace(
        clock.restarted(layout.global_batch_size),
        dropped_samples=clock.dropped_samples + num_dropped,
        padded_samples=clock.padded_samples + deal.num_padded,
    )
    return _moved(at, clock, table, ends)._replace(leg=None, ended=True)


def _begin_epoch(at: Cursor, ends: Ends) -> Cursor:
    table = at.positions.copy()
    table[:, DEALT] = UNDEALT
    clock = at.now(ends.layout).next_epoch(ends.layout.global_batch_size)
    return _moved(at, clock, table, ends)._replace(ended=False, resumed=False, idle=at.idle + 1)


def _moved(at: Cursor, clock: Clock, table: Ints, ends: Ends) -> Cursor:
    return at._replace(clock=clock, table=table, u=clock.micro_batch(ends.layout), last=None)


def _leg(ends: Ends, u: int, stop: int | None, samples: Ints, left: Ints | None) -> Leg:
    """Return the main phase of an epoch from micro batch u on."""
    pads, recipe = ends.setup.tail == "pad", ends.setup.recipe
    endless, whole_steps = sys.maxsize if recipe.repeat else 0, ends.setup.balance is not None
    calm_until = 0 if recipe.verify else endless if stop is None else stop  # a failed proof stays failed
    return Leg(
        ends.layout, ends.ranks.rank, stop, u, samples, left, None, ends.schema.histories, pads, calm_until, whole_steps
    )


def _leg_of_deal(ends: Ends, u: int, left: Ints, samples: Ints, *, is_known: bool) -> Leg:
    """Return the segment of a remainder from micro batch u on; it is over at once if no micro batch is left."""
    deal = Deal(ends.layout, left, samples, pad=False)
    leg = _leg(ends, u, max(deal.num_micro_batches, u), samples, left if is_known else None)
    leg = replace(leg, deal=deal, calm_until=0)
    if leg.pads and leg.is_last:
        deal = replace(deal, pad=True)
        leg = replace(leg, deal=deal, stop=max(deal.num_micro_batches, u))
    return leg


def _say_tail(at: Cursor, ends: Ends, num_dropped: int, num_padded: int) -> None:
    if num_dropped or num_padded or at.idle:
        say = ends.ranks.warn if at.idle else ends.ranks.info  # too few samples, or a load changed the global batch
        say(
            "Epoch %d ended with less than a global batch of %d samples: %d dropped, %d repeated to fill the last one.",
            at.clock.epoch,
            ends.layout.global_batch_size,
            num_dropped,
            num_padded,
        )
