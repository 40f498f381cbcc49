"""`FragmentDocuments`: reads a `Reader`'s documents from decoded fragments, without a Python object for each row."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from rescale_data.nodes.reading.gather import fragments_of
from rescale_data.nodes.reading.row_ranges import ShardRowRanges
from rescale_data.nodes.reading.shared_fragment import (
    ReadyDocuments,
    SharedFragment,
    copy_rows,
    locate_rows,
    shared_fragments,
)
from rescale_data.nodes.reading.spans import EMPTY_SPANS, Spans
from rescale_data.sources.decoded.cache import cache, cache_share
from rescale_data.sources.decoded.cache_demand import (
    DOC_BLOCK_PARTS,
    num_sources_and_shards,
    room_for_block,
    served_shards,
)
from rescale_data.sources.source import TokenSource
from rescale_data.state import Ints, copy_of

if TYPE_CHECKING:
    from rescale_data.nodes.reader import Reader

DOC_BLOCK = "block"
"""Kind of value in the cache: a `DocBlock`."""
_MAX_COPY_FACTOR = 4
_NUM_FRAGMENTS_AHEAD = 2  # further fragments that need room if decoding is costly


class DocBlock:
    """Copies of successive documents of one logical shard, from one row of an epoch on.

    Args:
        epoch, row: Epoch and row of the first document.
        parts: The documents, without their moves; each part has memory of its own.
    """

    __slots__ = ("_epoch", "_parts", "_row")

    def __init__(self, epoch: int, row: int, parts: Iterable[Spans]) -> None:
        self._epoch, self._row, self._parts = epoch, row, deque(parts)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self._parts)

    def has(self, epoch: int, row: int) -> bool:
        return epoch == self._epoch and bool(self._parts) and 0 <= row - self._row < len(self._parts[0])

    def take(self, epoch: int, row: int, max_documents: int) -> Spans:
        """Return up to ``max_documents`` documents from a row on, of one part of the block; none if the block lacks the row.

        A part is dropped when its last document is taken.
        """
        if not self.has(epoch, row):
            return EMPTY_SPANS
        index = row - self._row
        documents = self._parts[0][index : index + max_documents]
        if index + len(documents) == len(self._parts[0]):
            self._row += len(self._parts.popleft())
        return documents


class FragmentDocuments:
    """Reads a column of one logical shard from decoded fragments; positions are the positions of its `Reader`.

    Documents stay where they were decoded, while the cache has room for the fragments of all shards. Otherwise several
    documents at a time are copied out of the fragments, so that a fragment is not decoded for each sample. If decoding is
    costly, a `DocBlock` of copies is kept in place of the fragments, as large as the cache allows if all shards keep one.

    Args:
        source: The source.
        fragments: ``int64[F + 1]``, the first row of each of its fragments, and the end.
        column: Its column of lists of integers, or of strings (`Source.has_texts`).
        reader: Gives the order of the shard, and the moves of its position.
    """

    __slots__ = ("_column", "_decoder", "_fragments", "_reader", "_share", "_source", "_source_key")

    def __init__(self, source: TokenSource, fragments: Ints, column: str, reader: Reader) -> None:
        self._source, self._fragments, self._column, self._reader = source, fragments, column, reader
        self._source_key, self._decoder = reader.rows.source_key, source if source.decodes_ahead else None
        self._share: ShardRowRanges | None = None

    is_costly_to_read = False

    def read(self, position: memoryview, max_documents: int) -> Spans:
        next_position = copy_of(position)
        if not self._reader.to_next_row(next_position):
            return EMPTY_SPANS
        epoch, row = next_position[0], next_position[1]
        spans = self._read_block(epoch, row, max_documents) or self._read_fragments(epoch, row, max_documents)
        unblocked, moves = self._reader.moves(position, next_position, len(spans))
        return spans.with_moves(moves) if unblocked is None else spans.take(unblocked, moves)

    def _read_fragments(self, epoch: int, row: int, max_documents: int) -> Spans:
        self._share = self._reader.share(epoch)
        rows = self._reader.rows_from(epoch, row)
        fragments, index = fragments_of(rows[:max_documents], self._fragments)
        first_fragment = self._get_fragment(self._fragment_at(int(rows[0])))
        if self._can_use_in_place(epoch, row, fragments, first_fragment):
            return locate_rows(rows[:max_documents], index, [self._get_fragment(fragment) for fragment in fragments])
        if self._decoder is not None and self._share is None and (room := room_for_block(self._decoder)):
            block = self._make_block(epoch, row, self._rows_to_read(first_fragment, room), room)
            return self._take(block, epoch, row, max_documents)
        num_shards = len(served_shards(self._source_key, self._reader.shard.num_logical_shards))
        num_bytes = block_bytes(cache_share(self._source), num_shards)
        rows = rows[: min(max_documents, self._rows_to_read(first_fragment, num_bytes))]
        return _limit_bytes(num_bytes * _MAX_COPY_FACTOR, self._copy(rows, [len(rows)])[0])

    def _make_block(self, epoch: int, row: int, num_rows: int, num_bytes: int) -> DocBlock:
        """Return a new block with copies of up to ``num_rows`` documents: whole windows, or a part of one window."""
        windows = self._reader.rows.windows(epoch, row, self._reader.shard.index)
        rows = next(windows)[:num_rows]
        while (next_rows := next(windows, None)) is not None and len(rows) + len(next_rows) <= num_rows:
            rows = np.concatenate([rows, next_rows])
        part_ends = [len(rows) * part // DOC_BLOCK_PARTS for part in range(1, DOC_BLOCK_PARTS + 1)]
        block_parts = self._copy(rows, part_ends, self._decoder)
        byte_ends = np.cumsum([part.nbytes for part in block_parts])
        return DocBlock(epoch, row, block_parts[: max(1, int(byte_ends.searchsorted(_MAX_COPY_FACTOR * num_bytes)))])

    def _read_block(self, epoch: int, row: int, max_documents: int) -> Spans:
        """Return documents from the cached block of copies; no documents if there is no block or it does not hold the row."""
        block = self._cached_block()
        return EMPTY_SPANS if block is None else self._take(block, epoch, row, max_documents)

    def _cached_block(self) -> DocBlock | None:
        return None if self._decoder is None else cache().get(self._reader.cache_key(DOC_BLOCK))

    def _take(self, block: DocBlock, epoch: int, row: int, max_documents: int) -> Spans:
        order = self._reader.rows.order(epoch, self._reader.shard.index)
        spans = block.take(epoch, row, min(max_documents, order.window_bounds(row)[1] - row))
        if block.nbytes:
            cache().put(self._reader.cache_key(DOC_BLOCK), block)  # it may take fewer bytes now
        else:
            cache().forget(self._reader.cache_key(DOC_BLOCK))
        return spans

    def find_decoded(self, position: memoryview, max_documents: int, crosses_epochs: bool) -> ReadyDocuments | None:
        """Return the locations of the next documents in decoded fragments; `None` if the caller has to use `read`.

        Args:
            position: The position of the reader.
            max_documents: Largest number of documents to return.
            crosses_epochs: True if documents of the next epochs follow.
        """
        epoch, row, num_left = position[0], position[1], max_documents
        if (block := self._cached_block()) is not None and block.has(epoch, row):
            return None
        self._share = self._reader.share(epoch)
        runs, row_arrays = list[tuple[int, int, int]](), list[Ints]()
        if self._reader.is_old_position(position):
            return None
        while num_left and self._share is None and self._reader.row_advances_by_one(epoch):
            if row < self._reader.num_epoch_rows(epoch):
                row_arrays.append(self._reader.rows_from(epoch, row)[:num_left])
                runs.append((epoch, row, len(row_arrays[-1])))
                row, num_left = row + len(row_arrays[-1]), num_left - len(row_arrays[-1])
            elif crosses_epochs and row:
                next_position = np.array(position).data
                next_position[0], next_position[1] = epoch, row
                self._reader.begin_next_epoch(next_position)
                epoch, row = next_position[0], next_position[1]
                runs.append((epoch, row, 0))
            else:
                break
        if not row_arrays:
            return None
        if not runs[-1][2]:  # the epoch behind the last end has no documents here
            runs.pop()
        rows = row_arrays[0] if len(row_arrays) == 1 else np.concatenate(row_arrays)
        fragments, fragment_index = fragments_of(rows, self._fragments)
        first_fragment = self._get_fragment(self._fragment_at(int(rows[0])))
        if not self._can_use_in_place(position[0], position[1], fragments, first_fragment):
            return None
        return ReadyDocuments(runs, rows, fragment_index, [self._get_fragment(fragment) for fragment in fragments])

    def _can_use_in_place(self, epoch: int, row: int, fragments: list[int], first_fragment: SharedFragment) -> bool:
        """True if documents need not be copied out of decoded fragments. Also starts to decode the next fragments ahead."""
        if self._share is not None:
            return False
        if self._decoder is None:
            return self._fit_in_cache(len(fragments), first_fragment)
        if self._fit_in_cache(2, first_fragment):
            for next_row in self._reader.rows.next_window_ends(epoch, row, self._reader.shard.index):
                self._decoder.decode_ahead(self._column, self._fragment_at(next_row))
        return self._fit_in_cache(len(fragments) + _NUM_FRAGMENTS_AHEAD, first_fragment)

    def begin_next_epoch(self, position: memoryview) -> None:
        self._reader.begin_epoch_at_unblocked_row(position)

    def _copy(self, rows: Ints, part_stops: Sequence[int], source_to_release: TokenSource | None = None) -> list[Spans]:
        """Copy documents in groups that end at the given stops; return for each group a `Spans` with arrays of its own.

        Args:
            rows: Rows of the source.
            part_stops: Ascending numbers of rows; the last one is the number of all rows.
            source_to_release: Source whose `release_tokens` is called for each fragment that is no longer needed here.
        """
        fragments, fragment_index = fragments_of(rows, self._fragments)
        copies: list[list[Spans]] = [[] for _ in part_stops]
        indices: list[list[Ints]] = [[] for _ in part_stops]
        for index, fragment in enumerate(fragments):  # one fragment at a time, so that few are in memory at once
            shared_fragment = self._get_fragment(fragment)
            row_indices = np.flatnonzero(fragment_index == index)
            for part, part_indices in enumerate(np.split(row_indices, np.searchsorted(row_indices, part_stops[:-1]))):
                if len(part_indices):
                    copies[part].append(copy_rows(rows[part_indices], shared_fragment))
                    indices[part].append(part_indices)
            if source_to_release is not None:
                source_to_release.release_tokens(self._column, fragment)
        parts = [(spans, arrays) for spans, arrays in zip(copies, indices, strict=True) if arrays]
        return [Spans.join(spans).take(np.argsort(np.concatenate(arrays))) for spans, arrays in parts]

    def _rows_to_read(self, shared_fragment: SharedFragment, num_bytes: int) -> int:
        """Return the number of rows in ``num_bytes`` bytes, estimated from the mean size of the rows of one fragment."""
        mean_bytes = shared_fragment.tokens.nbytes / (len(shared_fragment.offsets) - 1)
        return max(1, int(num_bytes / max(1.0, mean_bytes)))

    def _fit_in_cache(self, num_fragments: int, shared_fragment: SharedFragment) -> bool:
        """True if the cache has room for ``num_fragments`` fragments of this size for each logical shard and each source."""
        num_sources, num_shards = num_sources_and_shards(self._source_key)
        return num_sources * num_shards * num_fragments * shared_fragment.nbytes <= cache_share(self._source)

    def _get_fragment(self, fragment: int) -> SharedFragment:
        tokens, num_sharing_shards = None, 1
        if self._share is not None:
            tokens = self._source.tokens_of(self._column, fragment, self._share)
        key = self._source_key, self._column, fragment, 0 if tokens is None else id(tokens)
        shared_fragment = shared_fragments.get(key)
        if shared_fragment is None:
            if tokens is None:
                tokens = self._source.tokens(self._column, fragment)
                num_sharing_shards = max(1, num_sources_and_shards(self._source_key)[1] // (len(self._fragments) - 1))
            shared_fragment = shared_fragments[key] = SharedFragment(
                tokens, int(self._fragments[fragment]), num_sharing_shards
            )
        return shared_fragment

    def _fragment_at(self, row: int) -> int:
        return bisect_right(self._fragments.data, row) - 1


def _limit_bytes(num_bytes: int, spans: Spans) -> Spans:
    """Return the first documents, up to about ``num_bytes`` bytes; an estimate of their number may have been too large."""
    byte_ends = np.cumsum(spans.length * spans.arrays[0].itemsize)
    return spans if byte_ends[-1] <= num_bytes else spans[: int(byte_ends.searchsorted(num_bytes)) + 1]


@lru_cache(maxsize=64)
def block_bytes(cache_bytes: int, num_shards: int) -> int:
    """Return the number of bytes of tokens to copy at once for one of ``num_shards`` logical shards of a process.

    They are enough for many samples, so that a fragment is not decoded for each sample if the fragments of all shards exceed
    the cache. They are few enough that the copies of all shards take a quarter of the cache.
    """
    return max(2**16, min(2**20, cache_bytes // 4 // max(1, num_shards)))
