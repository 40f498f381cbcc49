"""`TokenizedDocuments`, `TokenizedSamples`: read documents of a `Tokenize` node, as many as it tokenizes together."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rescale_data.nodes.base import View, go_to
from rescale_data.nodes.reading.documents import DocumentReader
from rescale_data.nodes.reading.spans import EMPTY_SPANS, PositionUpdates, Spans, TokenArray, as_native_array
from rescale_data.sources.source import Tokens
from rescale_data.state import Ints, copy_of

if TYPE_CHECKING:
    from rescale_data.nodes.tokenize import Tokenize

NUM_FIRST_TEXTS = 1
"""Texts that are tokenized first after a start or a resume. The number then doubles each time, so that at most twice the
texts needed are tokenized."""


class TokenizedDocuments:
    """Reads the tokenized texts of a `Tokenize` node through the interface `DocumentReader`.

    Args:
        node: The node.
        texts: The texts below it, as UTF-8 bytes.
    """

    def __init__(self, node: Tokenize, texts: DocumentReader) -> None:
        self._node, self._texts = node, texts
        self._num_next_texts = NUM_FIRST_TEXTS
        self._next_position: View | None = None  # the position behind the texts that were read last

    is_costly_to_read = True

    def read(self, position: memoryview, max_documents: int) -> Spans:
        if self._next_position != position:
            self._num_next_texts = NUM_FIRST_TEXTS
        texts = self._texts.read(position[1:], min(max_documents, self._num_next_texts))
        if not len(texts):
            return EMPTY_SPANS
        tokens = concatenate_ids(self._node.tokenizer(_decode(texts)))
        if tokens is None or len(tokens[1]) != len(texts):
            raise ValueError("The tokenizer did not return one list or array of token ids for each text.")
        (all_ids, length), moves = tokens, texts.moves.shifted(1)
        spans = Spans((all_ids,), np.zeros_like(length), np.cumsum(length) - length, length, moves, (None,))
        self._next_position = copy_of(position)
        spans.move(self._next_position, len(spans))
        self._num_next_texts = min(2 * self._num_next_texts, self._node.batch_size)
        return spans

    def begin_next_epoch(self, position: memoryview) -> None:
        self._texts.begin_next_epoch(position[1:])
        self._next_position = copy_of(position)


class TokenizedSamples:
    """Reads the documents of a `Tokenize` node over any samples: several at a time, where `ColumnDocuments` reads one."""

    is_costly_to_read = True

    def __init__(self, node: Tokenize) -> None:
        self._node, self._epoch_ended = node, False
        for _, inner in node.walk():
            inner.is_reread = True

    def read(self, position: memoryview, max_documents: int) -> Spans:
        if self._epoch_ended or self._node.position != position:
            go_to(self._node, position)
        samples = self._node.next_texts(max_documents)
        self._epoch_ended = not samples
        if not samples:
            return EMPTY_SPANS
        arrays = tuple(as_native_array(tokens.copy()) for tokens, _ in samples)
        document_index, length = np.arange(len(samples)), np.array([*map(len, arrays)])
        moves = PositionUpdates.of(np.arange(len(position)), np.array([end for _, end in samples], dtype=np.int64))
        return Spans(arrays, document_index, np.zeros_like(document_index), length, moves, (None,) * len(samples))

    def begin_next_epoch(self, position: memoryview) -> None:
        position[:] = self._node.position


def _decode(texts: Spans) -> list[str]:
    """Return texts as strings, given their UTF-8 bytes; ``UnicodeDecodeError`` as for one that is read alone."""
    num_bytes, stops = int(texts.length.sum()), (texts.start + texts.length).tolist()
    # Slices of bytes take half the time of slices of a view, which are for arrays that hold more than these texts
    data = [array.tobytes() if array.nbytes <= num_bytes else array.data for array in texts.arrays]
    ranges = zip(texts.array.tolist(), texts.start.tolist(), stops, strict=True)
    return [str(data[array][start:stop], "utf-8") for array, start, stop in ranges]


def concatenate_ids(id_lists: Sequence[Any]) -> tuple[TokenArray, Ints] | None:
    """Return the token ids of all texts as one array, and the number of ids in each text.

    `None` if they are not all lists of ints, or all 1-D arrays of ints.
    """
    list_types = {type(ids) for ids in id_lists}
    if list_types == {list}:
        if bool in {type(ids[0]) for ids in id_lists if ids}:  # a mask is no list of ids
            return None
        try:
            # takes half the time of array.array or NumPy
            packed_ids = [struct.pack(f"{len(ids)}q", *ids) for ids in id_lists]
        except struct.error:
            return None
        all_ids = np.frombuffer(b"".join(packed_ids), dtype=np.int64)
    elif list_types == {np.ndarray}:
        all_ids = np.concatenate(id_lists)
    else:
        return None
    if all_ids.dtype.kind not in "iu" or all_ids.ndim != 1:
        return None
    tokens = Tokens(all_ids, np.array([*map(len, id_lists)])).with_narrow_dtype()
    return as_native_array(tokens.values), tokens.offsets
