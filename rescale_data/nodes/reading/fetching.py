"""`FragmentPrefetcher`: requests the fragments that a logical shard needs soon; the source fetches them in the background."""

from __future__ import annotations

from rescale_data.nodes.reading.share import ShardRowRanges
from rescale_data.sources.decoded.cache import cache_share
from rescale_data.sources.decoded.interest import served_shards
from rescale_data.sources.source import Source
from rescale_data.state import Ints

_MAX_FRAGMENTS = 64
_MAX_WINDOWS = 5


class FragmentPrefetcher:
    """Requests fragments of one source before they are needed.

    Args:
        source: The source.
        fragments: ``int64[F + 1]``, the first row of each fragment, and the end.
        source_key: Key of the source, under which the shards of this process are registered.
        rows_per_window: Number of rows of a window.
    """

    def __init__(self, source: Source, fragments: Ints, source_key: int, rows_per_window: int) -> None:
        self._source, self._source_key = source, source_key
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
            self._source.prepare(column, fragment, share)
