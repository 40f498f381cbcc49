"""The micro batches of one rank, and the state that describes exactly those that were taken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol, TypeAlias, runtime_checkable

import numpy as np

from rescale_data.engine.feed import Ahead, Feed, MicroBatch
from rescale_data.engine.legs import Legs
from rescale_data.engine.position import Position
from rescale_data.engine.taken import Taken
from rescale_data.errors import DataStateError
from rescale_data.layout.clock import Clock
from rescale_data.state import Ints

OnSourceChange: TypeAlias = Literal["error", "next_epoch"]
"""What to do with a state whose files were removed or changed."""


@runtime_checkable
class HasStream(Protocol):
    """Whatever reads a stream, and can tell what it consists of."""

    @property
    def stream(self) -> Stream: ...


class Stream(Legs):
    """One rank's micro batches, and the position at which the taken ones leave it."""

    on_source_change: OnSourceChange = "error"
    meeting = 0
    """How often the ranks of the run have met before these did."""

    def load(self, table: Ints, clock: Clock) -> None:
        super().load(table, clock)
        self._begun: Position | None = None  # see `begun`

    def follow(self, other: Stream) -> None:
        """Count on from where another stream had counted to at this moment."""
        begun = other.begun()
        at = begun if begun is not None and begun.clock.samples == self.clock.samples else other
        self.dropped_samples, self.padded_samples = at.dropped_samples, at.padded_samples
        self._took, self._was_empty = at._took, at._was_empty

    # Taking

    def take(self) -> MicroBatch:
        """The next micro batch; from here on the state says that it was delivered."""
        if self.u + 1 < self._calm_until:
            return self._take_one()
        self.peek()
        leg = self.leg
        ends = leg is not None and leg.deal is not None and leg.stop == self.u + 1
        if not (ends or self.verify):
            return self._take()
        self.begun()
        before = {**vars(self), "_taken": Taken(self.table.copy()), "_ahead": self._ahead.copy()}
        try:
            return self._take()
        except Exception:  # an epoch fails in place of its last micro batch
            vars(self).update({**before, "_unproven": self._unproven, "_rest": self._rest})
            raise

    def _take_one(self) -> MicroBatch:
        """The next micro batch where a step of the main phase goes on or begins."""
        micro_batch = self._ahead.take(self.ranks)
        if micro_batch is None:
            self.peek()
            micro_batch = self._ahead.made.popleft()
        began = None
        if not self.u % self._in_step:
            self._begun, began = None, (self.u, self._took)
        self._taken.add(micro_batch, began)
        self.u, self._took = self.u + 1, True
        return micro_batch

    def _take(self) -> MicroBatch:
        leg, u = self.leg, self.u
        micro_batch = self._take_one()
        self.begun()
        if leg is not None and leg.deal is not None:
            self.owners = leg.deal.owners(self.owners, u)
        try:
            self._settle()
        except Exception as error:
            self._failure = error  # of a later micro batch: this one has been delivered
        else:
            self._conclude()
        return micro_batch

    def peek(self) -> MicroBatch:
        """The next micro batch, which stays the next; `StopIteration` at the end of the epoch."""
        if self.u >= self._calm_until and self.begin() is None:
            raise StopIteration
        if not self._ahead.made and self._make_until(self.u + 1) == self.u:
            raise DataStateError(
                "A logical shard ended before its pipeline's epoch_end() said that it would. Return None there if the "
                "number of samples is not certain."
            )
        return self._ahead.made[0]

    def through(self, feed_of: Callable[[Feed], Feed]) -> None:
        """Let another feed bring what this one's makes."""
        self.rewind()
        self._ahead = Ahead(feed_of(self._ahead.feed))

    @property
    def is_ahead(self) -> bool:
        """Whether micro batches are made in the background."""
        return self._ahead.feed.is_ahead

    def made(self) -> dict[str, float]:
        """What was read and made on this rank, for a logger."""
        return self._ahead.progress()

    def waiting_for(self) -> str:
        """What is waited for, where other processes make the batches."""
        return self._ahead.feed.doing()

    def close(self) -> None:
        self._ahead.feed.close()
        self.rewind()

    def pass_by(self, num_micro_batches: int, *, reads: bool) -> None:
        """Leave out micro batches of this leg, as if they had been taken.

        Args:
            reads: Whether rows are moved; else nothing of the epoch is delivered after these.
        """
        self.begun()
        u = self.u + num_micro_batches
        if reads:
            self.move(np.array(self.layout.owned(self.ranks.rank), dtype=np.int64), self.reached(u))
            self.owners = self.layout.owners
        self.rewind()
        self.u, self._took = u, True
        self._settle()
        self._conclude()

    # The rows of other ranks

    def at_step(self, step: int) -> Position:
        """Where a step began: the next one, or the last; ``ValueError`` where it is another."""
        self.rewind()
        taken = self.u % self._in_step
        if step == self.step and not taken:
            return self
        begun = self.begun()
        if begun is not None and step == begun.step:
            return begun._at(Taken(begun._taken.at_step()))
        raise ValueError(
            f"step={step}: this rank has taken {taken} micro batches of step {self.step}, and can go on where a step begins "
            f"that it has not completed, or completed last. Give the number of steps that the model has done, or load a "
            f"checkpoint."
        )

    def move(self, shards: Ints, reached: Ints) -> None:
        self.rewind()
        self._taken.keep(shards)
        super().move(shards, reached)

    def whole(self) -> Ints:
        self.begun()
        return super().whole()

    def begun(self) -> Position | None:
        """Where the last step began, but for its table: found out before anything changes but how far it is."""
        if self._begun is None and self._taken.began is not None:
            self._begun = begun = self._at(self._taken)
            begun.u, begun._took = self._taken.began
        return self._begun
