"""`MicroBatch`: what one rank serves at a time, and what that does to the table."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from rescale_data.engine.collate import with_valid
from rescale_data.engine.recipe import SAMPLES
from rescale_data.state import Ints


class MicroBatch(NamedTuple):
    """A micro batch and what it does to the table: the rows of the shards that it visited, as they are after it.

    Args:
        rows: ``int64[M, columns]``, an array of its own, or its bytes; with ``slots``, the values of these.
        shards: The shard of each sample.
        num_real: How many samples are real; those after them fill the last batch of an epoch.
        slots: Those of the whole table, counted row by row, that it changed; `None` where rows are told whole.
        more: Samples that each of these shards has delivered beside those that its row says.
    """

    batch: Any
    visited: slice | Ints
    rows: Ints | bytes
    shards: list[int]
    num_real: int
    slots: Ints | None = None
    more: int = 0

    def commit(self, table: Ints) -> None:
        """Write what it does into the table."""
        if self.slots is None:
            write(table, self.visited, self.rows, self.more)
        else:
            table.flat[self.slots] = self.rows

    def since(self, table: Ints) -> MicroBatch:
        """The same, told by the slots that it changes in a table, and committed there."""
        before = table[self.visited].copy()
        self.commit(table)
        rows = table[self.visited]
        shards, columns = np.nonzero(rows != before)
        slots = np.arange(len(table))[self.visited][shards] * table.shape[1] + columns
        return self._replace(rows=rows[shards, columns], slots=slots, more=0)

    def with_valid(self) -> MicroBatch:
        """The same, whose batch says which of its samples are real."""
        return self._replace(batch=with_valid(self.batch, self.num_real, len(self.shards)))


def write(table: Ints, visited: slice | Ints, rows: Ints | bytes, more: int) -> None:
    """Rows of a `MicroBatch` into their places."""
    if isinstance(rows, bytes):
        rows = np.frombuffer(rows, dtype=np.int64).reshape(-1, table.shape[1])
    table[visited] = rows
    if more:
        table[visited, SAMPLES] += more
