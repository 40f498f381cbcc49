"""`Spans`: the documents of a `Reader`, cut out of decoded fragments without a Python object for a row."""

from __future__ import annotations

from bisect import bisect_right
from typing import Any, Protocol
from weakref import WeakSet

import numpy as np

from rescale_data.sources.source import TokenSource
from rescale_data.state import Ints

_FEW_FRAGMENTS = 4
_LARGER = 4


class Rows(Protocol):
    """The order in which one logical shard reads."""

    @property
    def size(self) -> int:
        """Rows of the shard."""
        ...

    def rows_from(self, epoch: int, row: int) -> Ints:
        """The rows of the source that are read from a row of the shard on: one at least, up to any."""
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
        self._fragments = source.fragments
        self._bytes = num_bytes
        _alive.add(self)

    def read(self, position: memoryview) -> list[memoryview]:
        epoch, row = position[0], position[1]
        if row >= self._rows.size:
            return []
        rows = self._rows.rows_from(epoch, row)
        rows = rows[: self._num_rows(int(rows[0]))]
        self._prepare(epoch, row)
        return _up_to(self._bytes * _LARGER, self._cut_all(rows))

    def _cut_all(self, rows: Ints) -> list[memoryview]:
        fragments = np.searchsorted(self._fragments, rows, side="right") - 1
        used = sorted(set(fragments.tolist()))
        if len(used) == 1:
            return self._cut(used[0], rows)
        cut: list[memoryview] = [_NOTHING] * len(rows)
        for fragment in used:
            places = np.flatnonzero(fragments == fragment)
            for place, view in zip(places.tolist(), self._cut(fragment, rows[places]), strict=True):
                cut[place] = _copy(view) if len(used) > _FEW_FRAGMENTS else view  # not to hold many fragments at once
        return cut

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
        tokens = self._source.tokens(self._column, self._fragment_at(row))
        self._fragment_bytes = tokens.nbytes
        mean = tokens.values.nbytes / (len(tokens.offsets) - 1)
        return max(1, int(self._bytes / max(1.0, mean)))

    def _prepare(self, epoch: int, row: int) -> None:
        """Have the next fragments decoded, where the cache has room for those of all shards."""
        if 2 * len(_alive) * self._fragment_bytes <= self._source.cache_bytes:
            for soon in self._rows.rows_soon(epoch, row):
                self._source.prepare(self._column, self._fragment_at(soon))

    def _fragment_at(self, row: int) -> int:
        return bisect_right(self._fragments.data, row) - 1

    def _cut(self, fragment: int, rows: Ints) -> list[memoryview]:
        """Rows of one fragment."""
        tokens = self._source.tokens(self._column, fragment)
        local = rows - self._fragments[fragment]
        starts, stops = tokens.offsets[local].tolist(), tokens.offsets[local + 1].tolist()
        values = tokens.values.data
        return [values[start:stop] for start, stop in zip(starts, stops, strict=True)]


def _up_to(num_bytes: int, documents: list[memoryview]) -> list[memoryview]:
    """The first of the documents, where all of them are far larger than those by whose size they were counted."""
    if sum(map(len, documents)) * documents[0].itemsize <= num_bytes:
        return documents
    ends = np.cumsum([len(document) * document.itemsize for document in documents])
    return documents[: int(np.searchsorted(ends, num_bytes)) + 1]


def block_bytes(cache_bytes: int, num_logical_shards: int) -> int:
    """How much of a shard's tokens to put in order at once.

    Enough for many samples, so that a fragment is not decoded for each of them where the fragments of all shards exceed the
    cache; little enough for what all shards have put in order to take a quarter of it.
    """
    return max(2**16, min(2**19, cache_bytes // 4 // num_logical_shards))


def _copy(view: memoryview[Any]) -> memoryview[Any]:
    return memoryview(view.tobytes()).cast(view.format)  # pyright: ignore[reportArgumentType, reportCallIssue]


_NOTHING = memoryview(b"")
_alive: WeakSet[Spans] = WeakSet()
