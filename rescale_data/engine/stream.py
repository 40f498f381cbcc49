"""The micro batches of one rank, and the state that describes exactly those that were taken."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol, runtime_checkable

from rescale_data.engine.agreement import Agreement
from rescale_data.engine.feed import Ahead, Feed
from rescale_data.engine.leg import Leg, Standing
from rescale_data.engine.legs import Legs
from rescale_data.engine.micro_batch import MicroBatch
from rescale_data.engine.position import Position
from rescale_data.engine.recipe import DEALT, ENDED
from rescale_data.engine.runner import Runner
from rescale_data.engine.setup import Setup
from rescale_data.engine.skip import skip
from rescale_data.engine.taken import Taken
from rescale_data.errors import DataStateError
from rescale_data.layout.clock import Clock
from rescale_data.layout.layout import owners
from rescale_data.state import Ints


@runtime_checkable
class HasStream(Protocol):
    """Whatever reads a stream, and can tell what it consists of."""

    @property
    def stream(self) -> Stream: ...


class Stream(Position):
    """One rank's micro batches, and the position at which the taken ones leave it.

    Args:
        runner: Draws samples beside the feed: to skip and to count.
        feed: Makes the micro batches.
    """

    def __init__(self, setup: Setup, runner: Runner, feed: Feed) -> None:
        self.ahead, beginning = (
            Ahead(feed),
            Standing(Clock(), owners(setup.ranks.world_size, setup.layout.num_logical_shards)),
        )
        super().__init__(setup, runner, beginning, 0, Taken(setup.schema.fresh_table(setup.layout.num_logical_shards)))
        self.load(self.table, Clock())

    def reset(self) -> None:
        """Go back to the beginning of the run, with the data that there is now."""
        self.rewind()
        self.schema.adopt({})
        self.load(self.schema.fresh_table(self.layout.num_logical_shards), Clock())

    def load(self, table: Ints, clock: Clock) -> None:
        """Go on from a table in which all N rows are right."""
        self.use(replace(self.setup, ranks=self.ranks.next_leg))
        self.rows, self._legs, self._size = Taken(table), Legs(), None
        ended = bool((table[:, DEALT] == ENDED).all())
        self.go_to(Standing(clock, self.owners, None, ended, clock.samples), table)

    def go_to(self, standing: Standing, table: Ints) -> None:
        """Go on from here, where another leg or none begins: what was made ahead is of the one before."""
        self.rewind()
        u, in_step, leg = standing.clock.micro_batch(self.layout), self.layout.gradient_accumulation_steps, standing.leg
        ends_unseen = leg is not None and leg.stop is None and not self.repeat
        agreement = Agreement(self.ranks, u, in_step) if ends_unseen else None
        self.table = table  # from here on no call, so that Ctrl-C comes before all of it or after
        self.standing, self.u, self._calm_until = standing, u, 0
        self.epoch, self._in_step, self._agreement = standing.clock.epoch, in_step, agreement

    def move_on(self) -> None:
        self._size = None if self.ended else self._size
        super().move_on()

    # Which leg it is

    def begin(self) -> Leg | None:
        """The leg that the next micro batch belongs to, planned where it has not begun; `None` at the end of the epoch."""
        if self.is_calm:
            return self.leg
        if self._legs.unproven:
            raise DataStateError(self._legs.unproven)
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        if self.leg is None and not self.ended:
            self.ahead.feed.stop()
            self.go_to(*self._legs.first(self))
        self._settle()
        self._conclude()
        leg = self.leg
        if leg is not None and leg.deal is None and self._agreement is None and not self.setup.recipe.verify:
            self._calm_until = sys.maxsize if leg.stop is None else leg.stop
        return leg

    @property
    def is_calm(self) -> bool:
        """Whether the next micro batch belongs to the leg of the one before, and there is nothing to look after."""
        return self.u < self._calm_until

    def _settle(self) -> None:
        """Find the leg of the next micro batch. It may have failed before, in reading ahead, and goes on from there."""
        while (leg := self.leg) is not None:
            if self._agreement is not None:
                if not self._agreement.end(self.u, self._make_until):
                    return
            elif leg.stop != self.u or leg.is_last:
                return
            self.ahead.feed.stop()
            self.go_to(*self._legs.deal(self, leg))  # as soon as the last micro batch before it has been taken

    def _conclude(self) -> None:
        """End the epoch, if its last micro batch has been taken."""
        leg = self.leg
        if leg is not None and leg.deal is not None and leg.stop == self.u:
            self.ahead.feed.stop()
            self.go_to(*self._legs.end(self, leg.deal))

    def num_micro_batches_left(self) -> int | None:
        """Micro batches until the epoch ends; `None` where it never does, or cannot be known."""
        leg = self.begin()
        return 0 if leg is None else leg.left_at(self.u)

    def num_micro_batches(self) -> int | None:
        """Micro batches of the whole epoch, as long as O stays; `None` where it never ends, or cannot be known."""
        if self._size is None and not self.repeat:
            self._size = self.schema.epoch_size(self.table)
        if self._size is None:
            return None
        steps, rest = divmod(self._size, self.layout.global_batch_size)
        return (steps + (self.setup.tail == "pad" and rest > 0)) * self._in_step

    # Taking

    def take(self) -> MicroBatch:
        """The next micro batch; from here on the state says that it was delivered."""
        if self.u + 1 < self._calm_until:
            return self._take_one()
        visited = self.peek().visited
        leg = self.leg
        ends = leg is not None and leg.deal is not None and leg.stop == self.u + 1
        if not (ends or self.setup.recipe.verify):
            return self._take(or_fail=False)
        undo, u = self.rows.undoing(visited), self.u
        before = self.standing, self.rows, self._agreement, self.ahead.made.copy()
        try:
            return self._take(or_fail=True)
        except BaseException:  # an epoch fails, or Ctrl-C comes, in place of its last micro batch
            undo()
            self.standing, self.rows, self._agreement, self.ahead.made = before
            self.u = u
            raise

    def _take_one(self) -> MicroBatch:
        """The next micro batch where a step of the main phase goes on or begins."""
        micro_batch = self.ahead.next() or self.peek()
        self.rows.add(micro_batch)
        taken = self.ahead.made.popleft
        self.u += 1
        taken()
        return micro_batch

    def _take(self, *, or_fail: bool) -> MicroBatch:
        """The next micro batch, after which what follows it is found.

        Args:
            or_fail: Whether an error in ending the epoch comes in its place, and not after it.
        """
        deal, u = None if self.leg is None else self.leg.deal, self.u
        micro_batch = self._take_one()
        if deal is not None:
            self.standing = replace(self.standing, owners=deal.owners(self.standing.owners, u))
        try:
            self._settle()
            if not or_fail:
                self._conclude()
        except BaseException as error:  # Ctrl-C, too: it waits until this batch has arrived
            self._failure = error  # of a later micro batch: this one has been delivered
        else:
            if or_fail:
                self._conclude()
        return micro_batch

    def peek(self) -> MicroBatch:
        """The next micro batch, which stays the next; `StopIteration` at the end of the epoch."""
        if self.u >= self._calm_until and self.begin() is None:
            raise StopIteration
        if not self.ahead.made and self._make_until(self.u + 1) == self.u:
            raise DataStateError(
                "A logical shard ended before its pipeline's epoch_end() said that it would. Return None there if the "
                "number of samples is not certain."
            )
        return self.ahead.made[0]

    def skip(self, num_micro_batches: int) -> None:
        """Leave out micro batches as if they had been taken, also over ends of epochs; if reading fails, nothing has moved."""
        if self._legs.unproven:
            raise DataStateError(self._legs.unproven)
        self.rewind()
        before, legs, at = self.clock.samples, Legs(), self.copy()
        skip(at, legs, num_micro_batches)
        clock = at.clock.left_out(before)
        self._legs, self._size = legs, self._size if clock.epoch == self.epoch else None
        self.go_to(replace(at.standing, clock=clock), at.table)

    # Making ahead

    def start(self) -> None:
        """Let the feed begin with the next micro batch, if it has not begun."""
        if self.leg is None:
            self.begin()
        if self.leg is not None and not self.ahead.is_started:
            self.ahead.start(self.leg, self.table, self.u)

    def _make_until(self, u: int) -> int:
        """Make micro batches up to u, if no shard ends before; the first that is not made."""
        self.start()
        return self.u + self.ahead.make(u - self.u)

    def rewind(self) -> None:
        """Forget what was made and not taken; no more is made until the next is asked for."""
        self.ahead.forget()
        self._failure: BaseException | None = None

    def through(self, feed_of: Callable[[Feed], Feed]) -> None:
        """Let another feed bring what this one's makes."""
        self.rewind()
        self.ahead = Ahead(feed_of(self.ahead.feed))

    def close(self) -> None:
        self.ahead.feed.close()
        self.rewind()
