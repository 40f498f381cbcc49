"""`TokenizedDocuments`: the texts of a `Tokenize` as documents, as many at a time as it tokenizes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rescale_data.nodes.base import copy_of
from rescale_data.nodes.reading.spans import EMPTY, Moves, Spans, plain

if TYPE_CHECKING:
    from rescale_data.nodes.tokenize import Tokenize


class TokenizedDocuments:
    """`Documents`, of which none is seen as a sample."""

    def __init__(self, node: Tokenize) -> None:
        self._node, self._ended = node, False

    def read(self, position: memoryview, most: int) -> Spans:
        if self._ended or self._node.position != position:
            self._node.position[:] = position
            self._node.bind(self._node.position)
        found = self._node.texts(most)
        self._ended = not found
        if not found:
            return EMPTY
        arrays = tuple(plain(tokens.copy()) for tokens, _ in found)
        number, length = np.arange(len(found)), np.array([*map(len, arrays)])
        moves = Moves.of(np.arange(len(position)), np.array([after for _, after in found], dtype=np.int64))
        return Spans(arrays, number, np.zeros_like(number), length, moves, (None,) * len(found))

    def settle(self, position: memoryview) -> bool:
        del position  # nothing below may change
        return False

    def turn(self, position: memoryview) -> None:
        position[:] = copy_of(self._node.position)
