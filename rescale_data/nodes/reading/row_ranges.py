"""`ShardRowRanges`: the pieces of fragments that each logical shard reads, so that decoded fragments can be cut."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np

from rescale_data.order import FragmentOrder
from rescale_data.rounds import shard_starts
from rescale_data.shard import Shard
from rescale_data.sources.decoded.cache_demand import served_shards
from rescale_data.sources.source import RowRange
from rescale_data.state import Ints


@dataclass(frozen=True, eq=False)
class ShardRowRanges:
    """The pieces of fragments that one logical shard, and the other shards of this process, read in one epoch.

    Args:
        shard: Any logical shard of the run.
        epoch: The epoch.
        fragments: ``int64[F + 1]``, the first row of each fragment of the source, and the end.
        order: Order of the fragments in this epoch; `None` for the order of the source.
        source_key: Key of the source, under which the shards of this process are registered.
        shard_index: The logical shard that reads.
        row_range_shift: Number of places by which the ranges of all shards have moved in this epoch, see `rescale_data.rounds`.
        fragments_hash: See `DataVersion`.
    """

    shard: Shard
    epoch: int
    fragments: Ints
    order: FragmentOrder | None
    source_key: int
    shard_index: int
    row_range_shift: int
    fragments_hash: int = 0

    @property
    def _num_rows(self) -> int:
        return int(self.fragments[-1] if self.order is None else self.order.starts_in_order[-1])

    @property
    def shard_key(self) -> Hashable:
        return self._shard_key_of(self.shard_index)

    def served_row_ranges(self, fragment: int) -> list[RowRange]:
        num_rows = int(self.fragments[fragment + 1] - self.fragments[fragment])
        if not num_rows:
            return []
        begin = self._first_row_in_order(fragment)
        num_shards = self.shard.num_logical_shards
        starts = shard_starts(np.arange(num_shards + 1), self._num_rows, num_shards)
        first_range = int(np.searchsorted(starts, begin, side="right")) - 1
        stop_range = int(np.searchsorted(starts, begin + num_rows, side="left"))
        served_indices = set(served_shards(self.source_key, num_shards)) | {self.shard_index}
        row_ranges: list[RowRange] = []
        for index in range(first_range, stop_range):
            start = max(int(starts[index]) - begin, 0)
            stop = min(int(starts[index + 1]) - begin, num_rows)
            shard = (index - self.row_range_shift) % num_shards
            if shard in served_indices and stop > start:
                row_ranges.append(RowRange(self._shard_key_of(shard), start, stop))
        return row_ranges

    def own_row_range(self, fragment: int) -> RowRange:
        return next(served for served in self.served_row_ranges(fragment) if served.shard_key == self.shard_key)

    def _first_row_in_order(self, fragment: int) -> int:
        """Return the index of a fragment's first row among all rows in the order of the epoch."""
        row = self.fragments[fragment]
        if self.order is None:
            return int(row)
        is_this_fragment = (self.order.fragment_starts == row) & (np.diff(self.order.starts_in_order) > 0)
        return int(self.order.starts_in_order[np.flatnonzero(is_this_fragment)[0]])

    def _shard_key_of(self, shard: int) -> Hashable:
        n, seed = self.shard.num_logical_shards, self.shard.seed
        return (self.order is not None, seed, n, self._num_rows, self.fragments_hash, self.epoch, shard)
