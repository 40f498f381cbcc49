"""`Chunks`: rows fetched some at a time from a source that does so at less cost than one by one."""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

from rescale_data.sources.decoded.cache import Made, cache, owner_of
from rescale_data.sources.decoded.sizes import size_of
from rescale_data.sources.source import BatchSource
from rescale_data.state import Ints


class Chunk(Made):
    """Rows that were fetched and not yet handed out."""

    def __init__(self, samples: dict[int, Any]) -> None:
        self.samples = samples
        self.nbytes = sum(size_of(sample) for sample in samples.values())


class Chunks:
    """The rows of one logical shard, fetched ahead as far as half of the cache has room for those of all shards."""

    def __init__(self, source: BatchSource) -> None:
        self._source = source
        self._key = (owner_of(self), "chunk")
        self._mean_bytes = 0.0
        _alive.add(self)

    def take(self, rows: Ints, at: int) -> Any:
        """The row ``rows[at]``; the caller's own, and no longer here."""
        index = int(rows[at])
        chunk: Chunk | None = cache().get(self._key)
        if chunk is None or index not in chunk.samples:
            chunk = self._fetch(rows[at : at + self._num_rows()].tolist())
            cache().register(self._source)
            cache().put(self._key, chunk)
        return chunk.samples.pop(index)

    def _fetch(self, indices: list[int]) -> Chunk:
        try:
            samples = self._source.rows(indices)
        except Exception:
            if len(indices) == 1:
                raise
            indices = indices[:1]  # the others may be as well: each is blamed when it is its turn
            samples = self._source.rows(indices)
        chunk = Chunk(dict(zip(indices, samples, strict=True)))
        self._mean_bytes = chunk.nbytes / len(indices)
        return chunk

    def _num_rows(self) -> int:
        if not self._mean_bytes:
            return 1
        room = self._source.cache_bytes / (2 * len(_alive) * self._mean_bytes)
        return max(1, min(self._source.batch_rows, int(room)))


_alive: WeakSet[Chunks] = WeakSet()
