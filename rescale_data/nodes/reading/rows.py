"""`SourceRows`: the row numbers of a source that each logical shard reads, in the order of each epoch."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING
from weakref import ref

import numpy as np

from rescale_data.nodes.reading.epochs import DataVersion, SourceEpochs
from rescale_data.nodes.reading.gather import rows_of_window
from rescale_data.nodes.reading.proof import running_hash_sums
from rescale_data.nodes.reading.row_ranges import ShardRowRanges
from rescale_data.order import FragmentOrder, GlobalBatchOrder, ShardOrder, encipher, permuted_fragments
from rescale_data.shard import Shard
from rescale_data.sources.decoded.cache import EvictionListener, cache, owner_id
from rescale_data.sources.source import Source
from rescale_data.state import Ints

if TYPE_CHECKING:
    from rescale_data.nodes.reader import Reader

DEFAULT_WINDOW_ROWS = 1024
_NO_ROW_HASH_SUMS = memoryview(b"")
_shard_order = lru_cache(maxsize=1024)(ShardOrder)
_PLAN_OVERHEAD_BYTES = 750  # bytes of a cached plan beside its arrays, and of the objects that its reader keeps as long


@dataclass(frozen=True, slots=True)
class WindowPlan(EvictionListener):
    """Row numbers of the source for one window of a logical shard, in the order in which they are read.

    Args:
        epoch: The epoch.
        num_epoch_rows: The number of rows of the shard in this epoch.
        first_row: The shard's row at which the plan begins.
        rows: ``int64[n]``, rows of the source.
        row_hash_sums: `running_hash_sums` of the rows, if `Shard.verify` is set; else empty.
        unblocked: ``int64[k]``, the indices of the rows that are not left out, ascending; `None` for all rows.
        reader: The reader, if it still exists: its `drop_order` is called when the cache drops the plan. The cache keeps
            neither the reader nor its source alive.
    """

    epoch: int
    num_epoch_rows: int
    first_row: int
    rows: Ints
    row_hash_sums: memoryview
    unblocked: memoryview | None
    reader: ref[Reader]

    @property
    def nbytes(self) -> int:
        unblocked_bytes = 0 if self.unblocked is None else self.unblocked.nbytes
        return self.rows.nbytes + self.row_hash_sums.nbytes + unblocked_bytes + _PLAN_OVERHEAD_BYTES

    def unblocked_indices(self, first: int, stop: int) -> Ints:
        """Return the indices from ``first`` to ``stop - 1`` whose rows are not left out."""
        if self.unblocked is None:
            return np.arange(first, stop)
        return np.asarray(self.unblocked[bisect_left(self.unblocked, first) : bisect_left(self.unblocked, stop)])

    def num_blocked(self, index: int) -> int:
        """Return the number of rows that are left out from an index on, before the next row that is not."""
        if self.unblocked is None:
            return 0
        place = bisect_left(self.unblocked, index)
        return (self.unblocked[place] if place < len(self.unblocked) else len(self.rows)) - index

    def handle_eviction(self) -> None:
        if (reader := self.reader()) is not None:
            reader.drop_order()


class SourceRows(SourceEpochs):
    """The rows of a source that each logical shard reads, in the order of each epoch. Readers of all shards share them.

    Args:
        source: The source.
        shard: Any of the logical shards.
        shuffle, by_global_batch: See `Reader`.
        versions: Contents of the source, in the order of their first epochs; empty for all rows from the first epoch on.

    Raises:
        ValueError: ``shuffle`` is no valid window, or does not fit ``by_global_batch`` and the shard.
    """

    __slots__ = ("_source", "permutes_all_rows", "source_key", "window")

    def __init__(
        self,
        source: Source,
        shard: Shard,
        shuffle: bool | int,
        by_global_batch: bool,
        versions: Sequence[DataVersion] = (),
    ) -> None:
        order = _global_batch_order(shard, shuffle) if by_global_batch else None
        super().__init__(shard, versions or (DataVersion(0, source.num_rows),), order)
        self._source, self.source_key = source, owner_id(source)
        self.permutes_all_rows = shuffle is True and source.fragments is None
        self.window = 0 if self.permutes_all_rows else _to_window_rows(shuffle)

    @property
    def rows_per_window(self) -> int:
        """Number of rows whose order is computed at once: the rows of a window."""
        return self.order(0, 0).rows_per_window

    def order(self, epoch: int, shard: int) -> ShardOrder:
        return _shard_order(
            num_rows=self.version(epoch).num_rows,
            row_range_index=self.row_range_of_shard(epoch, shard),
            num_logical_shards=self.shard.num_logical_shards,
            seed=self.shard.seed,
            window=self.window,
            permutes_all_rows=self.permutes_all_rows,
            global_batch_order=self.global_batch_order,
        )

    def new_plan(self, epoch: int, row: int, reader: Reader) -> WindowPlan:
        """Compute the plan of the window around ``row`` of a reader's shard."""
        order = self.order(epoch, reader.shard.index)
        rows = self.window_rows(epoch, row, reader.shard.index)
        sums = running_hash_sums(self.to_epoch_rows(epoch, rows)) if self.shard.verify else _NO_ROW_HASH_SUMS
        blocklist = reader.core.blocklist
        unblocked = None if blocklist is None else blocklist.unblocked_indices(rows)
        first_row = order.window_bounds(row)[0]
        return WindowPlan(epoch, order.num_shard_rows, first_row, rows, sums, unblocked, ref(reader))

    @property
    def plan_bytes(self) -> int:
        """Approximate size in bytes of the plan of one logical shard in the cache."""
        num_rows = min(self.rows_per_window, self.order(0, 0).num_shard_rows)
        return _PLAN_OVERHEAD_BYTES + num_rows * 8 * (1 + self.shard.verify)

    def window_rows(self, epoch: int, row: int, shard: int) -> Ints:
        """Return the row numbers of the source in the window around ``row`` of a shard, in the order of reading."""
        order, num_rows = self.order(epoch, shard), self.version(epoch).num_rows
        if self.permutes_all_rows and num_rows < self.shard.num_logical_shards:
            return self._round_order(num_rows, self.shuffle_key(epoch))[order.rows_in_order(*order.window_bounds(row))]
        return rows_of_window(order, self.shuffle_key(epoch), row, self.fragment_order(epoch))

    def _round_order(self, num_rows: int, round_number: int) -> Ints:
        """Return all rows of a source with fewer rows than shards, in the order of a round (N epochs for N shards)."""
        cache_key = (self.source_key, "few", self.shard.seed, num_rows, round_number)
        all_rows = np.arange(num_rows, dtype=np.int64)
        return cache().get_or_make(
            cache_key, lambda: encipher(all_rows, num_rows, "full", self.shard.seed, round_number)
        )

    def windows(self, epoch: int, row: int, shard: int) -> Iterator[Ints]:
        """Yield the row numbers of the source that a shard reads from ``row`` of an epoch on, one window at a time."""
        order = self.order(epoch, shard)
        while row < order.num_shard_rows:
            first_row, stop_row = order.window_bounds(row)
            yield self.window_rows(epoch, row, shard)[row - first_row :]
            row = stop_row

    def fragments_around(self, epoch: int, row: int, shard: int) -> list[int]:
        """Return the fragments of the source that hold the rows of the window around ``row`` of a shard."""
        if self._source.fragments is None:
            return []
        rows = self.unshuffled_rows(epoch, *self.order(epoch, shard).window_bounds(row), shard)
        return np.unique(np.searchsorted(self._source.fragments, rows, side="right") - 1).tolist()

    def next_window(self, epoch: int, row: int, shard: int) -> tuple[int, int]:
        """Return the epoch and row at which the window after the window of ``row`` of a shard begins."""
        order = self.order(epoch, shard)
        stop_row = order.window_bounds(row)[1]
        return (epoch, stop_row) if stop_row < order.num_shard_rows else (self.next_epoch(epoch, shard), 0)

    def next_window_ends(self, epoch: int, row: int, shard: int) -> list[int]:
        """Return the first and last row of the source in the window after ``row``'s window; none at the end of the epoch."""
        next_epoch, next_row = self.next_window(epoch, row, shard)
        if next_epoch != epoch:
            return []
        return self.unshuffled_rows(epoch, *self.order(epoch, shard).window_bounds(next_row), shard)[[0, -1]].tolist()

    def unshuffled_rows(self, epoch: int, first_row: int, stop: int, shard: int) -> Ints:
        """Return the rows of the source for rows ``first_row .. stop - 1`` of a shard, before windows are permuted."""
        order, shuffle_key = self.order(epoch, shard), self.shuffle_key(epoch)
        return order.unshuffled_rows(shuffle_key, first_row, stop, self.fragment_order(epoch))

    def to_epoch_rows(self, epoch: int, rows: Ints) -> Ints:
        """Convert row numbers of the source to row numbers within the contents of an epoch, without files added later."""
        fragments, version = self._source.fragments, self.version(epoch)
        if fragments is None or version.fragments is None:
            return rows
        fragment_starts, fragment_lengths = fragments[:-1][version.fragments], np.diff(fragments)[version.fragments]
        fragment_index = np.searchsorted(fragment_starts, rows, side="right") - 1
        return rows - fragment_starts[fragment_index] + (np.cumsum(fragment_lengths) - fragment_lengths)[fragment_index]

    def find_shard_rows(self, rows: Ints, epoch: int) -> list[tuple[int, int]]:
        """Return sorted pairs ``(shard, row of the shard)`` that read given rows of the source in an epoch."""
        shards = np.arange(self.shard.num_logical_shards, dtype=np.int64)
        shard_sizes, shards_and_rows = self.sizes(np.full_like(shards, epoch), shards), list[tuple[int, int]]()
        for shard in np.flatnonzero(shard_sizes).tolist():
            shard_rows = np.flatnonzero(np.isin(self.unshuffled_rows(epoch, 0, int(shard_sizes[shard]), shard), rows))
            for first_row in sorted({self.order(epoch, shard).window_bounds(row)[0] for row in shard_rows.tolist()}):
                indices = np.flatnonzero(np.isin(self.window_rows(epoch, first_row, shard), rows))
                shards_and_rows += [(shard, first_row + row) for row in indices.tolist()]
        return shards_and_rows

    def share(self, epoch: int, shard: int) -> ShardRowRanges | None:
        """Return the pieces of fragments that a shard reads in an epoch; `None` if fragments cannot be cut."""
        fragments = self._source.fragments
        if fragments is None or self.global_batch_order is not None:
            return None
        row_range_shift = self.row_range_of_shard(epoch, shard) - shard
        order, fragments_hash = self.fragment_order(epoch), self.version(epoch).fragments_hash
        return ShardRowRanges(
            self.shard, epoch, fragments, order, self.source_key, shard, row_range_shift, fragments_hash
        )

    def fragment_order(self, epoch: int) -> FragmentOrder | None:
        """Return the fragments in the order of an epoch; `None` if rows are read in the order of the source."""
        fragments, version = self._source.fragments, self.version(epoch)
        if fragments is None or (not self.window and version.fragments is None):
            return None
        epoch = self.shuffle_key(epoch) if self.window else version.since_epoch
        cache_key = (self.source_key, "order", self.window > 0, self.shard.seed, epoch, version.fragments_hash)
        return cache().get_or_make(cache_key, lambda: self._fragment_order(fragments, version, epoch))

    def _fragment_order(self, fragments: Ints, version: DataVersion, epoch: int) -> FragmentOrder:
        fragment_starts, fragment_lengths = fragments[:-1], np.diff(fragments)
        if version.fragments is not None:
            fragment_starts, fragment_lengths = fragment_starts[version.fragments], fragment_lengths[version.fragments]
        if not self.window:
            return FragmentOrder.of(fragment_starts, fragment_lengths)
        return permuted_fragments(fragment_starts, fragment_lengths, self.shard.seed, epoch)


def _global_batch_order(shard: Shard, shuffle: bool | int) -> GlobalBatchOrder:
    if shuffle is not False or shard.repeat:
        raise ValueError(
            f"by_global_batch=True with shuffle={shuffle!r}, repeat={shard.repeat}: the order of the source is that of one "
            f"epoch, not shuffled. Give shuffle=False and repeat=False."
        )
    return GlobalBatchOrder(num_logical_shards=shard.num_logical_shards, global_batch_size=shard.global_batch_size)


def _to_window_rows(shuffle: bool | int) -> int:
    if isinstance(shuffle, bool):
        return DEFAULT_WINDOW_ROWS if shuffle else 0
    if not isinstance(shuffle, int | np.integer) or shuffle < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(
            f"shuffle={shuffle!r}: give True, False for the files' order, or the window in rows (at least 1)."
        )
    return int(shuffle)
