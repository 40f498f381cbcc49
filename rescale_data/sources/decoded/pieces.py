"""`Piece`: the rows of one fragment that one logical shard reads, kept so that all shards use one decoding of a fragment.

fragment, decoded      | rows of shard 7 | rows of shard 8 | rows of shard 9 |
cut, by copy           [ piece           ] [ piece         ] [ piece         ]   in the cache, and on disk
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cached_property
from typing import NamedTuple, Protocol

import pyarrow as pa

from rescale_data.sources.arrow_types import ArrowBuffer, ArrowTable
from rescale_data.sources.decoded.columns import Fragment, token_lists
from rescale_data.sources.source import Tokens


class RowRange(NamedTuple):
    """Rows ``start .. stop - 1`` of a fragment that one logical shard reads, and the key of that shard's `RowRanges`."""

    share_key: Hashable
    start: int
    stop: int


class RowRanges(Protocol):
    """The pieces of fragments that one logical shard reads in one epoch."""

    @property
    def share_key(self) -> Hashable: ...

    def served_row_ranges(self, fragment: int) -> Sequence[RowRange]:
        """Return the row ranges of a fragment that all shards of this process read, this shard included."""
        ...

    def own_row_range(self, fragment: int) -> RowRange:
        """Return the row range of a fragment that this shard reads."""
        ...


class FragmentPiece:
    """Some rows of a fragment as an Arrow IPC stream, the same bytes in memory and on disk.

    Args:
        stream_bytes: The stream.
        first_row: Row of the fragment at which the piece begins.
    """

    def __init__(self, stream_bytes: ArrowBuffer, first_row: int) -> None:
        self.stream_bytes, self.start = stream_bytes, first_row
        self.nbytes: int = stream_bytes.size

    @cached_property
    def rows(self) -> Fragment:
        return Fragment(self._table())

    @cached_property
    def tokens(self) -> Tokens:
        """The tokens of the piece's only column, decoded on first use."""
        lists = token_lists(self._table().column(0))
        return Tokens(lists.values, lists.offsets, self.start)

    def _table(self) -> ArrowTable:
        return pa.ipc.open_stream(self.stream_bytes).read_all()


def copy_as_stream(table: ArrowTable, start: int, stop: int) -> ArrowBuffer:
    """Return some rows of a table as the bytes of an Arrow IPC stream, a copy that does not keep the table in memory."""
    rows = table.slice(start, stop - start).combine_chunks()
    size_counter = pa.MockOutputStream()
    _write(rows, size_counter)
    stream_buffer = pa.allocate_buffer(size_counter.size())  # a growing buffer would keep up to twice as much
    _write(rows, pa.FixedSizeBufferWriter(stream_buffer))
    return stream_buffer


def _write(table: ArrowTable, sink: object) -> None:
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
