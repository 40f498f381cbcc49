"""Where a run stands on one rank: all that its state and its counters are made of."""

from __future__ import annotations

import numpy as np

from rescale_data.engine.leg import Leg, Standing
from rescale_data.engine.recipe import SAMPLES
from rescale_data.engine.runner import Runner
from rescale_data.engine.setup import Setup
from rescale_data.engine.taken import Taken
from rescale_data.layout.clock import Clock
from rescale_data.state import Ints


class Position:
    """The table of all logical shards, and counts of the run; a `Stream` moves it.

    When a leg begins every rank has all N rows right; within it, those that it owns. Rows of others stay behind, and each says
    of what sample it is, so that any rank can bring it up to date by reading (`make_again`).

    Args:
        runner: Draws samples beside the feed: to skip and to count.
        u: The next micro batch, counted from `origin`.
        rows: The table, which the micro batches write that are taken.
    """

    def __init__(self, setup: Setup, runner: Runner, standing: Standing, u: int, rows: Taken) -> None:
        self.use(setup)
        self.runner, self.standing, self.u, self.rows = runner, standing, u, rows
        self._begun: Position | None = None

    def use(self, setup: Setup) -> None:
        """What the run runs with, which other ranks and another global batch change."""
        self.setup, self.schema, self.layout, self.ranks = setup, setup.schema, setup.layout, setup.ranks
        self.repeat = setup.recipe.repeat

    def copy(self) -> Position:
        """The same, which later taking leaves alone."""
        return Position(self.setup, self.runner, self.standing, self.u, Taken(self.table.copy()))

    @property
    def table(self) -> Ints:
        return self.rows.table

    @table.setter
    def table(self, table: Ints) -> None:
        if table is not self.rows.table:
            self._begun, self.rows = self.begun(), Taken(table)

    def begun(self) -> Position | None:
        """Where the last step began, but for its table; `None` where it was loaded within one."""
        if self.rows.began is None:
            return self._begun
        return Position(self.setup, self.runner, *self.rows.began, self.rows)

    @property
    def leg(self) -> Leg | None:
        return self.standing.leg

    @property
    def clock(self) -> Clock:
        clock = self.standing.clock
        return clock.later(self.u - clock.micro_batch(self.layout), self.layout)

    @property
    def step(self) -> int:
        """Global batches delivered."""
        return self.clock.global_step(self.layout.global_batch_size)

    @property
    def ended(self) -> bool:
        """Whether the last batch of the epoch was taken."""
        return self.standing.ended

    @property
    def is_empty(self) -> bool:
        """Whether nothing was taken of this epoch, from where it began or was loaded."""
        return self.clock.samples == self.standing.since

    @property
    def rows_are_dealt(self) -> bool:
        """Whether the state of this moment is spread over ranks by a deal, no longer in one block a rank."""
        return self.leg is not None and self.leg.deal is not None

    def counters(self) -> dict[str, float]:
        """For a logger: of the run, and of what this rank's shards have drawn."""
        counts = {
            "global_samples": float(self.clock.samples),
            "global_step": float(self.step),
            "filtered_rows": 0.0,
            "skipped_rows": 0.0,
            "dropped_samples": float(self.standing.dropped_samples),
            "padded_samples": float(self.standing.padded_samples),
        }
        owned = np.array(self.layout.owned(self.ranks.rank), dtype=np.int64)
        return {**counts, **self.schema.progress(self.table, owned)}

    def is_short(self) -> bool:
        """Whether what is known to be left of the epoch will be dropped."""
        end = None if self.repeat or self.ended else self.schema.epoch_end(self.table)
        return end is not None and self.setup.tail == "drop" and int(end[0].sum()) < self.layout.global_batch_size

    # The rows of other ranks

    def whole(self) -> Ints:
        """The table with all rows right (collective as a state is); those of others are then of this moment."""
        whole = self.ranks.saving.merge(self.table, self.standing.owners)
        if not self.rows_are_dealt:  # else workers tell what they change of rows as these were when the leg began
            self.table = whole
        return whole

    def make_again(self, shards: Ints) -> None:
        """Bring rows of other ranks up to date by reading, from the sample that they are of."""
        self.move(shards, self.reached(self.u))

    def reached(self, u: int) -> Ints:
        """Samples that each of the N shards has delivered before micro batch u of the leg, whoever served them."""
        return self.table[:, SAMPLES] if self.leg is None else self.leg.samples + self.leg.delivered(u)

    def move(self, shards: Ints, reached: Ints) -> None:
        """Bring rows to where their shards have delivered so many samples."""
        self.rows.keep(shards)
        self.runner.load(self.table, self.schema.histories)
        for shard in shards.tolist():
            self.runner.skip(shard, int(reached[shard] - self.table[shard, SAMPLES]))
        self.table[shards] = self.runner.table[shards]
