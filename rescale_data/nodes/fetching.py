"""Which fragments a logical shard needs soon, told to a source that brings them in the background."""

from __future__ import annotations

from rescale_data.nodes.share import ShardShare
from rescale_data.sources.interest import shards_of
from rescale_data.sources.pieces import AheadSource

_AT_ONCE = 64
_MAX_WINDOWS = 4


class Fetching:
    """The hints for one source.

    Args:
        source: The source.
        num_fragments: Of it.
        key: Of the source, under which this process's shards are known.
    """

    def __init__(self, source: AheadSource, num_fragments: int, key: int) -> None:
        self._source, self._num_fragments, self._key = source, num_fragments, key

    @property
    def num_windows(self) -> int:
        """How many windows behind the one that is read have room in the cache, together with those of all other shards here.

        A window's rows lie in up to two fragments, and each further one adds about one.
        """
        here = max(1, min(len(shards_of(self._key, self._num_fragments)), self._num_fragments))
        room = self._source.cache_bytes // max(1, here * self._source.fragment_bytes)
        return min(room - 2, _MAX_WINDOWS) if room > 3 else int(room >= 2)

    def begin(self, column: str | None, fragments: list[int], share: ShardShare | None) -> None:
        """Bring some fragments, if there is room for more than is being read; pieces always have room."""
        if share is None and not self.num_windows:
            return
        for fragment in fragments[:_AT_ONCE]:
            self._source.prepare(column, fragment, share)
