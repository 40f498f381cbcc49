"""`CleanDocuments`: strips, drops and splits tokenized documents before they are packed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import numpy as np

from rescale_data.errors import checks_argument_types, require_int, require_type
from rescale_data.nodes.base import BaseNode, Node, go_to
from rescale_data.nodes.below import dtype_of, open_documents
from rescale_data.nodes.changing import apply_changes
from rescale_data.nodes.column import tokens_of_sample
from rescale_data.nodes.empty_draws import EmptyDrawLimit
from rescale_data.nodes.reading.documents import DocumentReader
from rescale_data.nodes.reading.edited_documents import EditedDocuments
from rescale_data.nodes.reading.spans import Spans
from rescale_data.state import COUNT_LIMITS, Field, Ints, counter

_PIECE_SLOT, _SHORT_SLOT = 0, 1


class CleanDocuments(Node[dict[str, Any]]):
    """Strips given tokens at both ends of documents, drops the short documents and cuts the long ones into pieces.

    Over a `Reader` and below a packer, documents are cleaned many at a time. The position holds the source's position at the
    document of the next piece, and the number of that piece.

    Args:
        source: A node whose samples hold tokens under ``column``.
        column: The column of the tokens.
        strip: Token ids to take off at both ends of a document, such as a BOS or EOS that the packer puts there itself.
        min_length: Documents with fewer tokens are left out and counted (``short_documents``).
        max_length: Longer documents are yielded in pieces of ``max_length`` tokens; the last piece has the rest. Every piece
            keeps the other columns.

    Raises:
        ValueError: Lengths out of range, a sample without that column.
        TypeError: The column does not hold lists of integers.

    Example:
        >>> import rescale_data as rd
        >>> reader = rd.Reader([{"tokens": [1, 5, 6, 2]}, {"tokens": [1, 2]}], rd.Shard(), shuffle=False)
        >>> [sample["tokens"].tolist() for sample in rd.CleanDocuments(reader, "tokens", strip=[1, 2])]
        [[5, 6]]
    """

    FIELDS = (Field(("piece",), limits=COUNT_LIMITS), counter("short"))
    READS_AHEAD: ClassVar[bool] = True
    RESUME_UNIT = "window"

    @checks_argument_types
    def __init__(
        self,
        source: BaseNode[Any],
        column: str,
        *,
        strip: Sequence[int] = (),
        min_length: int = 1,
        max_length: int | None = None,
    ) -> None:
        if min_length < 0 or (max_length is not None and max_length < max(1, min_length)):
            raise ValueError(
                f"min_length={min_length}, max_length={max_length}: give at least 0, and None or at least min_length and 1."
            )
        require_type(Iterable, "a list of token ids", strip=strip)
        super().__init__(source=source)
        self.column = column
        strip_tokens = require_int(**{f"strip[{i}]": token for i, token in enumerate(strip)})
        self.strip, self.min_length, self.max_length = frozenset(strip_tokens), min_length, max_length
        self._source, self._draw_limit = self.children["source"], EmptyDrawLimit(self)

    def seek(self) -> None:
        self._bookmark = self.position[self._slots("source")]
        self._pieces: list[slice] | None = None
        self._is_epoch_over = False

    def next(self) -> dict[str, Any]:
        num_empty = 0
        while not self._is_epoch_over:
            pieces = self._current_pieces()
            piece_number = self.position[_PIECE_SLOT]
            if piece_number + 1 >= len(pieces):
                self._to_next_document()
            else:
                self.position[_PIECE_SLOT] = piece_number + 1
            if piece_number < len(pieces):
                return {**self._sample, self.column: self._tokens[pieces[piece_number]]}
            num_empty = self._draw_limit.count_empty_draws(num_empty)
        raise StopIteration

    def open_documents(self, column: str) -> DocumentReader | None:
        if column != self.column:
            return None
        documents, limit = open_documents(self._source, column), EmptyDrawLimit(self._source, type(self).__name__)
        return documents and EditedDocuments(documents, self._all_pieces, limit, [_SHORT_SLOT, _PIECE_SLOT])

    def dtype_of(self, column: str) -> np.dtype[Any] | None:
        return dtype_of(self._source, column)

    def _all_pieces(self, spans: Spans) -> list[list[slice]]:
        return [self.pieces(view) for view in spans.document_views()]

    def pieces(self, tokens: Sequence[int]) -> list[slice]:
        """Return the pieces of a document as slices of its tokens; an empty list if the document is too short."""
        start, stop = 0, len(tokens)
        while start < stop and int(tokens[start]) in self.strip:
            start += 1
        while start < stop and int(tokens[stop - 1]) in self.strip:
            stop -= 1
        if stop - start < self.min_length:
            return []
        length = self.max_length or max(1, stop - start)
        return [slice(begin, min(begin + length, stop)) for begin in range(start, max(stop, start + 1), length)]

    def parameters(self) -> dict[str, Any]:
        lengths = {"min_length": self.min_length, "max_length": self.max_length}
        return {"column": self.column, "strip": sorted(self.strip), **lengths}

    def progress(self, rows: Ints, shards: Ints, samples: Ints) -> dict[str, float]:
        return {"short_documents": float(rows[:, _SHORT_SLOT].sum())}

    def _current_pieces(self) -> list[slice]:
        """Return the pieces of the current document, read if needed; none if it is too short or the epoch has ended."""
        if self._pieces is None:
            apply_changes(self)
            if self._source.position != self._bookmark:
                go_to(self._source, self._bookmark)
            try:
                self._sample = next(self._source)
            except StopIteration:
                self._is_epoch_over = True
                return []
            self._tokens = tokens_of_sample(self._sample, self.column, type(self).__name__, self._source)
            self._pieces = self.pieces(self._tokens.data)
            self.position[_SHORT_SLOT] += not self._pieces
        return self._pieces

    def _to_next_document(self) -> None:
        self._bookmark[:] = self._source.position
        self.position[_PIECE_SLOT] = 0
        self._pieces = None
