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
        values: ``int64[M, columns]``, an array of its own.
        samples_to_add: The number of samples that each row has delivered but does not count yet.
    """

    visited_shards: slice | Ints
    values: Ints
    samples_to_add: int = 0

    @property
    def counted_values(self) -> Ints:
        """The values of the rows, ``int64[M, columns]``, after `samples_to_add` have been added to the sample counts."""
        if not self.samples_to_add:
            return self.values
        values = self.values.copy()
        values[:, SAMPLES] += self.samples_to_add
        return values

    def write(self, table: Ints) -> None:
        """Write these positions of logical shards into a table of positions, ``int64[N, columns]``, in place."""
        table[self.visited_shards] = self.counted_values


def merge_rows(rows_list: Sequence[TableRows]) -> TableRows:
    """Return the table rows of several micro batches as one `TableRows`, which has the same effect on a table."""
    index = np.concatenate([_indices(rows.visited_shards) for rows in rows_list])
    # If an index comes twice, the last value counts
    return TableRows(index, np.concatenate([rows.counted_values for rows in rows_list]))


def _indices(index: slice | Ints) -> Ints:
    return np.arange(index.start, index.stop, index.step) if isinstance(index, slice) else index


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
