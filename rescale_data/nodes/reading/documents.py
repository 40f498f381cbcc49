"""`DocumentReader` and `TextReader`: read a column of tokens or strings from any position, many rows at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from rescale_data.nodes.reading.spans import NO_UPDATES, PositionUpdates, Spans
from rescale_data.sources.source import Source
from rescale_data.state import copy_of

if TYPE_CHECKING:
    from rescale_data.nodes.reader import Reader


class DocumentReader(Protocol):
    """Reads the documents of a node in order, many at a time. ``position`` is a row of int64 numbers of that node.

    State is in ``position`` alone; the node itself may move where samples are read one at a time. The caller reads ahead, and
    ``spans.move(position, n)`` moves its position behind the first n documents.

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


class TextReader:
    """Reads a string column of one logical shard, many rows at a time; positions are the positions of its `Reader`."""

    def __init__(self, source: Source, column: str, reader: Reader) -> None:
        self._source, self._column, self._reader = source, column, reader

    def read(self, position: memoryview, max_texts: int) -> tuple[list[str], PositionUpdates]:
        """Return up to ``max_texts`` next texts and the position update of each; no texts at the end of the epoch.

        If it raises, the caller reads samples of the node instead, and these raise an error with the row.
        """
        next_position = copy_of(position)
        if not self._reader.to_next_row(next_position):
            return [], NO_UPDATES
        rows = self._reader.rows_from(next_position[0], next_position[1])[:max_texts]
        unblocked, moves = self._reader.moves(position, next_position, len(rows))
        share = self._reader.share(next_position[0])
        return self._source.texts(self._column, rows if unblocked is None else rows[unblocked], share), moves

    def begin_next_epoch(self, position: memoryview) -> None:
        self._reader.begin_epoch_at_unblocked_row(position)
