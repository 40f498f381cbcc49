"""The micro batches of one rank, and the state that describes exactly those that were taken.

A stream goes through *legs*: the main phase of an epoch, in which the layout says who serves what, then, with
``repeat=False``, the deal of what is left, then the next epoch. A leg ends at a step boundary, on every rank at the same.

    origin                        stop, origin            stop, origin
      |  main phase, u = 0, 1, ...  |  deal, u = 0, 1, ...  |  next epoch

Where only reading tells how much is left, it is dealt in rounds (`Rest`), each a leg of its own.
"""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, Protocol, TypeAlias

import numpy as np

from rescale_data.engine.agreement import Agreement, failure_elsewhere
from rescale_data.engine.feed import Feed, Leg, MicroBatch
from rescale_data.engine.recipe import DEALT, ENDED, FIRST_SLOT, SAMPLES, UNDEALT, Histories
from rescale_data.engine.rest import Rest
from rescale_data.engine.runner import Exhausted, Runner
from rescale_data.engine.setup import Setup
from rescale_data.errors import DataStateError
from rescale_data.layout.clock import Clock
from rescale_data.layout.deal import Deal
from rescale_data.layout.layout import Layout
from rescale_data.state import Ints

OnSourceChange: TypeAlias = Literal["error", "next_epoch"]
"""What to do with a state whose files were removed or changed."""

_UNREAD = -2


class HasStream(Protocol):
    """Whatever reads a stream, and can tell what it consists of."""

    @property
    def stream(self) -> Stream: ...


