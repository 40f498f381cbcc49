"""`DocumentReader`: reads a column of tokens or strings from any position, many rows at a time; `TextDocuments` is one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

from rescale_data.nodes.reading.spans import EMPTY_SPANS, Spans
from rescale_data.sources.source import Source
from rescale_data.state import copy_of

if TYPE_CHECKING:
    from rescale_data.nodes.reader import Reader


class DocumentReader(Protocol):
    """Reads the documents of a node in order, many at a time. ``position`` is a row of int64 numbers of that node.

    State is in ``position`` alone; the node itself may move where samples are read one at a time. The caller reads ahead, and
    ``spans.move(position, n)`` moves its position behind the first n documents. The tokens of a string are its UTF-8 bytes.

        spans = documents.read(position, max_documents)  # as many as are at hand
        spans.move(position, len(spans))        # behind all of them: read goes on there
    """

    @property
    def is_costly_to_read(self) -> bool:
        """True if each document costs a row or a call of a user's function, so that no more should be requested than needed."""
        ...

    def read(self, position: memoryview, max_documents: int) -> Spans:
        """Return the next documents and the updates of ``position`` by each; no documents at the end of the epoch.

        Their number is free, from 1 to ``max_documents``, which is at least 1. The arrays do not change while the spans exist.
        """
        ...

    def begin_next_epoch(self, position: memoryview) -> None:
        """Set ``position`` to the beginning of the next epoch, after `read` has returned no more documents."""
        ...


class TextDocuments:
    """Reads the strings of one logical shard by `Source.texts`; positions are the positions of its `Reader`."""

    def __init__(self, source: Source, column: str, reader: Reader) -> None:
        self._source, self._column, self._reader = source, column, reader

    is_costly_to_read = True

    def read(self, position: memoryview, max_documents: int) -> Spans:
        next_position = copy_of(position)
        if not self._reader.to_next_row(next_position):
            return EMPTY_SPANS
        rows = self._reader.rows_from(next_position[0], next_position[1])[:max_documents]
        unblocked, moves = self._reader.moves(position, next_position, len(rows))
        texts = self._source.texts(self._column, rows if unblocked is None else rows[unblocked])
        length = np.diff(texts.offsets)
        return Spans((texts.values,), np.zeros_like(length), texts.offsets[:-1], length, moves, (None,))

    def begin_next_epoch(self, position: memoryview) -> None:
        self._reader.begin_epoch_at_unblocked_row(position)
