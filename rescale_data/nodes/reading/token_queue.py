"""`TokenQueue`: concatenated documents from which samples are drawn."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Self

import numpy as np

from rescale_data.errors import DataStateError
from rescale_data.nodes.reading.extension import kernel
from rescale_data.nodes.reading.spans import EMPTY_SPANS, Spans
from rescale_data.sources.decoded.cache import ReferencedValue

if TYPE_CHECKING:
    from rescale_data.nodes.reading.gather import SpecialTokens

BEYOND_END_MESSAGE = (
    "the position is behind the end of its document: the data is not what it was when the position was saved"
)


class TokenQueue(kernel.TokenQueue, ReferencedValue):
    """Documents from which `fill` draws samples. A draw advances the position that the queue was made with.

    Args:
        special_tokens: The tokens around each document.
        position: int64 slots: an offset in the first document, and the position from which documents are read.
        on_drop: Called when the cache drops the token queue.

    Attributes:
        nbytes: Bytes that the queue keeps alive, set by the caller of `append`.
        reach: The position behind all of its documents, without the offset.
        left: Number of tokens not drawn yet; negative if the position is within a document that has not been appended yet.
    """

    __slots__ = ("nbytes", "on_dropped", "reach")

    def __new__(
        cls, special_tokens: SpecialTokens, position: memoryview, on_drop: Callable[[], None] = lambda: None
    ) -> Self:
        end_position = np.array(position[1:], dtype=np.int64).data
        bos, eos = (-1 if token is None else token for token in (special_tokens.bos_id, special_tokens.eos_id))
        queue = super().__new__(cls, position, end_position, bos, eos)
        queue.on_dropped, queue.reach, queue.nbytes = on_drop, end_position, 0
        return queue

    def append(self, spans: Spans) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Append documents to the queue.

        Raises:
            IndexError: A document is not within its array.
            DataStateError: The offset is behind the end of the first document.
        """
        moves = spans.moves
        numbers = (spans.array, spans.start, spans.length, moves.ends, moves.slot, moves.slot_values)
        try:
            super().append(spans.arrays, spans, *map(np.ascontiguousarray, numbers))
        except ValueError as error:
            raise DataStateError(str(error)) from None

    def rest(self) -> Spans:
        """Return the documents that still have tokens to draw."""
        first_part, *other_parts = self.parts or [EMPTY_SPANS]
        return Spans.join([first_part[self.document :], *other_parts])
