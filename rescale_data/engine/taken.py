"""`Taken`: the table of a run as the micro batches that were taken leave it, and as it was where the last step began."""

from __future__ import annotations

from rescale_data.engine.leg import Standing
from rescale_data.engine.micro_batch import MicroBatch, write
from rescale_data.state import Ints


class Taken:
    """A table that is written when it is read: until then the newest rows of each turn lie beside it.

    Slices of shards are the same or have no shard in common (`AlignedTurns`).
    """

    __slots__ = ("_before", "_newest", "_table", "began")

    def __init__(self, table: Ints) -> None:
        self._table = table
        self.began: tuple[Standing, int] | None = None
        """Where the run stood, and its micro batch, when the last step began in this table."""
        self._newest: dict[int, tuple[slice, Ints | bytes, int]] = {}  # by the first shard that was visited
        self._before: list[
            tuple[slice | Ints, Ints | bytes | None, int]
        ] = []  # since the step began; None: as the table has it

    def copy(self) -> Taken:
        copied = Taken(self.table.copy())
        copied.began, copied._before = self.began, self._before.copy()
        return copied

    @property
    def table(self) -> Ints:
        """All that was taken is in it; whoever writes into it moves the run."""
        if self._newest:
            self._before = [(at, self._table[at].copy() if rows is None else rows, n) for at, rows, n in self._before]
            for newest in self._newest.values():
                write(self._table, *newest)
            self._newest = {}
        return self._table

    def add(self, micro_batch: MicroBatch, began: tuple[Standing, int] | None) -> None:
        """One more was taken; the first of a step says where that begins."""
        if began is not None:
            self.began, self._before = began, []
        _, visited, rows, _, _, slots, more = micro_batch
        if slots is None and isinstance(visited, slice):
            first = visited.start
            self._before.append(self._newest.get(first) or (visited, None, 0))
            self._newest[first] = visited, rows, more
        else:
            self.keep(visited)
            micro_batch.commit(self._table)

    def keep(self, shards: slice | Ints) -> None:
        """These rows are about to be written."""
        rows = self.table[shards].copy()
        self._before.append((shards, rows, 0))

    def at_step(self) -> Ints:
        """The table where the last step began, a copy."""
        table = self.table.copy()
        for shards, rows, more in reversed(self._before):
            write(table, shards, table[shards] if rows is None else rows, more)
        return table
