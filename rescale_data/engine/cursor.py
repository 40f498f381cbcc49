"""`Cursor`: the progress of a run on one rank: its table of positions, its counts and its next micro batch."""

from __future__ import annotations

from typing import NamedTuple

from rescale_data.engine.micro_batch import MicroBatch, TableUpdate
from rescale_data.engine.recipe import EPOCH_ENDED, REMAINDER_COLUMN
from rescale_data.engine.segment import EpochSegment
from rescale_data.layout.clock import Clock
from rescale_data.layout.layout import Layout
from rescale_data.state import Ints


class Cursor(NamedTuple):
    """The progress of a run on one rank: the table of positions, the counts, and the number of the next micro batch.

    The run moves by one assignment: another cursor takes the place of this one.

    When a segment begins, every rank has all N rows of the table right. Within the segment, each rank has only its own rows
    right.

    Args:
        clock: The counts of the run at an earlier moment, from which `clock_now` counts on.
        table: ``int64[N, columns]``, the positions of all logical shards, without the rows in `unwritten_rows` and `last_rows`.
        owners: ``int64[N]``, the rank that has the right row of each shard.
        u: The next micro batch, counted from `Clock.origin`.
        unwritten_rows: Rows of earlier micro batches that are not in the table yet: writing each of them would cost a twelfth
            of a packed batch. The key is the first shard: two slices of shards are equal, or have no shard in common
            (`AlignedBatchShards`).
        segment: The segment of the next micro batch; `None` if none is planned, or the epoch has ended.
        last_rows: The rows of the micro batch before u.
        epoch_ended: True if the last batch of the epoch was consumed.
        end_of_steps_seen: True if it is known that an epoch of ``steps_per_epoch`` steps ends here, so that the next begins.
        resumed: True if no batch was consumed since a load.
        empty_epochs: The number of epochs that have begun since a batch was consumed.
    """

    clock: Clock
    table: Ints
    owners: Ints
    u: int
    unwritten_rows: dict[int, TableUpdate]
    segment: EpochSegment | None = None
    last_rows: TableUpdate | None = None
    epoch_ended: bool = False
    end_of_steps_seen: bool = False
    resumed: bool = False
    empty_epochs: int = 1

    @classmethod
    def from_clock(cls, clock: Clock, table: Ints, owners: Ints, layout: Layout) -> Cursor:
        """Return the cursor at the counts `clock` and the positions `table`, whose rows are all up to date on this rank."""
        ended = bool((table[:, REMAINDER_COLUMN] == EPOCH_ENDED).all())
        return cls(clock, table, owners, clock.micro_batch(layout), {}, epoch_ended=ended, empty_epochs=int(not ended))

    @property
    def positions(self) -> Ints:
        """The table with the rows of all consumed micro batches written; only the thread that consumes batches may use it."""
        return self._write_rows_to(self.table)

    def clock_now(self, layout: Layout) -> Clock:
        """Return the counts of the run as a state saved at this moment contains them."""
        return self.clock.advanced(self.first_unsaved_batch - self.clock.micro_batch(layout), layout)

    @property
    def first_unsaved_batch(self) -> int:
        """The number of the first micro batch that a state saved at this moment does not include."""
        return self.u if self.segment is None else self.segment.first_unsaved_batch(self.u)

    def advanced(self, micro_batch: MicroBatch) -> Cursor:
        """Return the cursor after `micro_batch`, the next one, was consumed."""
        last_rows = self.last_rows
        if last_rows is not None and isinstance(last_rows.visited_shards, slice):
            self.unwritten_rows[last_rows.visited_shards.start] = last_rows
        elif last_rows is not None:
            last_rows.write(self.table)
        owners, segment = self.owners, self.segment
        if segment is not None and segment.remainder is not None:
            for u in range(segment.first_unsaved_batch(self.u), segment.first_unsaved_batch(self.u + 1)):
                owners = segment.remainder.owner_ranks_after(owners, u)
        return tuple.__new__(Cursor, (  # faster than `Cursor(...)`, which would cost 3 % of a packed batch
            self.clock, self.table, owners, self.u + 1, self.unwritten_rows, self.segment,
             micro_batch.rows, False, False, False, 0
        ))  # fmt: skip

    def copy(self) -> Cursor:
        """Return a copy of the cursor whose table is a separate array, with the rows of all consumed micro batches written."""
        return self._replace(table=self._write_rows_to(self.table.copy()), unwritten_rows={}, last_rows=None)

    def _write_rows_to(self, table: Ints) -> Ints:
        for pending_rows in [*self.unwritten_rows.values()]:  # a list: another thread may take a batch meanwhile
            pending_rows.write(table)
        if self.last_rows is not None:
            self.last_rows.write(table)
        return table
