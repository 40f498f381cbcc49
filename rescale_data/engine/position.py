"""Where a run stands on one rank: all that its state and its counters are made of."""

from __future__ import annotations

import numpy as np

from rescale_data.engine.feed import Leg
from rescale_data.engine.ranks.ranks import Ranks
from rescale_data.engine.recipe import SAMPLES
from rescale_data.engine.runner import Runner
from rescale_data.engine.schema import Schema
from rescale_data.engine.setup import Tail
from rescale_data.engine.taken import Taken
from rescale_data.layout.clock import Clock
from rescale_data.layout.deal import Deal
from rescale_data.layout.layout import Layout
from rescale_data.state import Ints


class Position:
    """The table of all logical shards, and counts of the run; a `Stream` moves it.

    When a leg begins every rank has all N rows right; within it, those that it owns. Rows of others stay behind, and each says
    of what sample it is, so that any rank can bring it up to date by reading (`make_again`).
    """

    schema: Schema
    layout: Layout
    ranks: Ranks
    runner: Runner
    seed: int
    repeat: bool
    tail: Tail
    owners: Ints
    """``int64[N]``, the rank whose row of each shard is right."""
    epoch: int
    ended: bool
    """Whether the last batch of the epoch was taken."""
    dropped_samples: int
    padded_samples: int
    u: int
    """The next micro batch, counted from `origin`."""
    leg: Leg | None
    """`None` where it has not been planned."""
    _first: int  # micro batch of the leg
    _samples: Ints  # that each shard had delivered when it began
    _left: Ints | None  # samples of each shard in the epoch then; None where only reading tells
    _clock: Clock  # at micro batch _clock_u
    _clock_u: int
    _in_step: int  # micro batches
    _taken: Taken
    _took: bool  # something in this epoch, from here on
    _was_empty: bool  # the epoch before

    def copy(self) -> Position:
        """The same, which later taking leaves alone."""
        return self._at(Taken(self.table.copy()))

    def _at(self, taken: Taken) -> Position:
        position = object.__new__(Position)
        vars(position).update({name: vars(self)[name] for name in Position.__annotations__}, _taken=taken)
        return position

    @property
    def table(self) -> Ints:
        return self._taken.table

    @table.setter
    def table(self, table: Ints) -> None:
        if table is not self._taken.table:
            self._taken = Taken(table)

    @property
    def clock(self) -> Clock:
        return self._clock.later(self.u - self._clock_u, self.layout)

    @clock.setter
    def clock(self, clock: Clock) -> None:
        self._clock, self.epoch, self._in_step = clock, clock.epoch, self.layout.gradient_accumulation_steps
        self.u = self._clock_u = clock.micro_batch(self.layout)

    @property
    def step(self) -> int:
        """Global batches delivered."""
        return self.clock.global_step(self.layout.global_batch_size)

    def counters(self) -> dict[str, float]:
        """For a logger: of the run, and of what this rank's shards have drawn."""
        counts = {
            "global_samples": float(self.clock.samples),
            "global_step": float(self.step),
            "filtered_rows": 0.0,
            "skipped_rows": 0.0,
            "dropped_samples": float(self.dropped_samples),
            "padded_samples": float(self.padded_samples),
        }
        owned = np.array(self.layout.owned(self.ranks.rank), dtype=np.int64)
        return {**counts, **self.schema.progress(self.table, owned)}

    # What is left

    @property
    def rows_are_dealt(self) -> bool:
        """Whether the state of this moment is spread over ranks by a deal, no longer in one block a rank."""
        return self.leg is not None and self.leg.deal is not None

    @property
    def ends_by_reading(self) -> bool:
        """Whether only reading tells where the epoch of this leg ends."""
        return self._left is None and not self.repeat

    def is_short(self) -> bool:
        """Whether what is known to be left of the epoch will be dropped."""
        end = None if self.repeat or self.ended else self.schema.epoch_end(self.table)
        return end is not None and self.tail == "drop" and int(end[0].sum()) < self.layout.global_batch_size

    def left_of(self, leg: Leg) -> int | None:
        """Micro batches until the epoch of a leg ends; `None` where it never does, or cannot be known."""
        if leg.stop is None or self._left is None:
            return None
        if leg.deal is not None:
            return leg.stop - self.u
        main = self._main_phase(leg.stop)
        return (
            leg.stop - self.u + Deal(self.layout, self._left - main, self._left, self.tail == "pad").num_micro_batches
        )

    def reached(self, u: int) -> Ints:
        """Samples that each of the N shards has delivered before micro batch u of the leg, whoever served them."""
        if self.leg is None:
            return self.table[:, SAMPLES]
        if self.leg.deal is not None:
            return self.leg.deal.samples + self.leg.deal.delivered(u)
        return self._samples + self._main_phase(u)

    def _main_phase(self, u: int) -> Ints:
        """Samples that each of the N shards delivers from the beginning of a leg of the main phase."""
        return self.layout.delivered(self._samples, self._first, u)

    # The rows of other ranks

    def whole(self) -> Ints:
        """The table with all rows right (collective as a state is); those of others are then of this moment."""
        whole = self.ranks.saving.merge(self.table, self.owners)
        if not self.rows_are_dealt:  # else workers tell what they change of rows as these were when the leg began
            self.table = whole
        return whole

    def make_again(self, shards: Ints) -> None:
        """Bring rows of other ranks up to date by reading, from the sample that they are of."""
        self.move(shards, self.reached(self.u))

    def move(self, shards: Ints, reached: Ints) -> None:
        """Bring rows to where their shards have delivered so many samples."""
        self.runner.load(self.table, self.schema.histories)
        for shard in shards.tolist():
            self.runner.skip(shard, int(reached[shard] - self.table[shard, SAMPLES]))
        self.table[shards] = self.runner.table[shards]
