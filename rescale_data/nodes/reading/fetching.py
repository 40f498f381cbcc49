"""`FragmentPrefetcher` and `ChunkFetcher`: fetch fragments and rows of a source before a `Reader` needs them."""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

from rescale_data.nodes.reading.row_ranges import ShardRowRanges
from rescale_data.nodes.reading.rows import WindowPlan
from rescale_data.sources.decoded.cache import CostlyValue, cache, cache_share, owner_id
from rescale_data.sources.decoded.cache_demand import served_shards
from rescale_data.sources.decoded.sizes import memory_bytes_of
from rescale_data.sources.source import Source
from rescale_data.state import Ints

_MAX_FRAGMENTS = 64
_MAX_WINDOWS = 5


class FragmentPrefetcher:
    """Requests fragments of one source before they are needed.

    Args:
        source: The source.
        fragments: ``int64[F + 1]``, the first row of each of its fragments, and the end.
        rows_per_window: Number of rows of a window.
    """

    def __init__(self, source: Source, fragments: Ints, rows_per_window: int) -> None:
        self._source, self._source_key = source, owner_id(source)
        self._num_fragments = len(fragments) - 1
        self._fragments_per_window = rows_per_window * self._num_fragments / max(1, int(fragments[-1]))

    @property
    def num_windows(self) -> int:
        """Number of windows per logical shard of this process that fit the cache, including the present window.

        A window takes as many fragments as its rows fill. The first window takes one more, since it begins inside a fragment.
        """
        num_shards = max(1, min(len(served_shards(self._source_key, self._num_fragments)), self._num_fragments))
        max_fragments = cache_share(self._source) // max(1, num_shards * self._source.fragment_bytes)
        return min(_MAX_WINDOWS, int(max(0, max_fragments - 1) / self._fragments_per_window))

    def begin(self, column: str | None, fragments: list[int], share: ShardRowRanges | None) -> None:
        """Start to fetch some fragments of a column in the background."""
        for fragment in fragments[:_MAX_FRAGMENTS]:
            self._source.prefetch(column, fragment, share)


class Chunk(CostlyValue):
    """Rows that were fetched and are not used yet, and an error for each row that could not be read."""

    def __init__(self, samples: dict[int, Any], errors: dict[int, Exception]) -> None:
        self.samples, self.errors = samples, errors
        self.nbytes = sum(memory_bytes_of(sample) for sample in samples.values())


class ChunkFetcher:
    """Fetches rows of one logical shard ahead. All shards together use half of the cache for such rows."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._cache_key = (owner_id(self), "chunk")
        self._mean_row_bytes = 0.0
        _all_chunks.add(self)

    def take(self, plan: WindowPlan, index: int) -> Any:
        """Return the row at an index of a plan and drop it from the cache; if needed, fetch it and the next rows first."""
        row = int(plan.rows[index])
        chunk: Chunk | None = cache().get(self._cache_key)
        if chunk is None or (row not in chunk.samples and row not in chunk.errors):
            indices = plan.unblocked_indices(index, len(plan.rows))[: self._num_rows()]
            chunk = self._fetch(plan.rows[indices].tolist())
            cache().register(self._source)
            cache().put(self._cache_key, chunk)
        if (error := chunk.errors.pop(row, None)) is not None:
            raise error
        return chunk.samples.pop(row)

    def _fetch(self, indices: list[int]) -> Chunk:
        try:
            samples, errors = dict(zip(indices, self._source.rows(indices), strict=True)), dict[int, Exception]()
        except Exception:  # of one row or several: each is fetched once more, and its error is raised in its turn
            samples, errors = {}, {}
            for index in indices:
                try:
                    (samples[index],) = self._source.rows([index])
                except Exception as error:
                    errors[index] = error
        chunk = Chunk(samples, errors)
        self._mean_row_bytes = chunk.nbytes / max(1, len(samples))
        return chunk

    def _num_rows(self) -> int:
        if not self._mean_row_bytes:
            return 1
        max_rows = cache_share(self._source) / (2 * len(_all_chunks) * self._mean_row_bytes)
        return max(1, min(self._source.batch_rows, int(max_rows)))


_all_chunks: WeakSet[ChunkFetcher] = WeakSet()
