"""`Window`: successive documents that are packed together, and the samples made from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rescale_data.nodes.base import View
from rescale_data.nodes.batch_buffer import BatchBuffer
from rescale_data.nodes.form import Stage
from rescale_data.nodes.packing.aligned import MASK, AlignedColumns, ColumnArrays
from rescale_data.nodes.packing.fit import DocPiece, Fit, LongDocumentRule, num_untrained, pack_documents, padded_length
from rescale_data.nodes.packing.packer import IGNORED_LABEL
from rescale_data.nodes.packing.payload import DocumentPayload, PerDocument, payload_size
from rescale_data.nodes.provenance import PROVENANCE, join_provenance, provenance_of
from rescale_data.nodes.reading.gather import SpecialTokens, join_documents
from rescale_data.nodes.reading.spans import Spans, TokenArray
from rescale_data.sources.decoded.cache import DerivedValue
from rescale_data.sources.decoded.sizes import memory_bytes_of
from rescale_data.state import Ints

_BYTES_OF_A_PIECE = 250


@dataclass(frozen=True)
class Window(DerivedValue):
    """Successive documents, and the samples into which they were packed.

    Args:
        tokens: Tokens of all documents, end to end.
        token_starts: ``int64[D + 1]``, the first token of each document, and the end.
        packing_result: The places in ``tokens`` of the pieces of each sample.
        end_position: The position of the source after the documents.
        provenance: The provenance of each document, if the reader gives it; else empty.
        column_values: Values of the columns alongside the tokens, in the same layout.
        num_untrained_docs: Number of documents without a token that is learned.
        payload: By name, the payload of each document.
    """

    tokens: TokenArray
    token_starts: Ints
    packing_result: Fit
    end_position: View
    provenance: list[str]
    column_values: ColumnArrays
    num_untrained_docs: int
    payload: dict[str, list[Any]]

    @property
    def nbytes(self) -> int:
        return (
            self.tokens.nbytes
            + memory_bytes_of(self.column_values)
            + memory_bytes_of(self.payload)
            + _BYTES_OF_A_PIECE * (len(self.packing_result.pieces) + len(self.provenance))
        )

    @property
    def num_samples(self) -> int:
        return len(self.packing_result.bins)

    def pieces(self, sample_number: int) -> list[DocPiece]:
        """Return the pieces of documents in a sample, given by its number."""
        return [self.packing_result.pieces[item] for item in self.packing_result.bins[sample_number]]

    def num_used_tokens(self, sample_number: int) -> int:
        """Return the number of tokens in a sample, without padding."""
        return sum(stop - start for start, stop, _ in self.pieces(sample_number))


@dataclass(frozen=True)
class WindowPacker:
    """Packs documents into windows; the sample formats are arguments of `window`.

    Args:
        special_tokens: The tokens around documents.
        long: As in `WholeDocumentPacker`.
        pad_multiple: Each document is filled up to a multiple of this number of tokens.
        aligned: Columns alongside the tokens.
        payload: Columns that documents carry along.
    """

    special_tokens: SpecialTokens
    long: LongDocumentRule
    pad_multiple: int
    aligned: AlignedColumns
    payload: DocumentPayload

    def window(self, spans: Spans, forms: Sequence[Stage], end_position: View) -> Window:
        """Return a window of documents, packed in each format in turn (`pack_documents`); the last is the present one."""
        tokens, starts = join_documents(spans, self.special_tokens)
        document_ends = starts[1:].tolist()
        documents = list(zip([0, *document_ends[:-1]], document_ends, range(len(document_ends)), strict=True))
        payload = self.payload.collect_payload(spans)
        payload_sizes = {name: [payload_size(value) for value in values] for name, values in payload.items()}
        fitted = pack_documents(documents, forms, self.long, self.pad_multiple, payload_sizes)
        values = self.aligned.concatenate(spans, self.special_tokens) if self.aligned else {}
        mask = values.get(MASK)
        untrained = 0 if mask is None else num_untrained(documents, fitted, forms[-1].seq_len, self.long, mask)
        provenance = provenance_of(spans.document_values())
        return Window(tokens, starts, fitted, end_position, provenance, values, untrained, payload)


def write_row(buffer: BatchBuffer, row: int, window: Window, sample_number: int, *, pad_id: int, multiple: int) -> None:
    """Write one sample of a window into one row of a batch buffer, for all columns of the buffer.

    Args:
        buffer: The buffer.
        row: The row.
        window: The window.
        sample_number: Number of the sample in the window.
        pad_id: The token to pad with.
        multiple: Each document is filled up to a multiple of this number of tokens.
    """
    pieces = window.pieces(sample_number)
    piece_lengths = np.array([padded_length(piece, multiple) for piece in pieces])
    piece_ends = np.cumsum(piece_lengths)
    tokens = _pad_pieces(window.tokens, pieces, pad_id, multiple)
    learned = window.column_values.get(MASK, np.broadcast_to(np.True_, len(window.tokens)))
    next_is_learned = np.zeros(len(tokens), dtype=np.bool_)  # true if the next token is learned
    next_is_learned[:-1] = _pad_pieces(learned, pieces, 0, multiple)[1:]
    next_is_learned[piece_ends - 1] = False
    buffer.write_row("tokens", row, tokens, pad_id)
    buffer.write_row("positions", row, np.arange(len(tokens)) - np.repeat(piece_ends - piece_lengths, piece_lengths), 0)
    buffer.write_row("doc_ids", row, np.repeat(np.arange(len(pieces)), piece_lengths), -1)
    buffer.write_row(MASK, row, next_is_learned, fill=False)
    buffer.write_row("cu_seqlens", row, np.concatenate([[0], piece_ends]), buffer.arrays["tokens"].shape[1])
    if "labels" in buffer.arrays:
        labels = np.where(next_is_learned, np.append(tokens[1:], tokens[:1]).astype(np.int64), IGNORED_LABEL)
        buffer.write_row("labels", row, labels, IGNORED_LABEL)
    for name in window.column_values.keys() - {MASK}:
        buffer.write_row(name, row, _pad_pieces(window.column_values[name], pieces, 0, multiple), 0)
    if "cost" in buffer.arrays:
        buffer.write_row("cost", row, np.array([np.square(piece_lengths).sum()]), 0)
    if window.provenance:
        buffer.add(PROVENANCE, join_provenance(window.provenance[document] for _, _, document in pieces))
    for name, values in window.payload.items():
        buffer.add(name, PerDocument(values[d] if start == window.token_starts[d] else None for start, _, d in pieces))


def _pad_pieces(values: npt.NDArray[Any], pieces: list[DocPiece], fill: int, multiple: int) -> npt.NDArray[Any]:
    """Return the values of pieces, concatenated, each padded with ``fill`` to a multiple of ``multiple`` values."""
    padded_pieces = [values[start:stop] for start, stop, _ in pieces]
    if multiple > 1:
        padded_pieces = [np.pad(array, (0, -len(array) % multiple), constant_values=fill) for array in padded_pieces]
    return np.concatenate(padded_pieces)
