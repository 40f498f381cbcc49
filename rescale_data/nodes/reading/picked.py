"""`EditedDocuments`: reads many documents at a time for a node that drops documents or cuts them into pieces."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rescale_data.nodes.bound import EmptyDrawLimit
from rescale_data.nodes.reading.documents import DocumentReader
from rescale_data.nodes.reading.spans import EMPTY_SPANS, PositionUpdates, Spans
from rescale_data.state import Ints

_NUM_OWN_SLOTS = 2  # own slots of the node


class EditedDocuments:
    """Documents of a node that drops or cuts the documents of its source.

    Its position is a row: the values of the node, then the position of its source.

    Args:
        documents: The documents of its source.
        pieces: Returns the pieces to keep of each document, none for a document that is left out. It may return them for only
            the first few documents, and may raise.
        draw_limit: Limits the number of documents left out in a row.
        dropped_slot: The own slot that counts documents left out.
        piece_slot: The own slot with the number of a document's next piece; `None` if each document is one piece.
    """

    def __init__(
        self,
        documents: DocumentReader,
        pieces: Callable[[Spans], list[list[slice]]],
        draw_limit: EmptyDrawLimit,
        *,
        dropped_slot: int,
        piece_slot: int | None = None,
    ) -> None:
        self._documents, self._find_pieces, self._draw_limit = documents, pieces, draw_limit
        self._dropped_slot, self._piece_slot = dropped_slot, piece_slot

    is_costly = True

    def read(self, position: memoryview, max_documents: int) -> Spans:
        self._source_position = np.array(position[_NUM_OWN_SLOTS:]).data
        # Dropped before the documents that are returned
        first_piece, self._num_dropped = 0 if self._piece_slot is None else position[self._piece_slot], 0
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
        if self._piece_slot is not None:
            position[self._piece_slot] = 0
        position[self._dropped_slot] += self._num_dropped

    def _cut_documents(self, spans: Spans, position: memoryview, first_piece: int) -> tuple[Spans, int]:
        """Return the pieces to keep of some documents, and the number of documents that were examined.

        A piece moves the position to its own document, behind all documents before it. The last piece of a document moves it
        behind that document.
        """
        num_dropped = position[self._dropped_slot] + self._num_dropped
        documents: list[int] = []  # document of each piece
        node_values: list[tuple[int, int]] = []  # after each piece: documents dropped so far, number of the next piece
        piece_slices: list[slice] = []
        all_pieces = self._find_pieces(spans)
        for number, pieces in enumerate(all_pieces):
            num_dropped += not pieces
            for piece in range(0 if number else first_piece, len(pieces)):
                documents.append(number)
                node_values.append((num_dropped, 0 if piece + 1 == len(pieces) else piece + 1))
                piece_slices.append(pieces[piece])
        values, doc_index = np.array(node_values, dtype=np.int64).reshape(-1, 2), np.array(documents, dtype=np.int64)
        piece_begins, piece_ends = (
            np.array([getattr(piece, name) for piece in piece_slices], dtype=np.int64) for name in ("start", "stop")
        )
        skipped_updates = PositionUpdates.between(position[_NUM_OWN_SLOTS:], self._source_position)
        source_updates = (
            PositionUpdates.join([skipped_updates, spans.moves])
            .merge_groups(1 + doc_index + (values[:, 1] == 0))
            .shifted(_NUM_OWN_SLOTS)
        )
        picked = Spans(
            spans.arrays,
            spans.array[doc_index],
            spans.start[doc_index] + piece_begins,
            piece_ends - piece_begins,
            source_updates.combined_with(self._node_updates(values)),
            spans.owners,
        )
        return picked, len(all_pieces)

    def _node_updates(self, node_values: Ints) -> PositionUpdates:
        slots = [self._dropped_slot] if self._piece_slot is None else [self._dropped_slot, self._piece_slot]
        return PositionUpdates.of(slots, node_values[:, : len(slots)])
