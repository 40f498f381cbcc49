"""`PickedDocuments`: those documents that are kept, whole or in pieces, many at a time."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from rescale_data.nodes.reading.documents import Documents
from rescale_data.nodes.reading.spans import EMPTY, Moves, Spans
from rescale_data.state import Ints


class Picks(Protocol):
    """The node that keeps and cuts. Its position is ``[own slots | source]``."""

    def pieces(self, tokens: memoryview) -> list[slice]:
        """What is kept of a document; nothing where it is left out. It may raise."""
        ...

    def raise_at(self, position: memoryview) -> None:
        """Raise what `pieces` did for the document at a position of the source, with its place."""
        ...

    def missed(self, num_before: int, position: memoryview, num: int) -> int:
        """`Bound.missed`: so many documents more were left out."""
        ...


class PickedDocuments:
    """`Documents` of a node that keeps some.

    Args:
        documents: Of its source.
        picks: What is kept of each.
        dropped: The own slot that counts those that were left out.
        piece: That which says which piece of a document is the next; `None` where each is one piece.
        num_own: Own slots.
    """

    def __init__(
        self, documents: Documents, picks: Picks, *, dropped: int, piece: int | None = None, num_own: int = 2
    ) -> None:
        self._documents, self._picks = documents, picks
        self._dropped, self._piece, self._num_own = dropped, piece, num_own

    def read(self, position: memoryview, most: int) -> Spans:
        self._start = np.array(position[self._num_own :]).data
        first_piece, self._num_dropped = self._within(position), 0  # dropped before those that are returned
        misses = 0
        while len(spans := self._documents.read(self._start, most)):
            found, num_read = self._cut(spans, position, first_piece)
            if len(found):
                return found[:most]
            first_piece, self._num_dropped = 0, self._num_dropped + num_read
            spans.move(self._start, num_read)
            misses = self._picks.missed(misses, self._start, num_read)
        return EMPTY

    def settle(self, position: memoryview) -> bool:
        return bool(self._within(position)) or self._documents.settle(position[self._num_own :])

    def turn(self, position: memoryview) -> None:
        source = position[self._num_own :]
        source[:] = self._start
        self._documents.turn(source)
        if self._piece is not None:
            position[self._piece] = 0
        position[self._dropped] += self._num_dropped

    def _within(self, position: memoryview) -> int:
        return 0 if self._piece is None else position[self._piece]

    def _pieces(self, spans: Spans) -> list[list[slice]]:
        """Of each document, up to one that raises; if that is the first, it does."""
        found: list[list[slice]] = []
        try:
            for view in spans.views():
                found.append(self._picks.pieces(view))
        except Exception:
            if not found:
                self._picks.raise_at(self._start)
                raise
        return found

    def _cut(self, spans: Spans, position: memoryview, first_piece: int) -> tuple[Spans, int]:
        """The pieces of documents, and of how many. Each moves behind those before its own, the last of one behind that."""
        num_dropped = position[self._dropped] + self._num_dropped
        document: list[int] = []  # of each piece
        after: list[tuple[int, int]] = []  # dropped so far, piece of the next
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
        passed = Moves.between(position[self._num_own :], self._start)
        below = Moves.join([passed, spans.moves]).grouped(1 + at + (own[:, 1] == 0)).under(self._num_own)
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
