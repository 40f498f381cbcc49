"""`CleanDocuments`: what tokenized corpora need before they are packed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from rescale_data.errors import require_int
from rescale_data.nodes.base import BaseNode, Node, View, copy_of
from rescale_data.nodes.bound import Bound
from rescale_data.nodes.column import integers
from rescale_data.nodes.reading.documents import Documents
from rescale_data.nodes.reading.spans import EMPTY, Moves, Spans
from rescale_data.state import Field, Ints

_PIECE, _SHORT = 0, 1


@dataclass(frozen=True)
class Cleaning:
    """What is left of a document, in one piece or several.

    Args:
        strip: Tokens that are taken off at both ends.
        min_length: What is then shorter is left out.
        max_length: What is longer comes in pieces of so many, the last one of what is left; `None` for one piece.
    """

    strip: frozenset[int]
    min_length: int
    max_length: int | None

    def pieces(self, tokens: Sequence[int]) -> list[slice]:
        """Where they lie in the document."""
        start, stop = 0, len(tokens)
        while start < stop and int(tokens[start]) in self.strip:
            start += 1
        while start < stop and int(tokens[stop - 1]) in self.strip:
            stop -= 1
        if stop - start < self.min_length:
            return []
        step = self.max_length or max(1, stop - start)
        return [slice(first, min(first + step, stop)) for first in range(start, max(stop, start + 1), step)]


class CleanDocuments(Node[dict[str, Any]]):
    """Documents without given tokens at their ends, without the short ones, and with the long ones in pieces.

    Over a `Reader` and below a packer, documents are cleaned many at a time. The position is that of the source at the
    document of the next piece, and which piece that is.

    Args:
        source: A node whose samples hold tokens under ``column``.
        column: Which.
        strip: Token ids to take off at both ends of a document, such as a BOS or EOS that the packer puts there itself.
        min_length: Documents with fewer tokens are left out and counted (``short_documents``).
        max_length: Longer documents are yielded in pieces of so many tokens, the last one of what is left. Every piece keeps
            the other columns.

    Raises:
        ValueError: Lengths out of range, a sample without that column.
        TypeError: The column does not hold lists of integers.
    """

    FIELDS: ClassVar[tuple[Field, ...]] = (Field(("piece",)), Field(("short",), counts=True))
    READS_AHEAD: ClassVar[bool] = True

    def __init__(
        self,
        source: BaseNode[Any],
        column: str,
        *,
        strip: Sequence[int] = (),
        min_length: int = 1,
        max_length: int | None = None,
    ) -> None:
        require_int(min_length=min_length, **({} if max_length is None else {"max_length": max_length}))
        if min_length < 0 or (max_length is not None and max_length < max(1, min_length)):
            raise ValueError(
                f"min_length={min_length}, max_length={max_length}: give at least 0, and None or at least min_length and 1."
            )
        super().__init__(source=source)
        self.column = column
        self.cleaning = Cleaning(frozenset(int(token) for token in strip), min_length, max_length)
        self._source, self._bound = self.children["source"], Bound(self)

    def seek(self) -> None:
        self._bookmark = self.bookmark("source")
        self._pieces: list[slice] | None = None
        self._over = False

    def next(self) -> dict[str, Any]:
        misses = 0
        while not self._over:
            pieces = self._open()
            piece = self.position[_PIECE]
            if piece + 1 >= len(pieces):
                self._go_on()
            else:
                self.position[_PIECE] = piece + 1
            if piece < len(pieces):
                return {**self._sample, self.column: self._tokens[pieces[piece]]}
            misses = self._bound.missed(misses)
        raise StopIteration

    def settle(self, position: View) -> bool:
        return self.settle_within(position, _PIECE)

    def documents(self, column: str) -> Documents | None:
        inner = self._source.documents(column) if column == self.column else None
        return None if inner is None else CleanedDocuments(inner, self.cleaning)

    def parameters(self) -> dict[str, Any]:
        return {
            "column": self.column,
            "strip": sorted(self.cleaning.strip),
            "min_length": self.cleaning.min_length,
            "max_length": self.cleaning.max_length,
        }

    def progress(self, rows: Ints, shards: Ints, samples: Ints) -> dict[str, float]:
        return {"short_documents": float(rows[:, _SHORT].sum())}

    def _open(self) -> list[slice]:
        """The pieces of the document at the bookmark; none where it is too short, or the epoch has ended."""
        if self._pieces is None:
            if not (self.reread or self.position[_PIECE]):
                self._source.settle(self._bookmark)
            if self._source.position != self._bookmark:
                self._source.position[:] = self._bookmark
                self._source.bind(self._source.position)
            try:
                self._sample = next(self._source)
            except StopIteration:
                self._over = True
                return []
            self._tokens = integers(self._sample, self.column, type(self).__name__, self._source)
            self._pieces = self.cleaning.pieces(self._tokens.data)
            self.position[_SHORT] += not self._pieces
        return self._pieces

    def _go_on(self) -> None:
        self._bookmark[:] = self._source.position
        self.position[_PIECE] = 0
        self._pieces = None


class CleanedDocuments:
    """The pieces of documents as `Documents`; positions are those of `CleanDocuments`, (piece, short, *source)."""

    def __init__(self, documents: Documents, cleaning: Cleaning) -> None:
        self._documents, self._cleaning = documents, cleaning

    def read(self, position: memoryview, most: int) -> Spans:
        self._start = copy_of(position[2:])
        first_piece, self._num_short = position[_PIECE], 0  # short documents before those that are returned
        while len(spans := self._documents.read(self._start, most)):
            found = self._cut(spans, position, first_piece)
            if len(found):
                return found[:most]
            first_piece, self._num_short = 0, self._num_short + len(spans)
            spans.move(self._start, len(spans))
        return EMPTY

    def settle(self, position: memoryview) -> bool:
        return bool(position[_PIECE]) or self._documents.settle(position[2:])

    def turn(self, position: memoryview) -> None:
        source = position[2:]
        source[:] = self._start
        self._documents.turn(source)
        position[_PIECE] = 0
        position[_SHORT] += self._num_short

    def _cut(self, spans: Spans, position: memoryview, first_piece: int) -> Spans:
        """The pieces of documents. Each moves behind the documents up to its own, and that one where it is the last of it."""
        num_short = position[_SHORT] + self._num_short
        document: list[int] = []  # of each piece
        after: list[tuple[int, int]] = []  # piece of the next, short ones passed
        places: list[slice] = []
        for number, view in enumerate(spans.views()):
            pieces = self._cleaning.pieces(view)
            num_short += not pieces
            for piece in range(0 if number else first_piece, len(pieces)):
                document.append(number)
                after.append((0 if piece + 1 == len(pieces) else piece + 1, num_short))
                places.append(pieces[piece])
        own = np.array(after, dtype=np.int64).reshape(-1, 2)
        at = np.array(document, dtype=np.int64)
        begin, end = (
            np.array([getattr(place, name) for place in places], dtype=np.int64) for name in ("start", "stop")
        )
        passed = Moves.between(position[2:], self._start)
        below = Moves.join([passed, spans.moves]).grouped(1 + at + (own[:, 0] == 0)).under(2)
        return Spans(
            spans.arrays,
            spans.array[at],
            spans.start[at] + begin,
            end - begin,
            below.then(Moves.of([_PIECE, _SHORT], own)),
            spans.keeps,
            None if spans.where is None else tuple(spans.where[number] for number in document),
        )
