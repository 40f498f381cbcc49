"""`Spans`: the documents of a `Reader`, cut out of decoded fragments without a Python object for a row."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import Any

import numpy as np

from rescale_data.sources.source import TokenSource
from rescale_data.state import Ints

_FEW_FRAGMENTS = 4


class Spans:
    """A token column of one logical shard as `Documents`; positions are those of its `Reader`, (epoch, row).

    Args:
        source: The source.
        column: Its column of lists of integers.
        size: Rows of the shard.
        rows: The rows of the source that the shard reads from a row of an epoch on: one at least, up to any.
        num_bytes: About as much is read at once.
    """

    def __init__(
        self, source: TokenSource, column: str, size: int, rows: Callable[[int, int], Ints], num_bytes: int
    ) -> None:
        source.check_tokens(column)
        if source.fragments is None:
            raise TypeError(f"{source.name} can be read a fragment at a time, but says that it has no fragments.")
        self._source, self._column, self._size, self._rows = source, column, size, rows
        self._fragments = source.fragments
        self._bytes = num_bytes

    def read(self, position: memoryview) -> list[memoryview]:
        epoch, row = position
        if row >= self._size:
            return []
        rows = self._rows(epoch, row)
        rows = rows[: self._num_rows(int(rows[0]))]
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
        position[1] += num_documents

    def where(self) -> None:
        return None

    def turn(self, position: memoryview) -> None:
        position[0], position[1] = position[0] + 1, 0

    def _num_rows(self, row: int) -> int:
        """As many as fill a block, were all rows like those around ``row``."""
        tokens = self._source.tokens(self._column, bisect_right(self._fragments.data, row) - 1)
        mean = tokens.values.nbytes / (len(tokens.offsets) - 1)
        return max(1, int(self._bytes / max(1.0, mean)))

    def _cut(self, fragment: int, rows: Ints) -> list[memoryview]:
        """Rows of one fragment."""
        tokens = self._source.tokens(self._column, fragment)
        local = rows - self._fragments[fragment]
        starts, stops = tokens.offsets[local].tolist(), tokens.offsets[local + 1].tolist()
        values = tokens.values.data
        return [values[start:stop] for start, stop in zip(starts, stops, strict=True)]


def block_bytes(cache_bytes: int, num_logical_shards: int) -> int:
    """How much of a shard's tokens to put in order at once.

    Enough for many samples, so that a fragment is not decoded for each of them where the fragments of all shards exceed the
    cache; little enough for what all shards have put in order to take a quarter of it.
    """
    return max(2**16, min(2**18, cache_bytes // 4 // num_logical_shards))


def _copy(view: memoryview[Any]) -> memoryview[Any]:
    return memoryview(view.tobytes()).cast(view.format)  # pyright: ignore[reportArgumentType, reportCallIssue]


_NOTHING = memoryview(b"")
