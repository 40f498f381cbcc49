"""`Taken`: the table of a run as the micro batches that were taken leave it."""

from __future__ import annotations

from collections.abc import Callable

from rescale_data.engine.micro_batch import MicroBatch, write
from rescale_data.state import Ints


class Taken:
    """A table that is written when it is read: until then the newest rows of each turn lie beside it.

    Slices of shards are the same or have no shard in common (`AlignedTurns`).
    """

    __slots__ = ("_newest", "_table")

    def __init__(self, table: Ints) -> None:
        self._table = table
        self._newest: dict[int, tuple[slice, Ints | bytes, int]] = {}  # by the first shard that was visited

    def undoing(self, shards: slice | Ints) -> Callable[[], None]:
        """Return a function that undoes all from here on, after one micro batch that visits these shards has been added."""
        rows = self.table[shards].copy()

        def undo() -> None:
            self.table[shards] = rows

        return undo

    @property
    def table(self) -> Ints:
        """All that was taken is in it; whoever writes into it moves the run."""
        if self._newest:
            for newest in self._newest.values():
                write(self._table, *newest)
            self._newest = {}
        return self._table

    def add(self, micro_batch: MicroBatch) -> None:
        """Count one more micro batch as taken."""
        _, visited, rows, _, _, slots, more = micro_batch
        if slots is None and isinstance(visited, slice):
            self._newest[visited.start] = visited, rows, more
        else:
            micro_batch.commit(self.table)
