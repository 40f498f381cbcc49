"""`Cursor`: where a run stands on one rank."""

from __future__ import annotations

from typing import NamedTuple

from rescale_data.engine.leg import Leg
from rescale_data.engine.micro_batch import MicroBatch, Rows
from rescale_data.engine.recipe import DEALT, ENDED
from rescale_data.layout.clock import Clock
from rescale_data.layout.layout import Layout
from rescale_data.state import Ints


class Cursor(NamedTuple):
    """The place of a run on one rank. A run moves by one assignment, of another cursor.

    When a segment begins every rank has all N rows of the table right; within it, those that it owns.

    Args:
        clock: Counts of the run, from which `now` counts on.
        table: ``int64[N, columns]``, the positions of all logical shards, but for `newest` and `last`.
        owners: ``int64[N]``, the rank whose row of each shard is right.
        u: The next micro batch, counted from `origin`.
        newest: Rows of earlier micro batches that are not in the table yet: writing each would cost a twelfth of a packed
            batch. By the first shard; slices of shards are the same or have none in common (`AlignedTurns`).
        leg: Its segment; `None` where none is planned, or the epoch has ended.
        last: Rows of the micro batch before u.
        ended: True if the last batch of the epoch was taken.
        seen: With ``steps_per_epoch``, the number of epochs that are known to have ended.
        resumed: True if nothing was taken since a load.
        idle: Epochs that have begun since a batch was taken.
    """

    clock: Clock
    table: Ints
    owners: Ints
    u: int
    newest: dict[int, Rows]
    leg: Leg | None = None
    last: Rows | None = None
    ended: bool = False
    seen: int = 0
    resumed: bool = False
    idle: int = 1

    @classmethod
    def at(cls, clock: Clock, table: Ints, owners: Ints, layout: Layout) -> Cursor:
        """Return the cursor of a run with a table in which all rows are right."""
        ended = bool((table[:, DEALT] == ENDED).all())
        return cls(clock, table, owners, clock.micro_batch(layout), {}, ended=ended, idle=int(not ended))

    @property
    def is_calm(self) -> bool:
        """True if the next micro batch is of the segment of the one before, and there is nothing to look for."""
        return self.leg is not None and self.u < self.leg.calm_until

    @property
    def positions(self) -> Ints:
        """The table, in which all rows are written now; for the thread that takes batches."""
        for rows in self.newest.values():
            rows.write(self.table)
        self.newest.clear()
        if self.last is not None:
            self.last.write(self.table)
        return self.table

    def now(self, layout: Layout) -> Clock:
        """Return the counts of the run at the next micro batch, or of the step that it is part of (`Leg.whole_steps`)."""
        return self.clock.later(self.counted - self.clock.micro_batch(layout), layout)

    @property
    def counted(self) -> int:
        """The micro batch before which a state stands."""
        return self.u if self.leg is None else self.leg.counted(self.u)

    def past(self, made: MicroBatch) -> Cursor:
        """Return the cursor behind the next micro batch."""
        last = self.last
        if last is not None and last.slots is None and isinstance(last.visited, slice):
            self.newest[last.visited.start] = last
        elif last is not None:
            last.write(self.table)
        owners, leg = self.owners, self.leg
        if leg is not None and leg.deal is not None:
            for u in range(leg.counted(self.u), leg.counted(self.u + 1)):
                owners = leg.deal.owners(owners, u)
        return Cursor(
            self.clock, self.table, owners, self.u + 1, self.newest, self.leg, made.rows, False, self.seen, False, 0
        )  # fmt: skip

    def copy(self) -> Cursor:
        """Return the cursor with a table of its own."""
        table = self.table.copy()
        for rows in [*self.newest.values(), *([self.last] if self.last is not None else [])]:
            rows.write(table)
        return self._replace(table=table, newest={}, last=None)
