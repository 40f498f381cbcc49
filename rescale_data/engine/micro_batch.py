"""`MicroBatch`: the batch of one ``next()`` on one rank, with the rows of the table that it advances."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from rescale_data.engine.recipe import SAMPLES
from rescale_data.state import Ints


class TableUpdate(NamedTuple):
    """Rows of the table of positions as they are after a micro batch; writing them twice has the same effect as once.

    Args:
        visited_shards: The logical shards that the micro batch visited.
        values: ``int64[M, columns]``, an array of its own.
        samples_not_counted_yet: The number of samples that each row has delivered but does not count yet.
    """

    visited_shards: slice | Ints
    values: Ints
    samples_not_counted_yet: int = 0

    @property
    def up_to_date_values(self) -> Ints:
        """The values of the rows, ``int64[M, columns]``, with `samples_not_counted_yet` added to the sample counts."""
        if not self.samples_not_counted_yet:
            return self.values
        values = self.values.copy()
        values[:, SAMPLES] += self.samples_not_counted_yet
        return values

    def write(self, table: Ints) -> None:
        """Write these positions of logical shards into a table of positions, ``int64[N, columns]``, in place."""
        table[self.visited_shards] = self.up_to_date_values


def merge_rows(rows_list: Sequence[TableUpdate]) -> TableUpdate:
    """Return the table rows of several micro batches as one `TableUpdate`, which has the same effect on a table."""
    index = np.concatenate([_indices(rows.visited_shards) for rows in rows_list])
    # If an index comes twice, the last value counts
    return TableUpdate(index, np.concatenate([rows.up_to_date_values for rows in rows_list]))


def _indices(index: slice | Ints) -> Ints:
    return np.arange(index.start, index.stop, index.step) if isinstance(index, slice) else index


class MicroBatch(NamedTuple):
    """A batch with the table rows that it advances, the logical shard of each sample, and the number of real samples.

    Args:
        shards: The shard of each sample.
        num_real: The number of real samples; the samples after them only fill the last batch of an epoch.
    """

    batch: Any
    rows: TableUpdate
    shards: list[int]
    num_real: int
