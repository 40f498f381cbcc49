"""`TokenPacker`: concatenates documents and cuts them into samples of one length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from rescale_data.errors import checks_argument_types
from rescale_data.nodes.base import Node, changing_children
from rescale_data.nodes.batch_buffer import BatchBuffer, ColumnFormats, written_sample
from rescale_data.nodes.below import has_provenance, is_endless, source_names
from rescale_data.nodes.column import documents_of, num_tokens_of
from rescale_data.nodes.empty_draws import MAX_EMPTY_EPOCHS, EmptyDrawLimit
from rescale_data.nodes.packing.columns import MASK, AlignedColumns, ColumnArrays
from rescale_data.nodes.packing.token_stream import TokenStream
from rescale_data.nodes.provenance import PROVENANCE, join_provenance, provenance_of
from rescale_data.nodes.reading.gather import IntRows, SpecialTokens, fill
from rescale_data.nodes.reading.spans import EMPTY_SPANS, Spans
from rescale_data.nodes.sample_format import ParameterHistory, num_tokens
from rescale_data.state import COUNT_LIMITS, Field, Ints, counter

IGNORED_LABEL = -100
"""The label of a token without a next token; torch's cross entropy leaves it out."""

DTYPES: dict[torch.dtype, np.dtype[Any]] = {torch.int64: np.dtype(np.int64), torch.int32: np.dtype(np.int32)}


_UNTRAINED_SLOT, _CUT_DOCUMENTS_SLOT = 0, 1


