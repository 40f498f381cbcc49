"""Where a run stands on one rank: all that its state and its counters are made of."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rescale_data.engine.leg import Leg, Standing
from rescale_data.engine.recipe import DEALT, SAMPLES, UNDEALT
from rescale_data.engine.runner import Runner
from rescale_data.engine.setup import Setup
from rescale_data.engine.taken import Taken
from rescale_data.layout.clock import Clock
from rescale_data.layout.layout import block_of, owners
from rescale_data.state import Ints


class Position:
    """The table of all logical shards, and counts of the run; a `Stream` moves it.

    When a leg begins every rank has all N rows right; within it, those that it owns.

    Args:
        runner: Draws samples beside the feed: to skip and to count.
        u: The next micro batch, counted from `origin`.
        rows: The table, which the micro batches write that are taken.
    """

    def __init__(self, setup: Setup, runner: Runner, standing: Standing, u: int, rows: Taken) -> None:
        self.use(setup)
        self.runner, self.standing, self.u, self.rows = runner, standing, u, rows

    def use(self, setup: Setup) -> None:
        """Use this setup from here on.

        Each rank keeps a block of rows right. Where the layout is that of the run before (`delivered`), its ranks served, and
        those that there are now read.
        """
        self.setup, self.schema, self.layout, self.ranks = setup, setup.schema, setup.layout, setup.ranks
        self.repeat, size = setup.recipe.repeat, (self.ranks.world_size, self.layout.num_logical_shards)
        self.owned, self.owners = np.array(block_of(self.ranks.rank, *size), dtype=np.int64), owners(*size)

    def copy(self) -> Position:
        """The same, which later taking leaves alone."""
        return Position(self.setup, self.runner, self.standing, self.u, Taken(self.table.copy()))

    @property
    def table(self) -> Ints:
        return self.rows.table

    @table.setter
    def table(self, table: Ints) -> None:
        if table is not self.rows.table:
            self.rows = Taken(table)

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
            "dropped_samples": float(self.clock.dropped_samples),
            "padded_samples": float(self.clock.padded_samples),
        }
        return {**counts, **self.schema.progress(self.table, self.owned)}

    # Where it goes on

    def go_to(self, standing: Standing, table: Ints) -> None:
        """Go on from here, where another leg or none begins."""
        self.table = table
        self.standing, self.u = standing, standing.clock.micro_batch(self.layout)

    def move_on(self) -> None:
        """Begin the next epoch, if the last micro batch of this one was taken."""
        if self.ended:
            self.table[:, DEALT] = UNDEALT
            clock = self.clock.next_epoch(self.layout.global_batch_size)
            self.go_to(replace(self.standing, clock=clock, ended=False, since=clock.samples), self.table)

    def is_short(self) -> bool:
        """Whether what is known to be left of the epoch will be dropped."""
        end = None if self.repeat or self.ended else self.schema.epoch_end(self.table)
        return end is not None and self.setup.tail == "drop" and int(end[0].sum()) < self.layout.global_batch_size

    # The rows of all ranks

    def whole(self) -> Ints:
        """Return the table with all rows right (collective as a state is)."""
        return self.ranks.saving.merge(self.table, self.standing.owners)

    def reached(self, u: int) -> Ints:
        """Samples that each of the N shards has delivered before micro batch u of the leg, whoever served them."""
        return self.table[:, SAMPLES] if self.leg is None else self.leg.samples + self.leg.delivered(u)

    def move(self, shards: Ints, reached: Ints) -> None:
        """Bring rows to where their shards have delivered so many samples."""
        self.runner.load(self.table, self.schema.histories)
        for shard in shards.tolist():
            self.runner.skip(shard, int(reached[shard] - self.table[shard, SAMPLES]))
        self.table[shards] = self.runner.table[shards]
