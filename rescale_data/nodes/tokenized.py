"""`TokenizedDocuments`: reads the texts of a `Tokenize` as documents, as many at a time as it tokenizes."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rescale_data.nodes.base import View, copy_of, go_to
from rescale_data.nodes.reading.documents import Texts
from rescale_data.nodes.reading.spans import EMPTY, Moves, Spans, TokenArray, plain
from rescale_data.sources.source import Tokens
from rescale_data.state import Ints

if TYPE_CHECKING:
    from rescale_data.nodes.tokenize import Tokenize

FIRST_TEXTS = 1
"""Texts that are tokenized first after a start or a resume. The number then doubles each time, so that at most twice the
texts needed are tokenized."""


class TokenizedDocuments:
    """The samples of a `Tokenize` as `Documents`.

    Args:
        node: The node.
        texts: The texts below it, if they can be read without their rows. If that fails, samples are read one by one, and
            raise the error.
    """

    def __init__(self, node: Tokenize, texts: Texts | None) -> None:
        self._node, self._texts, self._ended = node, texts, False
        self._num_texts = FIRST_TEXTS
        self._behind: View | None = None  # the position behind the texts that were read last

    is_costly = True

    def read(self, position: memoryview, most: int) -> Spans:
        found = None
        if self._texts is not None:
            if self._behind != position:
                self._num_texts = FIRST_TEXTS
            try:
                found = self._of_texts(self._texts, position, min(most, self._num_texts))
            except Exception:
                found = None  # the sample then raises the error, and names its row
        return self._of_samples(position, most) if found is None else found

    def turn(self, position: memoryview) -> None:
        if self._texts is not None:
            self._texts.turn(position[1:])
            self._behind = copy_of(position)
        else:
            position[:] = copy_of(self._node.position)

    def _of_texts(self, texts: Texts, position: memoryview, most: int) -> Spans | None:
        found, moves = texts.read(position[1:], most)
        if not found:
            return EMPTY
        tokens = end_to_end(self._node.tokenizer(found))
        if tokens is None or len(tokens[1]) != len(found):
            return None
        values, length = tokens
        spans = Spans((values,), np.zeros_like(length), np.cumsum(length) - length, length, moves.under(1), (None,))
        self._behind = copy_of(position)
        spans.move(self._behind, len(spans))
        self._num_texts = min(2 * self._num_texts, self._node.batch_size)
        return spans

    def _of_samples(self, position: memoryview, most: int) -> Spans:
        if self._ended or self._node.position != position:
            go_to(self._node, position)
        found = self._node.next_texts(most)
        self._ended = not found
        if not found:
            return EMPTY
        arrays = tuple(plain(tokens.copy()) for tokens, _ in found)
        number, length = np.arange(len(found)), np.array([*map(len, arrays)])
        moves = Moves.of(np.arange(len(position)), np.array([after for _, after in found], dtype=np.int64))
        return Spans(arrays, number, np.zeros_like(number), length, moves, (None,) * len(found))


def end_to_end(found: Sequence[Any]) -> tuple[TokenArray, Ints] | None:
    """Return the token ids of all texts, end to end, and the number of ids in each text.

    `None` if they are not all lists of ints, or all 1-D arrays of ints.
    """
    kinds = {type(ids) for ids in found}
    if kinds == {list}:
        if any(ids and ids[0].__class__ is bool for ids in found):  # a mask is no list of ids
            return None
        try:
            parts = [struct.pack(f"{len(ids)}q", *ids) for ids in found]  # takes half the time of array.array or NumPy
        except struct.error:
            return None
        values = np.frombuffer(b"".join(parts), dtype=np.int64)
    elif kinds == {np.ndarray}:
        values = np.concatenate(found)
    else:
        return None
    if values.dtype.kind not in "iu" or values.ndim != 1:
        return None
    tokens = Tokens(values, np.array([*map(len, found)])).tight()
    return plain(tokens.values), tokens.offsets