class TokenPacker(Node[dict[str, Tensor]]):
    """Concatenates documents, each between optional ``bos_id`` and ``eos_id``, and cuts samples of ``seq_len`` tokens.

    A document is cut where a sample ends, and goes on in the next sample. The position holds the source's position at the
    document of the next token (or at a document without tokens before it), and the offset of that token in the document
    (``bos_id`` counted). The rest of a document is read again, not stored.
    So ``seq_len``, ``labels``, ``doc_ids``, ``dtype`` and ``last`` may change when a state is loaded, and hold from there on.
    Over a `Reader` documents are read many at a time; over any other node, each of its samples is one document.

    If the streams below are endless (`Shard.repeat`), a sample may span two epochs. Otherwise the last, partial sample of an
    epoch is dropped or padded.

    Args:
        source: A node whose samples hold the tokens of a document under ``column``, as a 1-D array, tensor or list of ints.
        column: The column of the tokens.
        seq_len: Tokens of a sample.
        eos_id: Token to put after each document; `None` for nothing.
        bos_id: Token to put before each document; `None` for nothing.
        labels: Add the next tokens as ``"labels"``. The last label is the first token behind the sample, which is not consumed.
        doc_ids: Add ``"doc_ids"``: 0 for tokens of the sample's first document, 1 for tokens of its second, ...
        dtype: ``torch.int64`` or ``torch.int32``, of tokens, labels and doc_ids.
        last: ``"drop"`` or ``"pad"``, for the last, partial sample of an epoch. Padding is at its end, with the label -100 and
            the doc_id -1.
        pad_id: The token to pad with; default ``eos_id``, or 0.
        columns: As in `WholeDocumentPacker`. In ``"loss_mask"`` the value of each token is true if the next token is learned.
            Documents without a learned token and documents that were cut are then counted (``untrained_documents``,
            ``cut_documents``).

    Yields:
        ``{"tokens": Tensor[seq_len]}``, with ``"labels"`` and ``"doc_ids"`` if requested; freshly allocated. Over a
        ``Reader(provenance=True)`` also ``"provenance"``, a line for each document.

    Raises:
        ValueError: An argument is out of range, or there is no such column.
        TypeError: The column does not hold lists of integers.
        DataStateError: Two whole epochs of an endless stream had no token.

    Example:
        >>> import rescale_data as rd
        >>> reader = rd.Reader([{"tokens": [1, 2, 3]}, {"tokens": [4, 5]}], rd.Shard(), shuffle=False)
        >>> next(rd.TokenPacker(reader, column="tokens", seq_len=6, eos_id=0))["tokens"]
        tensor([1, 2, 3, 0, 4, 5])
    """

    OFFSET_FIELDS: ClassVar[tuple[Field, ...]] = (Field(("offset",), limits=COUNT_LIMITS),)
    MASK_COUNT_FIELDS: ClassVar[tuple[Field, ...]] = (counter("untrained"), counter("cut"))
    """Additional fields, before the offset, if there is a loss mask."""
    READS_AHEAD: ClassVar[bool] = True
    RESUME_UNIT = "document"
    FORMAT: ClassVar[frozenset[str]] = frozenset({"seq_len", "labels", "doc_ids", "dtype", "last"})
    written_columns: ColumnFormats = MappingProxyType({})
    reveals_next_token: bool = False

    @checks_argument_types
    def __init__(
        self,
        source: Node[Any],
        *,
        column: str,
        seq_len: int,
        eos_id: int | None,
        bos_id: int | None = None,
        labels: bool = False,
        doc_ids: bool = False,
        dtype: torch.dtype = torch.int64,
        last: Literal["drop", "pad"] = "drop",
        pad_id: int | None = None,
        columns: Mapping[str, torch.dtype] = MappingProxyType({}),
    ) -> None:
        _check_arguments(seq_len, last)
        require_dtype(dtype, pad_id)
        output_names = ["tokens", *["labels"] * labels, *["doc_ids"] * doc_ids]
        self._aligned = AlignedColumns(columns, column, {*output_names, "labels", "doc_ids"}, type(self).__name__)
        self.FIELDS = (self.MASK_COUNT_FIELDS if self._aligned.has_mask else ()) + self.OFFSET_FIELDS
        super().__init__(source=source)
        child = self.children["source"]
        self._offset_slot = len(self.FIELDS) - 1
        self.column, self.seq_len, self.labels, self.doc_ids = column, seq_len, labels, doc_ids
        self.dtype, self.last, self.eos_id, self.bos_id = dtype, last, eos_id, bos_id
        self.pad_id = pad_id if pad_id is not None else eos_id or 0
        self.written_columns = {
            **dict.fromkeys(output_names, (seq_len, DTYPES[dtype])),
            **{name: (seq_len, column_dtype) for name, column_dtype in self._aligned.dtypes.items()},
        }
        self.reveals_next_token = labels or self._aligned.has_mask
        self._repeat = is_endless(child)
        self._history: ParameterHistory = ()
        self._has_provenance = any(has_provenance(node) for _, node in child.walk())
        self._draws_one_by_one = bool(self._aligned) or self._has_provenance
        self._special_tokens = SpecialTokens(eos_id, bos_id, DTYPES[dtype])
        self.stream = TokenStream(
            child,
            documents_of(child, column, type(self).__name__, *[self._aligned.extract_columns] * bool(self._aligned)),
            self._special_tokens,
            tokens_per_sample=seq_len,
            num_tokens_ahead=int(self.reveals_next_token),
            repeat=self._repeat,
            draw_limit=EmptyDrawLimit(child, type(self).__name__),
        )

    def seek(self) -> None:
        node_may_change = bool(changing_children(self)) and not self.is_reread
        self.stream.bind(self.position[self._offset_slot :], node_may_change=node_may_change)
        self._is_epoch_over = False

    def next(self) -> dict[str, Tensor]:
        return written_sample(self)

    def write(self, buffer: BatchBuffer, row_index: int) -> None:
        if self._is_epoch_over:
            raise StopIteration
        # Before the offset: a document that is blocked now ends, and the next one begins
        documents = self.stream.documents_left() if self._draws_one_by_one else EMPTY_SPANS
        offset, special_tokens = self.position[self._offset_slot], self._special_tokens
        tokens = buffer.row("tokens", row_index)
        labels = buffer.row("labels", row_index) if self.labels else None
        doc_ids = buffer.row("doc_ids", row_index) if self.doc_ids else None
        num_ready = self.stream.draw_sample(tokens, labels, doc_ids)
        num_sample_tokens = min(num_ready, self.seq_len)
        if self._aligned.has_mask:
            self._count_documents(documents, offset, num_sample_tokens)
        if num_sample_tokens < self.seq_len and not (num_sample_tokens and self.last == "pad"):
            self.stream.begin_next_epoch()
            self._is_epoch_over = True
            raise StopIteration
        if num_ready < self.seq_len + self.labels:
            self._pad(num_sample_tokens, tokens, labels, doc_ids)
        if self._aligned:
            values = self._aligned.values_in_range(documents, offset, num_ready, special_tokens)
            self._write_values(buffer, row_index, values, num_sample_tokens)
        if self._has_provenance:
            sample_documents = special_tokens.documents_within(documents, offset + num_sample_tokens)
            if lines := provenance_of(sample_documents.document_values()):
                buffer.add(PROVENANCE, join_provenance(lines))

    @staticmethod
    def write_many(nodes: Sequence[Any], buffer: BatchBuffer, first: int) -> int:
        if nodes[0]._draws_one_by_one:
            return first
        columns, queues = buffer.arrays, [node.stream.queue for node in nodes]
        first = fill(queues, first, columns["tokens"], columns.get("labels"), columns.get("doc_ids"))
        if first < len(nodes):
            for node in nodes:
                node.stream.read_ahead()
        return first

    def reread_document(self) -> None:
        source, num_epochs = self.children["source"], 0
        while num_epochs <= MAX_EMPTY_EPOCHS:
            try:
                document = next(source)  # the documents after it in a sample have not begun
            except StopIteration:
                if not self._repeat:
                    return
                source.bind(source.position)
                num_epochs += 1
                continue
            has_special_tokens = self.eos_id is not None or self.bos_id is not None
            if self.position[self._offset_slot] or has_special_tokens or num_tokens_of(document, self.column, source):
                return

    def parameters(self) -> dict[str, Any]:
        arguments = ("column", "seq_len", "eos_id", "bos_id", "labels", "doc_ids", "last", "pad_id")
        columns = {"columns": self._aligned.as_json} if self._aligned else {}
        return {**{name: getattr(self, name) for name in arguments}, "dtype": str(self.dtype), **columns}

    def progress(self, rows: Ints, shards: Ints, samples: Ints) -> dict[str, float]:
        counters = {f"tokens/{'+'.join(source_names(self))}": num_tokens(self._history, samples, self.seq_len)}
        if self._offset_slot:
            mask_counts = rows[:, [_UNTRAINED_SLOT, _CUT_DOCUMENTS_SLOT]].sum(0).tolist()
            counters |= {"untrained_documents": float(mask_counts[0]), "cut_documents": float(mask_counts[1])}
        return counters

    def use_history(self, history: Sequence[tuple[int, Mapping[str, Any]]]) -> None:
        self._history = history

    def convert_sample_format(self, rows: Ints) -> None:
        """Do nothing: positions of this packer do not depend on ``seq_len`` or its other output options."""

    def _count_documents(self, documents: Spans, offset: int, num_tokens: int) -> None:
        """Count the documents that end untrained in the next ``num_tokens`` tokens, and one that begins there and goes on."""
        document_ends = np.cumsum(self._special_tokens.lengths(documents))
        num_ended = int(document_ends.searchsorted(offset + num_tokens, side="right"))
        self.position[_UNTRAINED_SLOT] += self._aligned.num_untrained(documents[:num_ended])
        self.position[_CUT_DOCUMENTS_SLOT] += self.position[self._offset_slot] > 0 and (num_ended > 0 or not offset)

    def _write_values(self, buffer: BatchBuffer, batch_row: int, values: ColumnArrays, num_sample_tokens: int) -> None:
        """Write the other columns of a sample. The loss mask is shifted by one token, so it is true for learned labels."""
        for name, array in values.items():
            buffer.write_row(name, batch_row, array[1:] if name == MASK else array[:num_sample_tokens], 0)
        if self.labels and self._aligned.has_mask:
            buffer.row("labels", batch_row)[~buffer.row(MASK, batch_row)] = IGNORED_LABEL

    def _pad(self, num_tokens: int, tokens: IntRows, labels: IntRows | None, doc_ids: IntRows | None) -> None:
        """Pad the last sample of an epoch, which has ``num_tokens`` tokens; its last token gets no label."""
        if labels is not None:
            labels[0, : num_tokens - 1], labels[0, num_tokens - 1 :] = tokens[0, 1:num_tokens], IGNORED_LABEL
        tokens[0, num_tokens:] = self.pad_id
        if doc_ids is not None:
            doc_ids[0, num_tokens:] = -1


def require_dtype(dtype: torch.dtype, pad_id: int | None) -> None:
    """Raise ``ValueError`` if a packer has no samples of ``dtype``, or if they cannot be padded with ``pad_id``."""
    if dtype not in list(DTYPES):
        raise ValueError(f"dtype={dtype}: give one of {list(DTYPES)}.")
    if pad_id is None:
        return
    limits = torch.iinfo(dtype)
    if not limits.min <= pad_id <= limits.max:
        raise ValueError(f"pad_id={pad_id} does not fit {dtype}: give a token from {limits.min} to {limits.max}.")


def _check_arguments(seq_len: int, last: str) -> None:
    if seq_len < 1:
        raise ValueError(f"seq_len={seq_len}: give the tokens of a sample, at least 1.")
    if last not in ("drop", "pad"):
        raise ValueError(f"last={last!r}: give 'drop' or 'pad', for the last, partial sample of an epoch.")
