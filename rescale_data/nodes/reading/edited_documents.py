"""`EditedDocuments`: reads many documents at a time for a node that drops documents or cuts them into pieces."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from rescale_data.nodes.empty_draws import EmptyDrawLimit
from rescale_data.nodes.reading.documents import DocumentReader
from rescale_data.nodes.reading.spans import EMPTY_SPANS, PositionUpdates, Spans

_NUM_OWN_SLOTS = 2  # own slots of the node


class EditedDocuments:
    """Documents of a node that drops or cuts the documents of its source.

    Its position is a row: the values of the node, then the position of its source.

    Args:
        documents: The documents of its source.
        pieces: Returns the pieces to keep of each document, none for a document that is left out. It may return them for only
            the first few documents, and may raise.
        draw_limit: Limits the number of documents left out in a row.
        slots: The own slot that counts documents left out and, if documents are cut, the own slot with the number of a
            document's next piece.
    """

    def __init__(
        self,
        documents: DocumentReader,
        pieces: Callable[[Spans], list[list[slice]]],
        draw_limit: EmptyDrawLimit,
        slots: Sequence[int],
    ) -> None:
        self._documents, self._find_pieces, self._draw_limit = documents, pieces, draw_limit
        self._slots = slots

    is_costly_to_read = True

    def read(self, position: memoryview, max_documents: int) -> Spans:
        self._source_position = np.array(position[_NUM_OWN_SLOTS:]).data
        # Dropped before the documents that are returned
        first_piece, self._num_dropped = sum(position[slot] for slot in self._slots[1:]), 0
        num_empty_draws = 0
        while len(spans := self._documents.read(self._source_position, max_documents)):
            picked, num_read = self._cut_documents(spans, position, first_piece)
            if len(picked):
                return picked[:max_documents]
            first_piece, self._num_dropped = 0, self._num_dropped + num_read
            spans.move(self._source_position, num_read)
            num_empty_draws = self._draw_limit.count_empty_draws(num_empty_draws, self._source_position, num_read)
        return EMPTY_SPANS

    def begin_next_epoch(self, position: memoryview) -> None:
        source_position = position[_NUM_OWN_SLOTS:]
        source_position[:] = self._source_position
        self._documents.begin_next_epoch(source_position)
        for slot in self._slots[1:]:
            position[slot] = 0
        position[self._slots[0]] += self._num_dropped

    def _cut_documents(self, spans: Spans, position: memoryview, first_piece: int) -> tuple[Spans, int]:
        """Return the pieces to keep of some documents, and the number of documents that were examined.

        A piece moves the position to its own document, behind all documents before it. The last piece of a document moves it
        behind that document.
        """
        num_dropped = position[self._slots[0]] + self._num_dropped
        # Of each piece: documents dropped so far, number of the next piece, number of its document, first token, end
        rows: list[tuple[int, int, int, int, int]] = []
        all_pieces = self._find_pieces(spans)
        for document, pieces in enumerate(all_pieces):
            num_dropped += not pieces
            for number, piece in [*enumerate(pieces)][0 if document else first_piece :]:
                rows.append((num_dropped, (number + 1) % len(pieces), document, piece.start, piece.stop))
        values = np.array(rows, dtype=np.int64).reshape(-1, 5)
        _, next_piece, document, first_token, stop_token = values.T
        skipped_updates = PositionUpdates.between(position[_NUM_OWN_SLOTS:], self._source_position)
        passed_documents = document + (next_piece == 0)
        source_updates = PositionUpdates.join([skipped_updates, spans.moves]).merge_document_groups(
            1 + passed_documents
        )
        node_updates = PositionUpdates.of(self._slots, values[:, : len(self._slots)])
        picked = Spans(
            spans.arrays,
            spans.array[document],
            spans.start[document] + first_token,
            stop_token - first_token,
            source_updates.shifted(_NUM_OWN_SLOTS).combined_with(node_updates),
            spans.owners,
        )
        return picked, len(all_pieces)
