"""`Cursor`: the place of a run on one rank."""

from __future__ import annotations

from typing import NamedTuple

from rescale_data.engine.leg import Leg
from rescale_data.engine.micro_batch import MicroBatch, Rows
from rescale_data.engine.recipe import DEALT, ENDED
from rescale_data.layout.clock import Clock
from rescale_data.layout.layout import Layout
from rescale_data.state import Ints


class Cursor(NamedTuple):
    """The place of a run on one rank. The run moves by one assignment: another cursor takes the place of this one.

    When a segment begins, every rank has all N rows of the table right. Within the segment, each rank has only its own rows
    right.

    Args:
        clock: The counts of the run at an earlier moment, from which `now` counts on.
        table: ``int64[N, columns]``, the positions of all logical shards, without the rows in `newest` and `last`.
        owners: ``int64[N]``, the rank that has the right row of each shard.
        u: The next micro batch, counted from `Clock.origin`.
        newest: Rows of earlier micro batches that are not in the table yet: writing each of them would cost a twelfth of a
            packed batch. The key is the first shard: two slices of shards are equal, or have no shard in common
            (`AlignedTurns`).
        leg: The segment of the next micro batch; `None` if none is planned, or the epoch has ended.
        last: The rows of the micro batch before u.
        ended: True if the last batch of the epoch was consumed.
        seen: With ``steps_per_epoch``, the number of epochs that are known to have ended.
        resumed: True if no batch was consumed since a load.
        idle: The number of epochs that have begun since a batch was consumed.
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
        """Return the cursor of a run whose table has all rows right."""
        ended = bool((table[:, DEALT] == ENDED).all())
        return cls(clock, table, owners, clock.micro_batch(layout), {}, ended=ended, idle=int(not ended))

    @property
    def is_calm(self) -> bool:
        """True if the segment goes on with the next micro batch, and its end need not be looked for."""
        return self.leg is not None and self.u < self.leg.calm_until

    @property
    def positions(self) -> Ints:
        """The table, with the rows of all consumed micro batches. Only the thread that consumes batches may use it."""
        return self._written(self.table)

    def now(self, layout: Layout) -> Clock:
        """Return the counts of the run at the micro batch `counted`."""
        return self.clock.later(self.counted - self.clock.micro_batch(layout), layout)

    @property
    def counted(self) -> int:
        """The first micro batch that a state of this moment does not contain."""
        return self.u if self.leg is None else self.leg.counted(self.u)

    def past(self, made: MicroBatch) -> Cursor:
        """Return the cursor after the next micro batch, `made`."""
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
        return self._replace(table=self._written(self.table.copy()), newest={}, last=None)

    def _written(self, table: Ints) -> Ints:
        for rows in [*self.newest.values()]:  # a list: another thread may take a batch meanwhile
            rows.write(table)
        if self.last is not None:
            self.last.write(table)
        return table
