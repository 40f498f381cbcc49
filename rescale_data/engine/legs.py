"""A run goes through *legs*: the main phase of an epoch, in which the layout says who serves what, then, with
``repeat=False``, the deal of what is left, then the next epoch. A leg ends at a step boundary, on every rank at the same.

    origin                        stop, origin            stop, origin
      |  main phase, u = 0, 1, ...  |  deal, u = 0, 1, ...  |  next epoch

Where only reading tells how much is left, it is dealt in rounds (`Rest`), each a leg of its own.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import replace

import numpy as np

from rescale_data.engine.agreement import Agreement, together
from rescale_data.engine.feed import Ahead, Feed, Leg
from rescale_data.engine.position import Position
from rescale_data.engine.recipe import DEALT, ENDED, FIRST_SLOT, SAMPLES, UNDEALT
from rescale_data.engine.rest import Rest
from rescale_data.engine.runner import Runner
from rescale_data.engine.setup import Setup
from rescale_data.engine.taken import Taken
from rescale_data.errors import DataStateError
from rescale_data.layout.clock import Clock
from rescale_data.layout.deal import Deal
from rescale_data.layout.layout import Layout
from rescale_data.state import Ints


class Legs(Position):
    """The position of a run that goes from leg to leg; a `Stream` takes its micro batches.

    Args:
        runner: Draws samples beside the feed: to skip and to count.
        feed: Makes the micro batches.
    """

    def __init__(self, setup: Setup, runner: Runner, feed: Feed) -> None:
        self.schema, self.layout, self.ranks, self.seed = setup.schema, setup.layout, setup.ranks, setup.recipe.seed
        self.runner, self._ahead = runner, Ahead(feed)
        self.repeat, self.tail, self.verify = setup.recipe.repeat, setup.tail, setup.recipe.verify
        self.reset()

    def reset(self) -> None:
        """Go back to the beginning of the run, with the data that there is now."""
        self.rewind()
        self.schema.adopt({})
        self.dropped_samples = self.padded_samples = 0
        self.load(self.schema.fresh_table(self.layout.num_logical_shards), Clock())

    def load(self, table: Ints, clock: Clock) -> None:
        """Go on from a table in which all N rows are right."""
        self.ranks = self.ranks.next_leg
        self._taken, self.clock = Taken(table), clock
        self.leg, self._first, self._samples, self._left = None, self.u, table[:, SAMPLES], None
        self._rest: Rest | None = None
        self._calm_until = 0  # a micro batch
        self.owners = self.layout.owners
        self._agreement: Agreement | None = None
        self.ended = bool((table[:, DEALT] == ENDED).all())
        self._took = self._was_empty = False
        self._size: int | None = None
        self._unproven = ""  # what the proof of this epoch found
        self.rewind()

    def regroup(self, layout: Layout) -> None:
        """Go on with another global batch, as if this moment were saved and loaded (collective); at a step boundary."""
        table, clock, now = self.ranks.merge(self.table, self.owners), self.clock, self.layout
        loaded = clock.loaded((now.global_batch_size, now.dp_world_size, now.micro_batch_size), layout)
        if loaded != clock and not self.ended:
            table[:, DEALT] = UNDEALT
        self.layout = layout
        self.load(table, loaded)

    def move_on(self) -> None:
        """Begin the next epoch, if the last micro batch of this one was taken."""
        if self.ended:
            self.table[:, DEALT] = UNDEALT
            self.clock = self.clock.next_epoch(self.layout.global_batch_size)
            self.ended, self._took, self._size = False, False, None

    # Where it is

    def begin(self) -> Leg | None:
        """The leg that the next micro batch belongs to, planned where it has not begun; `None` at the end of the epoch."""
        if self.is_calm:
            return self.leg
        if self._unproven:
            raise DataStateError(self._unproven)
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        if self.leg is None and not self.ended:
            self._plan()
        self._settle()
        self._conclude()
        leg = self.leg
        if leg is not None and leg.deal is None and self._agreement is None and not self.verify:
            self._calm_until = sys.maxsize if leg.stop is None else leg.stop
        return leg

    @property
    def is_calm(self) -> bool:
        """Whether the next micro batch belongs to the leg of the one before, and there is nothing to look after."""
        return self.u < self._calm_until

    def num_micro_batches_left(self) -> int | None:
        """Micro batches until the epoch ends; `None` where it never does, or cannot be known."""
        leg = self.begin()
        return 0 if leg is None else self.left_of(leg)

    def num_micro_batches(self) -> int | None:
        """Micro batches of the whole epoch, as long as O stays; `None` where it never ends, or cannot be known."""
        if self._size is None and not self.repeat:
            self._size = self.schema.epoch_size(self.table)
        if self._size is None:
            return None
        steps, rest = divmod(self._size, self.layout.global_batch_size)
        return (steps + (self.tail == "pad" and rest > 0)) * self.layout.gradient_accumulation_steps

    # From leg to leg

    def _plan(self) -> None:
        """Begin the leg of this position, in which all rows are right."""
        self._first, self._samples = self.u, self.table[:, SAMPLES].copy()
        end = None if self.repeat else self.schema.epoch_end(self.table)
        self._left = None if end is None else end[0]
        if (self.table[:, DEALT] != UNDEALT).any():
            self._resume_deal()
        elif self.repeat or self._left is None:
            self._start(None)
            if not self.repeat:
                self._agreement = Agreement(self.ranks, self.u, self.layout.gradient_accumulation_steps)
        else:
            self._start(self.layout.last_whole(self._samples, self._left, self.u))

    def _start(self, stop: int | None, deal: Deal | None = None) -> None:
        """Begin a leg; one without a micro batch that is left is over at once."""
        self.rewind()
        self._agreement, self._calm_until = None, 0
        self.owners = self.layout.owners
        stop = None if stop is None else max(stop, self.u)
        self.leg = Leg(self.layout, self.ranks.rank, stop, deal, self.schema.histories, self.tail == "pad")

    def _settle(self) -> None:
        """Find the leg of the next micro batch. It may have failed before, in reading ahead, and goes on from there."""
        while (leg := self.leg) is not None:
            if leg.stop is None and self._agreement is not None:
                if not self._agreement.end(self.u, self._make_until):
                    return
                self._deal()  # as soon as the last micro batch before it has been taken
            elif leg.stop == self.u and not self._is_last(leg.deal):
                self._deal()
            else:
                return

    def _conclude(self) -> None:
        """End the epoch, if its last micro batch has been taken."""
        leg = self.leg
        if leg is not None and leg.deal is not None and leg.stop == self.u:
            self._end_epoch(leg.deal)

    def _deal(self) -> None:
        """Serve what the shards still have to the same ranks: all of it, or, where only reading tells, the next round."""
        if self._left is None:
            table, left = self._the_rest().look(self.table, self.owners, self.schema.histories)
            self.table, samples = table.copy(), table[:, SAMPLES].copy()
        else:
            self.table = self.table.copy()
            delivered = self._main_phase(self.u)
            samples, left = self._samples + delivered, self._left - delivered
        self.clock = self.clock.restarted(self.layout.global_batch_size)
        self.table[:, DEALT] = left
        self._serve(left, samples)

    def _resume_deal(self) -> None:
        if self._left is None and not self.u:  # a round that has not begun: perhaps it was another global batch's
            self._deal()
            return
        left = self.table[:, DEALT].copy()
        self._serve(left, self._samples - Deal(self.layout, left, self._samples, False).delivered(self.u))

    def _serve(self, left: Ints, samples: Ints) -> None:
        deal = Deal(self.layout, left, samples, pad=False)
        if self.tail == "pad" and self._is_last(deal):
            deal = replace(deal, pad=True)
        self._start(deal.num_micro_batches, deal)

    def _is_last(self, deal: Deal | None) -> bool:
        """Whether the epoch ends with this deal, and another round does not follow."""
        return deal is not None and (self._left is not None or deal.num_samples < self.layout.global_batch_size)

    # The end of an epoch

    def _end_epoch(self, deal: Deal) -> None:
        if self._was_empty and not self._took:
            raise DataStateError(
                f"Two epochs in a row hold less than one global batch of {self.layout.global_batch_size} samples. Use a "
                f"smaller global_batch_size, more data, tail='pad', or repeat=True."
            )
        begins = self._next_epoch()  # before all else: reading may have to go on again
        delivered = deal.delivered(self.u)
        if self.verify:
            self._prove(deal)
        self.table = self.table.copy()
        self.table[:, FIRST_SLOT:] = begins
        self.table[:, SAMPLES] = deal.samples + delivered
        self.table[:, DEALT] = ENDED
        self._count_tail(deal.num_samples - int(delivered.sum()), deal.num_padded)
        self.clock = self.clock.restarted(self.layout.global_batch_size)
        self.ended, self._was_empty = True, not self._took
        self.leg = self._agreement = self._rest = None
        self._calm_until = 0
        self.rewind()

    def _next_epoch(self) -> Ints:
        end = self.schema.epoch_end(self.table)
        if end is not None:
            return end[1]
        return self._the_rest().next_epoch(self.table, self.owners, self.schema.histories)

    def _prove(self, deal: Deal) -> None:
        """That every row of the epoch was delivered once or dropped, over all legs: else ``DataStateError`` on all ranks."""
        self._ahead.feed.stop()
        self.runner.load(self.table, self.schema.histories)
        dropped = deal.left - deal.delivered(self.u)
        mine = np.flatnonzero(self.owners == self.ranks.rank).tolist()
        try:
            together(self.ranks, lambda: [self.runner.prove(shard, int(dropped[shard])) for shard in mine])
        except DataStateError as error:
            self._unproven = f"Epoch {self.epoch} does not end as it should. {error}"
            raise DataStateError(self._unproven) from None
        self.ranks.log(
            logging.INFO,
            "Epoch %d: every row was delivered once, or is of the %d samples that are dropped, across all legs of the run.",
            self.epoch,
            int(dropped.sum()),
        )

    def _count_tail(self, num_dropped: int, num_padded: int) -> None:
        self.dropped_samples += num_dropped
        self.padded_samples += num_padded
        if num_dropped or num_padded or not self._took:
            self.ranks.log(  # nothing was taken: it was loaded with another global batch, or is too small
                logging.INFO if self._took else logging.WARNING,
                "Epoch %d ended with less than a global batch of %d samples: %d dropped, %d repeated to fill the last one.",
                self.epoch,
                self.layout.global_batch_size,
                num_dropped,
                num_padded,
            )

    def _the_rest(self) -> Rest:
        self._ahead.feed.stop()
        if self._rest is None:
            self._rest = Rest(self.layout, self.ranks, self.runner, self.table.shape[1])
        return self._rest

    # Making ahead

    def start(self) -> None:
        """Let the feed begin with the next micro batch, if it has not begun."""
        if self.leg is None:
            self.begin()
        if self.leg is not None and not self._ahead.is_started:
            self._ahead.start(self.leg, self.table, self.u)

    def _make_until(self, u: int) -> int:
        """Make micro batches up to u, if no shard ends before; the first that is not made."""
        self.start()
        return self.u + self._ahead.make(u - self.u, self.ranks)

    def rewind(self) -> None:
        """Forget what was made and not taken; no more is made until the next is asked for."""
        self._ahead.forget()
        self._failure: Exception | None = None
