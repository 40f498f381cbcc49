"""`Window`: successive documents that are packed together, and the samples made from them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from rescale_data.nodes.base import View
from rescale_data.nodes.batch_buffer import BatchBuffer
from rescale_data.nodes.packing.columns import MASK, AlignedColumns, PayloadColumns, PerDocValues, payload_size
from rescale_data.nodes.packing.fit import DocPiece, LongDocumentRule, num_untrained, pack_documents, padded_length
from rescale_data.nodes.packing.packer import IGNORED_LABEL
from rescale_data.nodes.provenance import PROVENANCE, join_provenance, provenance_of
from rescale_data.nodes.reading.gather import SpecialTokens, join_documents
from rescale_data.nodes.reading.spans import Spans
from rescale_data.nodes.sample_format import Format
from rescale_data.sources.decoded.cache import CostlyValue
from rescale_data.sources.decoded.sizes import memory_bytes_of

_BYTES_OF_A_PIECE = 250


class Window(CostlyValue):
    """Successive documents that are packed together, and the samples into which they were packed.

    Args:
        special_tokens: The tokens around documents.
        long: As in `WholeDocumentPacker`.
        pad_multiple: Each document is filled up to a multiple of this number of tokens.
        aligned: Columns alongside the tokens.
        payload: Columns that documents carry along.
        spans: The documents.
        formats: The formats in which they are packed in turn (`pack_documents`); the last is the present one.
        end_position: The position of the source after the documents.

    Attributes:
        samples: The pieces of documents in each sample.
        num_long_docs: Number of documents that are longer than a sample or exceed its limits.
        num_untrained_docs: Number of documents that are packed without a learned token.
        nbytes: Size for the cache.
    """

    def __init__(
        self,
        special_tokens: SpecialTokens,
        long: LongDocumentRule,
        pad_multiple: int,
        aligned: AlignedColumns,
        payload: PayloadColumns,
        spans: Spans,
        formats: Sequence[Format],
        end_position: View,
    ) -> None:
        self.end_position, self._pad_multiple = end_position, pad_multiple
        self._tokens, starts = join_documents(spans, special_tokens)
        self._token_starts = starts.tolist()
        documents = [(start, stop, number) for number, (start, stop) in enumerate(pairwise(self._token_starts))]
        self._payload = payload.collect_payload(spans)
        payload_sizes = {name: [payload_size(value) for value in values] for name, values in self._payload.items()}
        self.samples, too_long = pack_documents(documents, formats, long, pad_multiple, payload_sizes)
        self.num_long_docs, self.num_untrained_docs = len(too_long), 0
        self._column_values = aligned.concatenate(spans, special_tokens) if aligned else {}
        if (learned := self._column_values.get(MASK)) is not None:
            packed = [document for document in documents if long != "drop" or document[2] not in too_long]
            self.num_untrained_docs = num_untrained(packed, formats[-1].seq_len, long, learned)
        self._provenance = provenance_of(spans.document_values())
        column_bytes = memory_bytes_of((self._column_values, self._payload))
        num_objects = sum(map(len, self.samples)) + len(self._provenance)
        self.nbytes = self._tokens.nbytes + column_bytes + _BYTES_OF_A_PIECE * num_objects

    def num_used_tokens(self, sample_number: int) -> int:
        """Return the number of tokens in a sample, without padding."""
        return sum(stop - start for start, stop, _ in self.samples[sample_number])

    def write_row(self, buffer: BatchBuffer, row: int, sample_number: int, pad_id: int) -> None:
        """Write one sample into one row of a batch buffer, for all columns of the buffer; ``pad_id`` is the padding token."""
        pieces = self.samples[sample_number]
        piece_lengths = np.array([padded_length(piece, self._pad_multiple) for piece in pieces])
        piece_ends = np.cumsum(piece_lengths)
        tokens = self._pad_pieces(self._tokens, pieces, pad_id)
        learned = self._column_values.get(MASK, np.broadcast_to(np.True_, len(self._tokens)))
        next_is_learned = np.zeros(len(tokens), dtype=np.bool_)  # true if the next token is learned
        next_is_learned[:-1] = self._pad_pieces(learned, pieces, 0)[1:]
        next_is_learned[piece_ends - 1] = False
        buffer.write_row("tokens", row, tokens, pad_id)
        piece_starts = np.repeat(piece_ends - piece_lengths, piece_lengths)
        buffer.write_row("positions", row, np.arange(len(tokens)) - piece_starts, 0)
        buffer.write_row("doc_ids", row, np.repeat(np.arange(len(pieces)), piece_lengths), -1)
        buffer.write_row(MASK, row, next_is_learned, fill=False)
        buffer.write_row("cu_seqlens", row, np.concatenate([[0], piece_ends]), buffer.arrays["tokens"].shape[1])
        if "labels" in buffer.arrays:
            labels = np.where(next_is_learned, np.append(tokens[1:], tokens[:1]).astype(np.int64), IGNORED_LABEL)
            buffer.write_row("labels", row, labels, IGNORED_LABEL)
        for name in self._column_values.keys() - {MASK}:
            buffer.write_row(name, row, self._pad_pieces(self._column_values[name], pieces, 0), 0)
        if "cost" in buffer.arrays:
            buffer.write_row("cost", row, np.array([np.square(piece_lengths).sum()]), 0)
        if self._provenance:
            buffer.add(PROVENANCE, join_provenance(self._provenance[document] for _, _, document in pieces))
        for name, values in self._payload.items():
            begins = [(document, start == self._token_starts[document]) for start, _, document in pieces]
            buffer.add(name, PerDocValues(values[document] if is_first else None for document, is_first in begins))

    def _pad_pieces(self, values: npt.NDArray[Any], pieces: list[DocPiece], fill: int) -> npt.NDArray[Any]:
        """Return the values of pieces, concatenated, each padded with ``fill`` to its length in a sample."""
        arrays, multiple = [values[start:stop] for start, stop, _ in pieces], self._pad_multiple
        if multiple > 1:
            arrays = [np.pad(array, (0, -len(array) % multiple), constant_values=fill) for array in arrays]
        return np.concatenate(arrays)