class Stream:
    """One rank's micro batches, and the table of all logical shards as the taken ones leave it.

    When a leg begins every rank has all N rows right; within it, those that it owns. Rows of others stay behind, and each says
    of what sample it is, so that any rank can bring it up to date by reading (`make_again`).

    Args:
        runner: Draws samples beside the feed: to skip and to count.
        feed: Makes the micro batches.
    """

    def __init__(self, setup: Setup, runner: Runner, feed: Feed) -> None:
        self.schema, self.layout, self.ranks, self.seed = setup.schema, setup.layout, setup.ranks, setup.recipe.seed
        self.on_source_change: OnSourceChange = "error"
        self.meeting = 0  # how often the ranks of the run have met before these did
        self._runner, self._feed, self.repeat, self._tail = runner, feed, setup.recipe.repeat, setup.tail
        self._verify = setup.recipe.verify
        self.reset()

    def reset(self) -> None:
        """Go back to the beginning of the run, with the data that there is now."""
        self.rewind()
        self.schema.adopt({})
        self.dropped_samples = self.padded_samples = 0
        self.load(self.schema.fresh_table(self.layout.num_logical_shards), Clock())

    def follow(self, other: Stream) -> None:
        """Count on from where another stream had counted to at this moment."""
        begun = None if other._begun is None else other._begun.stream
        other = begun if begun is not None and begun.clock.samples == self.clock.samples else other
        self.dropped_samples, self.padded_samples = other.dropped_samples, other.padded_samples
        self._took, self._was_empty = other._took, other._was_empty

    def load(self, table: Ints, clock: Clock) -> None:
        """Go on from a table in which all N rows are right."""
        self.ranks = self.ranks.next_leg
        self.table, self.clock = table, clock
        self._leg: Leg | None = None
        self._rest: Rest | None = None
        self._calm_until = 0  # a micro batch
        self.owners = self.layout.owners  # the rank whose row of each shard is right, of all ranks
        self._agreement: Agreement | None = None
        self._settled, self._over = -1, False  # the micro batch before which the ranks agreed last, and on what
        self.ended = bool((table[:, DEALT] == ENDED).all())
        self._took, self._was_empty = False, False  # in this epoch, from here on; the epoch before
        self._size: int | None = None
        self._unproven = ""  # what the proof of this epoch found
        self._begun: _Begun | None = None  # as it stood when its last step began
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

    @property
    def clock(self) -> Clock:
        return self._clock.later(self._u - self._clock_u, self.layout)

    @clock.setter
    def clock(self, clock: Clock) -> None:
        self._clock, self.epoch, self._in_step = clock, clock.epoch, self.layout.gradient_accumulation_steps
        self._u = self._clock_u = clock.micro_batch(self.layout)  # the next micro batch, counted from `origin`

    # Taking

    def take(self) -> MicroBatch:
        """The next micro batch; from here on the state says that it was delivered."""
        if not self._ahead or self._u >= self._calm_until:
            self.peek()
        if self._u + 1 < self._calm_until:
            return self._take_one()
        leg = self._leg
        ends = leg is not None and leg.deal is not None and leg.stop == self._u + 1
        if not (ends or self._verify):
            return self._take()
        before = {**vars(self), "table": self.table.copy(), "_ahead": self._ahead.copy()}
        try:
            return self._take()
        except Exception:  # an epoch fails in place of its last micro batch
            vars(self).update({**before, "_unproven": self._unproven, "_rest": self._rest})
            raise

    def _take_one(self) -> MicroBatch:
        """The next micro batch where a step of the main phase goes on or begins."""
        if not self._u % self._in_step:
            self._remember()
        micro_batch = self._ahead.popleft()
        if self._begun is not None:
            self._begun.keep(self.table, micro_batch.visited)
        micro_batch.commit(self.table)
        self._u, self._took = self._u + 1, True
        return micro_batch

    def _take(self) -> MicroBatch:
        leg, u = self._leg, self._u
        micro_batch = self._take_one()
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
        if self._u >= self._calm_until and self.begin() is None:
            raise StopIteration
        if not self._ahead and self._make_until(self._u + 1) == self._u:
            raise DataStateError(
                "A logical shard ended before its pipeline's epoch_end() said that it would. Return None there if the "
                "number of samples is not certain."
            )
        return self._ahead[0]

    def start(self) -> None:
        """Let the feed begin with the next micro batch, if it has not begun."""
        if self._leg is None:
            self.begin()
        if not self._started and self._leg is not None:
            self._feed.start(self._leg, self.table, self._u)
            self._started = True

    @property
    def is_ahead(self) -> bool:
        """Whether micro batches are made in the background."""
        return self._feed.is_ahead

    def skip(self, num_micro_batches: int) -> None:
        """Leave out micro batches as if they had been taken, over the ends of epochs."""
        begins: list[tuple[int, Ints]] = []  # of epochs: micro batches left to skip, and where the run stands
        while num_micro_batches:
            if self.ended and not self._verify:
                self.move_on()
                begins = [*begins[-2:], (num_micro_batches, self._standing())]
                num_micro_batches = self._skip_epochs(begins, num_micro_batches)
                continue
            self.move_on()
            leg = self.begin()
            if leg is None:
                continue
            if self._agreement is not None or (leg.deal is not None and self._left is None):
                self.take()
                num_micro_batches -= 1
                continue
            here = num_micro_batches if leg.stop is None else min(num_micro_batches, leg.stop - self._u)
            left = self.num_micro_batches_left()
            if left is None or num_micro_batches < left or self._verify:
                self._skip_rows(leg, here)
            self.rewind()
            self._advance(here)
            self._settle()
            self._conclude()
            num_micro_batches -= here

    def _skip_epochs(self, begins: list[tuple[int, Ints]], num_micro_batches: int) -> int:
        """Leave out whole epochs after two that moved the run by the same; the micro batches that are then left to skip."""
        whole_steps = self.layout.aligned or self._tail == "pad"  # else what is dropped depends on the epochs before
        if len(begins) < 3 or not whole_steps or not self.schema.epochs_are_alike(self.table):
            return num_micro_batches
        (_, first), (before, second), (after, third) = begins
        if (third - second != second - first).any():
            return num_micro_batches
        size = before - after
        epochs = (num_micro_batches - 1) // size  # the last of them ends where its last batch does
        self._stand(third + epochs * (third - second))
        return num_micro_batches - epochs * size

    def _standing(self) -> Ints:
        """All numbers of a run that is at the beginning of an epoch."""
        clock = self.clock
        counts = [clock.samples, clock.origin, clock.step, clock.epoch, self.dropped_samples, self.padded_samples]
        return np.concatenate([self.table.flatten(), np.array(counts, dtype=np.int64)])

    def _stand(self, numbers: Ints) -> None:
        self.table = self.table.copy()
        self.table[:] = numbers[:-6].reshape(self.table.shape)
        samples, origin, step, epoch, self.dropped_samples, self.padded_samples = numbers[-6:].tolist()
        self.clock = Clock(samples=samples, origin=origin, step=step, epoch=epoch)

    def begin(self) -> Leg | None:
        """The leg that the next micro batch belongs to, planned where it has not begun; `None` at the end of the epoch."""
        if self.is_calm:
            return self._leg
        if self._unproven:
            raise DataStateError(self._unproven)
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        if self._leg is None and not self.ended:
            self._plan()
        self._settle()
        self._conclude()
        leg = self._leg
        if leg is not None and leg.deal is None and self._agreement is None and not self._verify:
            self._calm_until = sys.maxsize if leg.stop is None else leg.stop
        return leg

    @property
    def is_calm(self) -> bool:
        """Whether the next micro batch belongs to the leg of the one before, and there is nothing to look after."""
        return self._u < self._calm_until

    def made(self) -> dict[str, float]:
        """What was read and made on this rank, for a logger."""
        made = self._feed.progress()
        return {**made, "batches_ready": made.get("batches_ready", 0.0) + len(self._ahead)}

    def waiting_for(self) -> str:
        """What is waited for, where other processes make the batches."""
        return self._feed.doing()

    def close(self) -> None:
        self._feed.close()
        self.rewind()

    # What is left

    @property
    def rows_are_dealt(self) -> bool:
        """Whether the state of this moment is spread over ranks by a deal, no longer in one block a rank."""
        return self._leg is not None and self._leg.deal is not None

    def is_short(self) -> bool:
        """Whether what is known to be left of the epoch will be dropped."""
        end = None if self.repeat or self.ended else self.schema.epoch_end(self.table)
        return end is not None and self._tail == "drop" and int(end[0].sum()) < self.layout.global_batch_size

    def num_micro_batches_left(self) -> int | None:
        """Micro batches until the epoch ends; `None` where it never does, or cannot be known."""
        leg = self.begin()
        if leg is None:
            return 0
        if leg.stop is None or self._left is None:
            return None
        if leg.deal is not None:
            return leg.stop - self._u
        main = leg.stop - self._first
        rest = Deal(self.layout, self._left - self._main_phase(main), self._left, self._tail == "pad")
        return leg.stop - self._u + rest.num_micro_batches

    def num_micro_batches(self) -> int | None:
        """Micro batches of the whole epoch, as long as O stays; `None` where it never ends, or cannot be known."""
        if self._size is None and not self.repeat:
            self._size = self.schema.epoch_size(self.table)
        if self._size is None:
            return None
        steps, rest = divmod(self._size, self.layout.global_batch_size)
        return (steps + (self._tail == "pad" and rest > 0)) * self.layout.gradient_accumulation_steps

    # Legs

    def _plan(self) -> None:
        """Begin the leg of this position, in which all rows are right."""
        self._first, self._samples = self._u, self.table[:, SAMPLES].copy()
        end = None if self.repeat else self.schema.epoch_end(self.table)
        self._left = None if end is None else end[0]
        if (self.table[:, DEALT] != UNDEALT).any():
            self._resume_deal()
        elif self.repeat or self._left is None:
            self._start(None)
            if not self.repeat:
                self._agreement = Agreement(self.ranks, self._u, self.layout.gradient_accumulation_steps)
                self._settled, self._over = -1, False
        else:
            self._start(self.layout.last_whole(self._samples, self._left, self._u))

    def _start(self, stop: int | None, deal: Deal | None = None) -> None:
        """Begin a leg; one without a micro batch that is left is over at once."""
        self.rewind()
        self._agreement, self._calm_until = None, 0
        self.owners = self.layout.owners
        stop = None if stop is None else max(stop, self._u)
        self._leg = Leg(self.layout, self.ranks.rank, stop, deal, self.schema.histories)

    def _advance(self, num_micro_batches: int) -> None:
        self._took = True
        self._u += num_micro_batches

    def _settle(self) -> None:
        """Find the leg of the next micro batch. It may have failed before, in reading ahead, and goes on from there."""
        while (leg := self._leg) is not None:
            if leg.stop is None and self._agreement is not None:
                if self._settled == self._u and not self._over:
                    return
                self._agree(self._agreement)
            elif leg.stop == self._u and not self._is_last(leg.deal):
                self._deal()
            else:
                return

    def _agree(self, agreement: Agreement) -> None:
        """The end of the main phase must be found by reading: end it as soon as the last of it has been taken."""
        if self._settled != self._u:
            self._over = agreement.end(self._u, self._make_until)
            self._settled = self._u
        if self._over:
            self._deal()

    def _conclude(self) -> None:
        """End the epoch, if its last micro batch has been taken."""
        leg = self._leg
        if leg is not None and leg.deal is not None and leg.stop == self._u:
            self._end_epoch(leg.deal)

    def _deal(self) -> None:
        """Serve what the shards still have to the same ranks: all of it, or, where only reading tells, the next round."""
        if self._left is None:
            table, left = self._the_rest().look(self.table, self.owners, self.schema.histories)
            self.table, samples = table.copy(), table[:, SAMPLES].copy()
        else:
            self.table = self.table.copy()
            delivered = self._main_phase(self._u - self._first)
            samples, left = self._samples + delivered, self._left - delivered
        self.clock = self.clock.restarted(self.layout.global_batch_size)
        self.table[:, DEALT] = left
        self._serve(left, samples)

    def _resume_deal(self) -> None:
        if self._left is None and not self._u:  # a round that has not begun: perhaps it was another global batch's
            self._deal()
            return
        left = self.table[:, DEALT].copy()
        self._serve(left, self._samples - Deal(self.layout, left, self._samples, False).delivered(self._u))

    def _serve(self, left: Ints, samples: Ints) -> None:
        deal = Deal(self.layout, left, samples, pad=False)
        if self._tail == "pad" and self._is_last(deal):
            deal = replace(deal, pad=True)
        self._start(deal.num_micro_batches, deal)

    def _is_last(self, deal: Deal | None) -> bool:
        """Whether the epoch ends with this deal, and another round does not follow."""
        return deal is not None and (self._left is not None or deal.num_samples < self.layout.global_batch_size)

    def _end_epoch(self, deal: Deal) -> None:
        if self._was_empty and not self._took:
            raise DataStateError(
                f"Two epochs in a row hold less than one global batch of {self.layout.global_batch_size} samples. Use a "
                f"smaller global_batch_size, more data, tail='pad', or repeat=True."
            )
        begins, delivered = (
            self._next_epoch(),
            deal.delivered(self._u),
        )  # before all else: reading may have to go on again
        if self._verify:
            self._prove(deal)
        self.table = self.table.copy()
        self.table[:, FIRST_SLOT:] = begins
        self.table[:, SAMPLES] = deal.samples + delivered
        self.table[:, DEALT] = ENDED
        self._count_tail(deal.num_samples - int(delivered.sum()), deal.num_padded)
        self.clock = self.clock.restarted(self.layout.global_batch_size)
        self.ended, self._was_empty = True, not self._took
        self._leg = self._agreement = self._rest = None
        self._calm_until = 0
        self.rewind()

    def _next_epoch(self) -> Ints:
        """The slots at which the next epoch begins."""
        end = self.schema.epoch_end(self.table)
        if end is not None:
            return end[1]
        return self._the_rest().next_epoch(self.table, self.owners, self.schema.histories)

    def _prove(self, deal: Deal) -> None:
        """That every row of the epoch was delivered once or dropped, over all legs: else ``DataStateError`` on all ranks."""
        self._feed.stop()
        self._runner.load(self.table, self.schema.histories)
        dropped, failure = deal.left - deal.delivered(self._u), None
        try:
            for shard in (self.owners == self.ranks.rank).nonzero()[0].tolist():
                self._runner.prove(shard, int(dropped[shard]))
        except Exception as error:
            failure = error
        wrong = isinstance(failure, DataStateError)
        worst = self.ranks.extremes(wrong + (failure is not None))[1]
        if worst == 2:
            found = failure if wrong else "Another dp rank says more."
            self._unproven = f"Epoch {self.epoch} does not end as it should. {found}"
            raise DataStateError(self._unproven)
        if worst:
            raise failure or failure_elsewhere(wrong_rows=False)
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
        self._feed.stop()
        if self._rest is None:
            self._rest = Rest(self.layout, self.ranks, self._runner, self.table.shape[1])
        return self._rest

    # The rows of other ranks

    def whole(self) -> Ints:
        """The table with all rows right (collective as a state is); those of others are then of this moment."""
        whole = self.ranks.saving.merge(self.table, self.owners)
        if not self.rows_are_dealt:  # else workers tell what they change of rows as these were when the leg began
            self.table = whole
        return whole

    def at_step(self, step: int) -> Stream:
        """This stream as it stood when a step began: the next one, or the last; ``ValueError`` where it is another."""
        self.rewind()
        o, taken = self.layout.global_batch_size, self._u % self.layout.gradient_accumulation_steps
        if step == self.clock.global_step(o) and not taken:
            return self
        if self._begun is not None and step == self._begun.stream.clock.global_step(o):
            return self._begun.again()
        raise ValueError(
            f"step={step}: this rank has taken {taken} micro batches of step {self.clock.global_step(o)}, and can go on where "
            f"a step begins that it has not completed, or completed last. Give the number of steps that the model has done, or "
            f"load a checkpoint."
        )

    def reached(self, table: Ints, histories: Histories, paths: Sequence[str]) -> list[int]:
        """Of each of these sources the last epoch that is read again to go on within windows and documents that have begun; -1:
        none is (collective where something has begun)."""
        begun, none = self.schema.begun(table), [-1] * len(paths)
        if not any(rows.any() for rows in begun.values()):
            return none
        mine = range(len(table)) if self.ranks.simulated else self.layout.owned(self.ranks.rank)
        found, failure = [none], None
        try:
            for shard in mine:
                if nodes := [node for node, rows in begun.items() if rows[shard]]:
                    row = table[shard : shard + 1, FIRST_SLOT:]
                    of_shard = self._runner.farthest(shard, row, histories, nodes)
                    found.append([of_shard.get(path, -1) for path in paths])
        except Exception as error:
            failure = error
        each = self.ranks.each(np.max(found, axis=0).tolist() if failure is None else [_UNREAD] * len(paths))
        if each.min() == _UNREAD:
            raise failure or failure_elsewhere(wrong_rows=False)
        return each.max(axis=0).tolist()

    def make_again(self, shards: Ints) -> None:
        """Bring rows of other ranks up to date by reading, from the sample that they are of."""
        self._move(shards, self._reached())

    def _reached(self) -> Ints:
        """Samples that each of the N shards has delivered, whoever served them."""
        if self._leg is None:
            return self.table[:, SAMPLES]
        if self._leg.deal is not None:
            return self._leg.deal.samples + self._leg.deal.delivered(self._u)
        return self._samples + self._main_phase(self._u - self._first)

    def _move(self, shards: Ints, reached: Ints) -> None:
        self.rewind()
        self._runner.load(self.table, self.schema.histories)
        for shard in shards.tolist():
            self._runner.skip(shard, int(reached[shard] - self.table[shard, SAMPLES]))
        if self._begun is not None:
            self._begun.keep(self.table, shards)
        self.table[shards] = self._runner.table[shards]

    def _remember(self) -> None:
        """Where a step begins: in one leg that is the same but for how far it is."""
        begun = self._begun
        if (
            begun is None
            or begun.stream.table is not self.table
            or begun.stream._leg is not self._leg
            or not self.is_calm
        ):
            self._begun = None
            stream = object.__new__(Stream)
            vars(stream).update(vars(self))
            begun = self._begun = _Begun(stream)
        begun.stream._u, begun.stream._took = self._u, self._took
        begun.changed = []

    def _main_phase(self, num_micro_batches: int) -> Ints:
        """Samples that each of the N shards delivers in micro batches of the main phase, from the beginning of the leg."""
        return self.layout.delivered(self._samples, self._first, self._first + num_micro_batches)

    # Making ahead

    def _make_until(self, u: int) -> int:
        """Make micro batches up to u, if no shard ends before; the first that is not made."""
        if not self._started:
            self.start()
        while not self._exhausted and self._u + len(self._ahead) < u:
            try:
                if self.ranks.circle is None:
                    self._ahead.append(self._feed.take())
                else:
                    with self.ranks.reading():
                        self._ahead.append(self._feed.take())
            except Exhausted:
                self._exhausted = True
            except BaseException:
                self.rewind()  # the runner is past what was taken: whoever goes on begins from the table
                raise
        return self._u + len(self._ahead)

    def rewind(self) -> None:
        """Forget what was made and not taken; no more is made until the next is asked for."""
        self._feed.stop()
        self._ahead: deque[MicroBatch] = deque()
        self._started = self._exhausted = False
        self._failure: Exception | None = None

    def _skip_rows(self, leg: Leg, num_micro_batches: int) -> None:
        """Move the rows that this rank owns, wherever they were served last."""
        stop = self._u + num_micro_batches
        if leg.deal is not None:
            reached = leg.deal.samples + leg.deal.delivered(stop)
        else:
            reached = self.table[:, SAMPLES] + self.layout.delivered(self.table[:, SAMPLES], self._u, stop)
        self._move(np.array(self.layout.owned(self.ranks.rank), dtype=np.int64), reached)
        self.owners = self.layout.owners


class _Begun:
    """A stream as it stood when a step began.

    Args:
        stream: It, but for its table, whose rows change in place.
    """

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.changed: list[tuple[slice | Ints, Ints]] = []
        """Rows that were changed since, each time as they were before."""

    def keep(self, table: Ints, rows: slice | Ints) -> None:
        self.changed.append((rows, table[rows].copy()))

    def again(self) -> Stream:
        """The stream with the table of then."""
        self.stream.table = self.stream.table.copy()
        for rows, before in reversed(self.changed):
            self.stream.table[rows] = before
        return self.stream
