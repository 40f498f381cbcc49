"""`Spans`: the documents of a `Reader`, cut out of decoded fragments without a Python object for a row."""

from __future__ import annotations

from bisect import bisect_right
from typing import Any, Protocol
from weakref import WeakSet

import numpy as np

from rescale_data.nodes.reading.share import ShardShare
from rescale_data.sources.decoded.pieces import PieceSource
from rescale_data.sources.source import DecodingSource, Tokens, TokenSource
from rescale_data.state import Ints

_FEW_FRAGMENTS = 4
_LARGER = 4


class Rows(Protocol):
    """The order in which one logical shard reads."""

    def size(self, epoch: int) -> int:
        """Rows of the shard in an epoch."""
        ...

    def rows_from(self, epoch: int, row: int) -> Ints:
        """The rows of the source that are read from a row of the shard on: one at least, up to any."""
        ...

    def share(self, epoch: int) -> ShardShare | None:
        """Where to find them in fragments that are cut up; `None` where fragments stay whole."""
        ...

    def rows_soon(self, epoch: int, row: int) -> list[int]:
        """Some rows of the source that are read soon after those."""
        ...

    def advance(self, position: memoryview, num_rows: int) -> None: ...
    def turn(self, position: memoryview) -> None: ...


class Spans:
    """A token column of one logical shard as `Documents`; positions are those of its `Reader`, (epoch, row).

    Args:
        source: The source.
        column: Its column of lists of integers.
        rows: The order of the shard.
        num_bytes: About as much is read at once.
    """

    def __init__(self, source: TokenSource, column: str, rows: Rows, num_bytes: int) -> None:
        source.check_tokens(column)
        if source.fragments is None:
            raise TypeError(f"{source.name} can be read a fragment at a time, but says that it has no fragments.")
        self._source, self._column, self._rows = source, column, rows
        self._decoding = source if isinstance(source, DecodingSource) else None
        self._fragments = source.fragments
        self._bytes = num_bytes
        self._share: ShardShare | None = None
        _alive.add(self)

    def read(self, position: memoryview) -> list[memoryview]:
        epoch, row = position[0], position[1]
        if row >= self._rows.size(epoch):
            return []
        self._share = self._rows.share(epoch)
        rows = self._rows.rows_from(epoch, row)
        rows = rows[: self._num_rows(int(rows[0]))]
        if self._decoding is not None and self._share is None:
            self._decode_ahead(self._decoding, epoch, row)
        return self._cut_all(rows)

    def _cut_all(self, rows: Ints) -> list[memoryview]:
        fragments = np.searchsorted(self._fragments, rows, side="right") - 1
        limit = self._bytes * _LARGER
        if fragments.min() == fragments.max():
            documents = self._cut(int(fragments[0]), rows)
            return documents if self._fragment_bytes <= limit else _up_to(limit, documents)
        used = sorted(set(fragments.tolist()))
        cut: list[memoryview] = [_NOTHING] * len(rows)
        for fragment in used:
            places = np.flatnonzero(fragments == fragment)
            for place, view in zip(places.tolist(), self._cut(fragment, rows[places]), strict=True):
                cut[place] = _copy(view) if len(used) > _FEW_FRAGMENTS else view  # not to hold many fragments at once
        return _up_to(limit, cut)

    def advance(self, position: memoryview, num_documents: int) -> None:
        self._rows.advance(position, num_documents)

    def settle(self, position: memoryview) -> None:
        pass

    def where(self) -> None:
        return None

    def turn(self, position: memoryview) -> None:
        self._rows.turn(position)

    def _num_rows(self, row: int) -> int:
        """As many as fill a block, were all rows like those around ``row``."""
        tokens = self._tokens(self._fragment_at(row))
        self._fragment_bytes = tokens.nbytes
        mean = tokens.values.nbytes / (len(tokens.offsets) - 1)
        return max(1, int(self._bytes / max(1.0, mean)))

    def _decode_ahead(self, source: DecodingSource, epoch: int, row: int) -> None:
        """Have the next fragments decoded, where the cache has room for those of all shards."""
        if 2 * len(_alive) * self._fragment_bytes <= source.cache_bytes:
            for soon in self._rows.rows_soon(epoch, row):
                source.decode_ahead(self._column, self._fragment_at(soon))

    def _tokens(self, fragment: int) -> Tokens:
        if self._share is None or not isinstance(self._source, PieceSource):
            return self._source.tokens(self._column, fragment)
        return self._source.tokens_of(self._column, fragment, self._share)

    def _fragment_at(self, row: int) -> int:
        return bisect_right(self._fragments.data, row) - 1

    def _cut(self, fragment: int, rows: Ints) -> list[memoryview]:
        """Rows of one fragment."""
        tokens = self._tokens(fragment)
        local = rows - (self._fragments[fragment] + tokens.first)
        starts, stops = tokens.offsets[local].tolist(), tokens.offsets[local + 1].tolist()
        values = tokens.values.data
        return [values[start:stop] for start, stop in zip(starts, stops, strict=True)]


def _up_to(num_bytes: int, documents: list[memoryview]) -> list[memoryview]:
    """The first of the documents, where all of them are far larger than those by whose size they were counted."""
    ends = np.cumsum(np.fromiter(map(len, documents), np.int64, len(documents)))
    most = num_bytes // documents[0].itemsize
    return documents if ends[-1] <= most else documents[: int(ends.searchsorted(most)) + 1]


def block_bytes(cache_bytes: int, num_logical_shards: int) -> int:
    """How much of a shard's tokens to put in order at once.

    Enough for many samples, so that a fragment is not decoded for each of them where the fragments of all shards exceed the
    cache; little enough for what all shards have put in order to take a quarter of it.
    """
    return max(2**16, min(2**20, cache_bytes // 4 // num_logical_shards))


def _copy(view: memoryview[Any]) -> memoryview[Any]:
    return memoryview(view.tobytes()).cast(view.format)  # pyright: ignore[reportArgumentType, reportCallIssue]


_NOTHING = memoryview(b"")
_alive: WeakSet[Spans] = WeakSet()
