"""`MicroBatch`: the batch of one ``next()`` on one rank, with the rows of the table that it advances."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from rescale_data.engine.recipe import SAMPLES
from rescale_data.state import Ints


class TableRows(NamedTuple):
    """Rows of the table of positions as they are after a micro batch; writing them twice has the same effect as once.

    Args:
        visited_shards: The logical shards that the micro batch visited.
        values: ``int64[M, columns]``, an array of its own; with ``slots``, the values of these slots.
        slots: The slots of the whole table, counted row by row, that changed; `None`: all slots of the visited rows.
        uncounted_samples: The number of samples that each row has delivered but does not count yet.
    """

    visited_shards: slice | Ints
    values: Ints
    slots: Ints | None = None
    uncounted_samples: int = 0

    @property
    def counted_values(self) -> Ints:
        """The values of the rows, ``int64[M, columns]``, with the uncounted samples added to the sample counts."""
        if not self.uncounted_samples:
            return self.values
        values = self.values.copy()
        values[:, SAMPLES] += self.uncounted_samples
        return values

    def write(self, table: Ints) -> None:
        """Write the rows into a table, ``int64[N, columns]``, in place."""
        if self.slots is None:
            table[self.visited_shards] = self.counted_values
        else:
            table.flat[self.slots] = self.values


def merge_rows(rows_list: Sequence[TableRows]) -> TableRows:
    """Return the table rows of several micro batches as one `TableRows`, which has the same effect on a table."""
    visited = np.concatenate([_indices(rows.visited_shards) for rows in rows_list])
    values, slots = (
        np.concatenate([rows.counted_values for rows in rows_list]),
        [rows.slots for rows in rows_list if rows.slots is not None],
    )
    # If an index comes twice, the last value counts
    return TableRows(visited, values, np.concatenate(slots) if slots else None)


def _indices(visited: slice | Ints) -> Ints:
    return np.arange(visited.start, visited.stop, visited.step) if isinstance(visited, slice) else visited


class MicroBatch(NamedTuple):
    """A batch with the table rows that it advances, the logical shard of each sample, and the number of real samples.

    Args:
        shards: The shard of each sample.
        num_real: The number of real samples; the samples after them only fill the last batch of an epoch.
    """

    batch: Any
    rows: TableRows
    shards: list[int]
    num_real: int

    def with_changes(self, table: Ints) -> MicroBatch:
        """Write the rows into `table`; return the micro batch with only the integers of the table that this changed."""
        visited = self.rows.visited_shards
        values_before = table[visited].copy()
        self.rows.write(table)
        values_after = table[visited]
        changed_rows, changed_columns = np.nonzero(values_after != values_before)
        slots = np.arange(len(table))[visited][changed_rows] * table.shape[1] + changed_columns
        return self._replace(rows=TableRows(visited, values_after[changed_rows, changed_columns], slots))
