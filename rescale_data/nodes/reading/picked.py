"""`PickedDocuments`: reads the documents that a node keeps, whole or in pieces, many at a time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rescale_data.nodes.bound import Bound
from rescale_data.nodes.reading.documents import Documents
from rescale_data.nodes.reading.spans import EMPTY, Moves, Spans
from rescale_data.state import Ints

_NUM_OWN = 2  # own slots of the node


class PickedDocuments:
    """`Documents` of a node that keeps some of its source's; its position is ``[own slots | source]``.

    Args:
        documents: The documents of its source.
        pieces: Returns the pieces to keep of each document, none for a document that is left out. It may return them for only
            the first few documents, and may raise.
        bound: Limits the number of documents left out in a row.
        dropped: The own slot that counts documents left out.
        piece: The own slot with the number of a document's next piece; `None` if each document is one piece.
    """

    def __init__(
        self,
        documents: Documents,
        pieces: Callable[[Spans], list[list[slice]]],
        bound: Bound,
        *,
        dropped: int,
        piece: int | None = None,
    ) -> None:
        self._documents, self._pieces, self._bound = documents, pieces, bound
        self._dropped, self._piece = dropped, piece

    is_costly = True

    def read(self, position: memoryview, most: int) -> Spans:
        self._start = np.array(position[_NUM_OWN:]).data
        first_piece, self._num_dropped = self._within(position), 0  # dropped before the documents that are returned
        misses = 0
        while len(spans := self._documents.read(self._start, most)):
            found, num_read = self._cut(spans, position, first_piece)
            if len(found):
                return found[:most]
            first_piece, self._num_dropped = 0, self._num_dropped + num_read
            spans.move(self._start, num_read)
            misses = self._bound.missed(misses, self._start, num_read)
        return EMPTY

    def turn(self, position: memoryview) -> None:
        source = position[_NUM_OWN:]
        source[:] = self._start
        self._documents.turn(source)
        if self._piece is not None:
            position[self._piece] = 0
        position[self._dropped] += self._num_dropped

    def _within(self, position: memoryview) -> int:
        return 0 if self._piece is None else position[self._piece]

    def _cut(self, spans: Spans, position: memoryview, first_piece: int) -> tuple[Spans, int]:
        """Return the pieces to keep, and the number of documents that were looked at.

        A piece moves the position to its own document, behind all documents before it. The last piece of a document moves it
        behind that document.
        """
        num_dropped = position[self._dropped] + self._num_dropped
        document: list[int] = []  # document of each piece
        after: list[tuple[int, int]] = []  # after each piece: documents dropped so far, number of the next piece
        places: list[slice] = []
        cut = self._pieces(spans)
        for number, pieces in enumerate(cut):
            num_dropped += not pieces
            for piece in range(0 if number else first_piece, len(pieces)):
                document.append(number)
                after.append((num_dropped, 0 if piece + 1 == len(pieces) else piece + 1))
                places.append(pieces[piece])
        own, at = np.array(after, dtype=np.int64).reshape(-1, 2), np.array(document, dtype=np.int64)
        begin, end = (
            np.array([getattr(place, name) for place in places], dtype=np.int64) for name in ("start", "stop")
        )
        passed = Moves.between(position[_NUM_OWN:], self._start)
        below = Moves.join([passed, spans.moves]).grouped(1 + at + (own[:, 1] == 0)).under(_NUM_OWN)
        picked = Spans(
            spans.arrays,
            spans.array[at],
            spans.start[at] + begin,
            end - begin,
            below.then(self._own_moves(own)),
            spans.keeps,
            None if spans.where is None else tuple(spans.where[number] for number in document),
        )
        return picked, len(cut)

    def _own_moves(self, own: Ints) -> Moves:
        slots = [self._dropped] if self._piece is None else [self._dropped, self._piece]
        return Moves.of(slots, own[:, : len(slots)])
