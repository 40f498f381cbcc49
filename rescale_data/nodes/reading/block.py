"""`DocBlock`: documents that were copied out of decoded fragments, kept until they are read."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from rescale_data.nodes.reading.spans import EMPTY_SPANS, Spans


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
