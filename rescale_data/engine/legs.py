"""A run goes through *legs*: the main phase of an epoch, in which the layout says who serves what, then, with
``repeat=False``, the deal of what is left, then the next epoch. A leg ends at a step boundary, on every rank at the same.

    origin                        stop, origin            stop, origin
      |  main phase, u = 0, 1, ...  |  deal, u = 0, 1, ...  |  next epoch

Where only reading tells how much is left, it is dealt in rounds (`Rest`), each a leg of its own.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rescale_data.engine.agreement import together
from rescale_data.engine.leg import Leg, Standing
from rescale_data.engine.position import Position
from rescale_data.engine.recipe import DEALT, ENDED, FIRST_SLOT, SAMPLES, UNDEALT
from rescale_data.engine.rest import Rest
from rescale_data.errors import DataStateError
from rescale_data.layout.deal import Deal
from rescale_data.state import Ints


class Legs:
    """Finds the leg that follows at a position, from a load on: where the run then stands, and its table.

    What is asked of it is collective where only reading tells; it reads with the position's runner.

    Attributes:
        unproven: Why the proof of this epoch failed.
    """

    def __init__(self) -> None:
        self.unproven = ""
        self._rest: Rest | None = None

    def first(self, at: Position) -> tuple[Standing, Ints]:
        """At a position without a leg, in which all rows are right."""
        table = at.table
        samples, end = table[:, SAMPLES].copy(), None if at.repeat else at.schema.epoch_end(table)
        left = None if end is None else end[0]
        if (table[:, DEALT] == UNDEALT).all():
            stop = None if left is None else max(at.layout.last_whole(samples, left, at.u), at.u)
            return replace(at.standing, leg=_leg(at, at.u, stop, samples, left), owners=at.owners), table
        if left is None and not at.u:  # a round that has not begun: perhaps it was another global batch's
            return self._next_round(at)
        dealt = table[:, DEALT].copy()
        before = samples - Deal(at.layout, dealt, samples, False).delivered(at.u)
        leg = _deal(at, at.u, dealt, before, is_known=left is not None)
        return replace(at.standing, leg=leg, owners=at.owners), table

    def deal(self, at: Position, leg: Leg) -> tuple[Standing, Ints]:
        """Serve what the shards still have to the same ranks: all of it, or, where only reading tells, the next round."""
        if leg.left is None:
            return self._next_round(at)
        delivered = leg.delivered(at.u)
        return _dealt(at, at.table.copy(), leg.left - delivered, leg.samples + delivered, is_known=True)

    def end(self, at: Position, deal: Deal) -> tuple[Standing, Ints]:
        """End the epoch, whose last micro batch has been taken."""
        if at.standing.was_empty and at.is_empty:
            raise DataStateError(
                f"Two epochs in a row hold less than one global batch of {at.layout.global_batch_size} samples. Use a "
                f"smaller global_batch_size, more data, tail='pad', or repeat=True."
            )
        begins = self._next_epoch(at)  # before all else: reading may have to go on again
        delivered = deal.delivered(at.u)
        if at.setup.recipe.verify:
            self._prove(at, deal.left - delivered)
        table = at.table.copy()
        table[:, FIRST_SLOT:] = begins
        table[:, SAMPLES] = deal.samples + delivered
        table[:, DEALT] = ENDED
        num_dropped = deal.num_samples - int(delivered.sum())
        _say_tail(at, num_dropped, deal.num_padded)
        self._rest, clock = None, at.clock.restarted(at.layout.global_batch_size)
        ended = replace(
            at.standing,
            clock=replace(
                clock,
                dropped_samples=clock.dropped_samples + num_dropped,
                padded_samples=clock.padded_samples + deal.num_padded,
            ),
            leg=None,
            ended=True,
            was_empty=at.is_empty,
        )
        return ended, table

    def _next_round(self, at: Position) -> tuple[Standing, Ints]:
        table, left = self._the_rest(at).look(at.table, at.standing.owners, at.schema.histories)
        return _dealt(at, table.copy(), left, table[:, SAMPLES].copy(), is_known=False)

    def _next_epoch(self, at: Position) -> Ints:
        end = at.schema.epoch_end(at.table)
        if end is not None:
            return end[1]
        return self._the_rest(at).next_epoch(at.table, at.standing.owners, at.schema.histories)

    def _the_rest(self, at: Position) -> Rest:
        if self._rest is None:
            self._rest = Rest(at)
        return self._rest

    def _prove(self, at: Position, dropped: Ints) -> None:
        """That every row of the epoch was delivered once or dropped, over all legs: else ``DataStateError`` on all ranks."""
        at.runner.load(at.table, at.schema.histories)
        mine = np.flatnonzero(at.standing.owners == at.ranks.rank).tolist()
        try:
            together(at.ranks, lambda: [at.runner.prove(shard, int(dropped[shard])) for shard in mine])
        except DataStateError as error:
            self.unproven = f"Epoch {at.clock.epoch} does not end as it should. {error}"
            raise DataStateError(self.unproven) from None
        at.ranks.info(
            "Epoch %d: every row was delivered once, or is of the %d samples that are dropped, across all legs of the run.",
            at.clock.epoch,
            int(dropped.sum()),
        )


def _leg(at: Position, u: int, stop: int | None, samples: Ints, left: Ints | None, deal: Deal | None = None) -> Leg:
    pads = at.setup.tail == "pad"
    return Leg(at.layout, at.ranks.rank, stop, u, samples, left, deal, at.schema.histories, pads)


def _deal(at: Position, u: int, left: Ints, samples: Ints, *, is_known: bool) -> Leg:
    """A deal that goes on at micro batch u; one without any that is left is over at once."""
    deal = Deal(at.layout, left, samples, pad=False)
    leg = _leg(at, u, max(deal.num_micro_batches, u), samples, left if is_known else None, deal)
    if leg.pads and leg.is_last:
        deal = replace(deal, pad=True)
        leg = replace(leg, deal=deal, stop=max(deal.num_micro_batches, u))
    return leg


def _dealt(at: Position, table: Ints, left: Ints, samples: Ints, *, is_known: bool) -> tuple[Standing, Ints]:
    """Begin a deal."""
    table[:, DEALT] = left
    clock, leg = at.clock.restarted(at.layout.global_batch_size), _deal(at, 0, left, samples, is_known=is_known)
    return replace(at.standing, clock=clock, leg=leg, owners=at.owners), table


def _say_tail(at: Position, num_dropped: int, num_padded: int) -> None:
    if num_dropped or num_padded or at.is_empty:
        say = at.ranks.warn if at.is_empty else at.ranks.info  # loaded with another global batch, or too small
        say(
            "Epoch %d ended with less than a global batch of %d samples: %d dropped, %d repeated to fill the last one.",
            at.clock.epoch,
            at.layout.global_batch_size,
            num_dropped,
            num_padded,
        )
