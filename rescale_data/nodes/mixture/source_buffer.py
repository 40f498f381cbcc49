"""Buffers for one source of a mixture: `SourceBuffer` for its next documents, `KeptDocuments` for costly ones."""

from __future__ import annotations

import numpy as np

from rescale_data.nodes.base import View
from rescale_data.nodes.reading.documents import DocumentReader
from rescale_data.nodes.reading.spans import NO_UPDATES, PositionUpdates, Spans
from rescale_data.state import Ints, copy_of


class KeptDocuments:
    """Documents of a source that is costly to read, kept until they are drawn, so that each is read once.

    A document is read but not drawn if another source ends before it. Documents are kept by the position at which they begin,
    in the order in which they were read. For an end of an epoch, the position at which the next epoch begins is kept too.
    """

    is_costly_to_read = True

    def __init__(self, documents: DocumentReader) -> None:
        self._documents = documents
        self._spans_by_position: dict[bytes, Spans] = {}
        self._epoch_start: dict[bytes, View] = {}

    def read(self, position: View, max_documents: int) -> Spans:
        key = position.tobytes()
        documents = self._spans_by_position.get(key)
        if documents is None:
            documents = self._spans_by_position[key] = self._documents.read(position, max_documents)
            if not len(documents):
                self._epoch_start[key] = next_position = copy_of(position)
                # At once: the next bind of the node moves it away from this end
                self._documents.begin_next_epoch(next_position)
        return documents if len(documents) <= max_documents else documents[:max_documents]

    def drop_documents_before(self, position: View) -> None:
        """Drop the kept documents that lie before a position of the source."""
        position_key = position.tobytes()
        for key in [*self._spans_by_position]:
            if key == position_key:
                break
            documents = self._spans_by_position.pop(key)
            if len(documents) > 1 and (num_passed := _num_documents_before(documents, key, position)):
                self._spans_by_position = {position_key: documents[num_passed:], **self._spans_by_position}
                break
        self._epoch_start = {key: begin for key, begin in self._epoch_start.items() if key in self._spans_by_position}

    def begin_next_epoch(self, position: View) -> None:
        position[:] = self._epoch_start[position.tobytes()]


def _num_documents_before(documents: Spans, start_position_bytes: bytes, position: View) -> int:
    """Return how many of some documents lie before a position; 0 if the position is not between two of them."""
    document_position = np.frombuffer(start_position_bytes, dtype=np.int64).copy().data
    for number in range(1, len(documents)):
        documents[number - 1 :].move(document_position, 1)
        if document_position == position:
            return number
    return 0


class SourceBuffer:
    """The next documents of one source, as many as are requested, also from its following epochs."""

    def __init__(self, documents: DocumentReader, position: View, by_tokens: bool, first_spans: Spans) -> None:
        self._documents, self._position = documents, copy_of(position)
        self._epoch_start, self._by_tokens = NO_UPDATES, by_tokens
        first_spans.move(self._position, len(first_spans))
        self._batches, self.num_documents = [first_spans] if len(first_spans) else list[Spans](), len(first_spans)
        self.num_empty_epochs = 0

    def read_documents(self, max_to_read: int) -> bool:
        """Read at least one more document, up to ``max_to_read`` in the buffer; return False at the end of an epoch."""
        spans = self._documents.read(self._position, max_to_read - self.num_documents)
        if not len(spans):
            return False
        spans.move(self._position, len(spans))
        if len(self._epoch_start):
            spans, self._epoch_start = spans.with_moves(spans.moves.preceded_by(self._epoch_start)), NO_UPDATES
        self._batches.append(spans)
        self.num_documents += len(spans)
        if not self._by_tokens or spans.length.any():
            self.num_empty_epochs = 0
        return True

    def begin_next_epoch(self) -> None:
        """Begin the next epoch, after `read_documents` has found the end of one."""
        self.num_empty_epochs += 1
        position_before = copy_of(self._position)
        self._documents.begin_next_epoch(self._position)
        update = PositionUpdates.between(position_before, self._position)
        self._epoch_start = PositionUpdates.join([self._epoch_start, update]) if len(self._epoch_start) else update

    @property
    def lengths(self) -> Ints:
        """Lengths in tokens of the documents in the buffer, ``int64[num]``."""
        return np.concatenate([batch.length for batch in self._batches])

    def spans(self, num_docs: int) -> list[Spans]:
        """Return the first ``num_docs`` documents in the buffer, as a list of parts."""
        batches, num_docs = list(self._batches), self.num_documents - num_docs
        while num_docs and num_docs >= len(batches[-1]):
            num_docs -= len(batches.pop())
        return [*batches[:-1], batches[-1][:-num_docs]] if num_docs else batches
