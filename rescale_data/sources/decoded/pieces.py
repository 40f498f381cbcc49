"""`Piece`: the rows of one fragment that one logical shard reads. A fragment that is decoded once then serves all shards.

fragment, decoded      | rows of shard 7 | rows of shard 8 | rows of shard 9 |
cut, by copy           [ piece           ] [ piece         ] [ piece         ]   in the cache; beyond it on disk
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cached_property
from typing import NamedTuple, Protocol

import pyarrow as pa

from rescale_data.sources.arrow_types import ArrowBuffer, ArrowTable
from rescale_data.sources.decoded.cache import Evicted
from rescale_data.sources.decoded.columns import Fragment, token_lists
from rescale_data.sources.source import Tokens


class Cut(NamedTuple):
    """Rows ``start .. stop - 1`` of a fragment, and the key of the share that reads them."""

    key: Hashable
    start: int
    stop: int


class Share(Protocol):
    """The pieces that one logical shard reads in one epoch."""

    @property
    def key(self) -> Hashable: ...

    def cuts(self, fragment: int) -> Sequence[Cut]:
        """Return the pieces of a fragment for all shards of this process, this shard included."""
        ...

    def cut(self, fragment: int) -> Cut:
        """Return this shard's piece of a fragment."""
        ...


class Piece(Evicted):
    """Some rows of a fragment as an Arrow stream, which is the same in memory and on disk.

    Args:
        data: The stream.
        start: Row of the fragment at which the piece begins.
        leave: Called with the stream when the cache evicts the piece.
    """

    def __init__(self, data: ArrowBuffer, start: int, leave: Callable[[ArrowBuffer], None]) -> None:
        self._data, self.start, self._leave = data, start, leave
        self.nbytes: int = data.size

    @cached_property
    def rows(self) -> Fragment:
        return Fragment(self._table())

    @cached_property
    def tokens(self) -> Tokens:
        """The tokens of the piece's only column."""
        found = token_lists(self._table().column(0))
        return Tokens(found.values, found.offsets, self.start)

    def evicted(self) -> None:
        self._leave(self._data)

    def _table(self) -> ArrowTable:
        return pa.ipc.open_stream(self._data).read_all()


def cut_out(table: ArrowTable, start: int, stop: int) -> ArrowBuffer:
    """Return some rows of a table as an Arrow stream, which holds no memory of the table."""
    part = table.slice(start, stop - start).combine_chunks()
    measure = pa.MockOutputStream()
    _write(part, measure)
    data = pa.allocate_buffer(measure.size())  # a growing buffer would keep up to twice as much
    _write(part, pa.FixedSizeBufferWriter(data))
    return data


def _write(table: ArrowTable, sink: object) -> None:
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
