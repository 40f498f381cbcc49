"""`WholeDocumentPacker`: packs whole documents into samples of one length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import torch

from rescale_data.errors import DataStateError, checks_argument_types
from rescale_data.nodes.base import Node, View, bind_once, count_until_end
from rescale_data.nodes.batch_buffer import BatchBuffer, ColumnFormats, written_sample
from rescale_data.nodes.below import is_endless, source_names
from rescale_data.nodes.changing import apply_changes
from rescale_data.nodes.column import documents_of
from rescale_data.nodes.empty_draws import EmptyDrawLimit, limit_empty_epochs
from rescale_data.nodes.packing.columns import MASK, AlignedColumns, PayloadColumns
from rescale_data.nodes.packing.fit import LONG_COUNTERS, LongDocumentRule
from rescale_data.nodes.packing.packer import DTYPES, require_dtype
from rescale_data.nodes.packing.window import Window
from rescale_data.nodes.provenance import PROVENANCE
from rescale_data.nodes.reading.gather import SpecialTokens
from rescale_data.nodes.reading.spans import Spans
from rescale_data.nodes.sample_format import (
    BAD_STATE_MESSAGE,
    MAX_SAMPLES,
    Format,
    ParameterHistory,
    begin_format,
    formats,
    num_tokens,
)
from rescale_data.sources.decoded.cache import cache, owner_id
from rescale_data.state import Field, Ints, copy_of, counter

_EMITTED_SLOT, _PADDING_SLOT, _LONG_SLOT, _UNTRAINED_SLOT = 0, 1, 2, 3


class WholeDocumentPacker(Node[dict[str, Any]]):
    """Packs whole documents by best fit into samples of ``seq_len`` tokens.

    Documents are read in windows of ``window`` documents. The documents of a window share samples among themselves, and the
    rest of a sample is padding. The position holds the source's position at the beginning of the window, and the number of its
    samples that were yielded. A resume reads the window again. A window lies in the process's cache; a larger window pads less,
    and takes longer to resume. ``seq_len``, ``labels``, ``dtype``, ``max_documents`` and ``limits`` may change when a state is
    loaded: the rest of a window is then packed anew.

    Args:
        source: A node whose samples hold the tokens of a document under ``column``.
        column: The column of the tokens.
        seq_len: Tokens of a sample.
        eos_id: Token to put after each document, counted in its length; `None` for nothing.
        bos_id: Token to put before each document, counted in its length; `None` for nothing.
        window: Number of documents that are packed together.
        long: The rule for documents longer than ``seq_len``. "split" makes pieces of that length and a rest, "truncate" keeps
            the first tokens, "drop" leaves the document out. They are counted: ``split_documents``, ``truncated_documents`` or
            ``dropped_documents``.
        labels: Add ``"labels"``: the next token of the same document, -100 if there is none.
        dtype: ``torch.int64`` or ``torch.int32``, of tokens, positions, doc_ids and labels.
        max_documents: Most documents of a sample; default 64, or a 32nd of ``seq_len`` if that is more.
        pad_id: The token to pad with; default ``eos_id``, or 0.
        columns: Further columns of each sample with one value a token, ``{name: dtype}``, cut and packed with the tokens.
            Padding, eos and bos have the value 0. ``"loss_mask"``, ``torch.bool``, is true for tokens that are learned; an eos
            is learned if the token before it is. Documents that are packed without a learned token are counted
            (``untrained_documents``). With any columns, samples are read one at a time.
        pad_documents_to: Fill up each document to a multiple of this number; give 2 * cp for context parallel slices.
        cost: Add ``"cost": Int64[1]``, the sum of the squared lengths of the sample's documents.
        payload: Columns of any kind, which go whole with their document: images, references to them, ratings. Samples are then
            read one at a time, and the payload of a whole window is in memory at once.
        limits: For some columns of ``payload``, the most of a sample. A list or array counts its length, `None` counts 0, all
            else 1. A document that alone has more is an error; with ``long="drop"`` it is dropped and counted.

    Yields:
        | ``"tokens": Tensor[seq_len]``
        | ``"positions": Tensor[seq_len]``, the place of each token in its document, 0 for padding
        | ``"doc_ids": Tensor[seq_len]``, 0 for the first document of the sample, 1 for the second, ..., -1 for padding
        | ``"loss_mask": Bool[seq_len]``, true if the next token is of the same document and learned; else the label is -100
        | each of ``columns``: ``[seq_len]``
        | each of ``payload``: a list with the value of each document, in the order of ``doc_ids``; `None` for the later pieces
          of a document that was split. A batch has a list of these lists
        | ``"cu_seqlens": Int32[max_documents + 2]``: 0, the end of each document, and ``seq_len`` from there on, so the padding
          counts as a sequence; `rescale_data.flat_cu_seqlens` returns the form that flash attention takes

        Over a ``Reader(provenance=True)`` also ``"provenance"``, a line for each document.

    Raises:
        ValueError: An argument is out of range, or there is no such column.
        TypeError: The column does not hold lists of integers.
        DataStateError: Two whole epochs of an endless stream had no token.

    Example:
        >>> import rescale_data as rd
        >>> reader = rd.Reader([{"tokens": [1, 2, 3]}, {"tokens": [4, 5, 6]}, {"tokens": [7, 8]}], rd.Shard(), shuffle=False)
        >>> [sample["tokens"].tolist() for sample in rd.WholeDocumentPacker(reader, column="tokens", seq_len=5)]
        [[1, 2, 3, 7, 8], [4, 5, 6, 0, 0]]
    """

    PACKING_FIELDS: ClassVar[tuple[Field, ...]] = (
        Field(("emitted",), limits=(0, 2**63 - 1)),
        counter("padding"),
        counter("long"),
    )
    READS_AHEAD: ClassVar[bool] = True
    RESUME_UNIT = "window"
    UNTRAINED_FIELDS: ClassVar[tuple[Field, ...]] = (counter("untrained"),)
    """Additional field if there is a loss mask."""
    FORMAT: ClassVar[frozenset[str]] = frozenset({"seq_len", "labels", "dtype", "max_documents", "limits"})
    written_columns: ColumnFormats = MappingProxyType({})

    @checks_argument_types
    def __init__(
        self,
        source: Node[Any],
        *,
        column: str,
        seq_len: int,
        eos_id: int | None = None,
        bos_id: int | None = None,
        window: int = 256,
        long: LongDocumentRule = "split",
        labels: bool = False,
        dtype: torch.dtype = torch.int64,
        max_documents: int | None = None,
        pad_id: int | None = None,
        columns: Mapping[str, torch.dtype] = MappingProxyType({}),
        pad_documents_to: int = 1,
        cost: bool = False,
        payload: Sequence[str] = (),
        limits: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self.max_documents = max(64, seq_len // 32) if max_documents is None else max_documents
        _check_arguments(seq_len, window, self.max_documents, long)
        require_dtype(dtype, pad_id)
        if pad_documents_to < 1 or seq_len % pad_documents_to:
            raise ValueError(f"pad_documents_to={pad_documents_to}: give a number that divides seq_len={seq_len}.")
        names = ("tokens", "positions", "doc_ids", *["labels"] * labels)
        reserved, name = {*names, "labels", "cu_seqlens", "cost", PROVENANCE}, type(self).__name__
        self._aligned = AlignedColumns(columns, column, reserved, name)
        self._payload = PayloadColumns(payload, limits, {*reserved, *columns, MASK, column}, long=long, packer=name)
        self.pad_documents_to, self.cost = pad_documents_to, cost
        self.FIELDS = self.PACKING_FIELDS + (self.UNTRAINED_FIELDS if self._aligned.has_mask else ())
        super().__init__(source=source)
        self.column, self.seq_len, self.eos_id, self.bos_id, self.window = column, seq_len, eos_id, bos_id, window
        self.long, self.labels, self.dtype = long, labels, dtype
        self.pad_id = pad_id if pad_id is not None else eos_id or 0
        self._numpy_dtype = DTYPES[dtype]
        self.written_columns = {
            **{name: (seq_len, column_dtype) for name, column_dtype in self._aligned.dtypes.items()},
            **dict.fromkeys(names, (seq_len, self._numpy_dtype)),
            "loss_mask": (seq_len, np.dtype(np.bool_)),
            "cu_seqlens": (self.max_documents + 2, np.dtype(np.int32)),
            **({"cost": (1, np.dtype(np.int64))} if cost else {}),
        }
        child = self.children["source"]
        extractors = [column_group.extract_columns for column_group in (self._aligned, self._payload) if column_group]
        self._documents = documents_of(child, column, name, *extractors)
        special_tokens = SpecialTokens(eos_id, bos_id, self._numpy_dtype)
        self._new_window = partial(Window, special_tokens, long, pad_documents_to, self._aligned, self._payload)
        self._history: ParameterHistory = ()
        self._repeat = is_endless(child)
        self._cache_key = (owner_id(self), "window")
        self._draw_limit = EmptyDrawLimit(self)

    def seek(self) -> None:
        self._bookmark = self.position[self._slots("source")]
        self._is_cached = False  # true if the cached window is the one at the bookmark
        self._is_epoch_over = False

    def next(self) -> dict[str, Any]:
        return written_sample(self)

    def write(self, buffer: BatchBuffer, row_index: int) -> None:
        window = self._current_window()
        sample_number = self.position[_EMITTED_SLOT] & MAX_SAMPLES
        self._to_next_sample(window)
        window.write_row(buffer, row_index, sample_number, self.pad_id)

    def skip(self, num_samples: int) -> int:
        bind_once(self)
        return count_until_end(lambda: self._to_next_sample(self._current_window()), num_samples)

    def parameters(self) -> dict[str, Any]:
        arguments = ("column", "seq_len", "eos_id", "bos_id", "window", "long", "labels", "max_documents", "pad_id")
        used_options = self._payload.as_json  # only those in use
        if self._aligned:
            used_options["columns"] = self._aligned.as_json
        if self.pad_documents_to > 1:
            used_options["pad_documents_to"] = self.pad_documents_to
        return {**{name: getattr(self, name) for name in arguments}, "dtype": str(self.dtype), **used_options}

    def progress(self, rows: Ints, shards: Ints, samples: Ints) -> dict[str, float]:
        source_label = "+".join(source_names(self))
        total_tokens = num_tokens(self._history, samples, self.seq_len)
        num_padding = float(rows[:, _PADDING_SLOT].sum())
        return {
            f"tokens/{source_label}": total_tokens - num_padding,
            f"padding_share/{source_label}": num_padding / total_tokens if total_tokens else 0.0,
            LONG_COUNTERS[self.long]: float(rows[:, _LONG_SLOT].sum()),
            **({"untrained_documents": float(rows[:, _UNTRAINED_SLOT].sum())} if self._aligned.has_mask else {}),
        }

    def use_history(self, history: Sequence[tuple[int, Mapping[str, Any]]]) -> None:
        self._history = history

    def convert_sample_format(self, rows: Ints) -> None:
        begin_format(rows[:, _EMITTED_SLOT])

    # Windows

    def _current_window(self) -> Window:
        """Return the packed window that holds the next sample; raise `StopIteration` at the end of the epoch."""
        window: Window | None = cache().get(self._cache_key) if self._is_cached else None
        num_epochs = num_empty = 0
        while window is None and not self._is_epoch_over:
            window = self._pack_window()
            if window is None:
                self._documents.begin_next_epoch(self._bookmark)
                num_epochs += 1
                self._is_epoch_over = not self._repeat
            elif not window.samples:
                self._finish_window(window)
                window = None
                num_empty = self._draw_limit.count_empty_draws(num_empty)
            limit_empty_epochs(num_epochs)
        if window is None:
            raise StopIteration
        if not self._is_cached:
            if self.position[_EMITTED_SLOT] & MAX_SAMPLES >= len(window.samples):
                raise DataStateError(BAD_STATE_MESSAGE)
            cache().put(self._cache_key, window)
            self._is_cached = True
        return window

    def _to_next_sample(self, window: Window) -> None:
        sample_number = self.position[_EMITTED_SLOT] & MAX_SAMPLES
        self.position[_PADDING_SLOT] += self.seq_len - window.num_used_tokens(sample_number)
        self.position[_EMITTED_SLOT] += 1
        if sample_number + 1 == len(window.samples):
            self._finish_window(window)

    def _finish_window(self, window: Window) -> None:
        self._bookmark[:] = window.end_position
        self.position[_EMITTED_SLOT] = 0
        self.position[_LONG_SLOT] += window.num_long_docs
        if self._aligned.has_mask:
            self.position[_UNTRAINED_SLOT] += window.num_untrained_docs
        self._is_cached = False

    def _pack_window(self) -> Window | None:
        """Read and pack the window that begins at the node's position; return `None` if the epoch has ended."""
        apply_changes(self)
        position = copy_of(self._bookmark)
        spans = self._read_window(position)
        if not len(spans):
            return None
        present = Format(self.seq_len, self.max_documents, self._payload.limits)
        return self._new_window(spans, list(formats(self.position[_EMITTED_SLOT], self._history, present)), position)

    def _read_window(self, position: View) -> Spans:
        """Return the documents of one window, read from ``position``, which moves to the end of the window."""
        batches: list[Spans] = []
        num_left = self.window
        while num_left and len(spans := self._documents.read(position, num_left)):
            spans.move(position, len(spans))
            batches.append(spans)
            num_left -= len(spans)
        return Spans.join(batches)


def _check_arguments(seq_len: int, window: int, max_documents: int, long: str) -> None:
    for name, value in (("seq_len", seq_len), ("window", window), ("max_documents", max_documents)):
        if value < 1:
            raise ValueError(f"{name}={value}: give at least 1.")
    if long not in list(LONG_COUNTERS):
        raise ValueError(f"long={long!r}: give 'split', 'truncate' or 'drop', for documents longer than seq_len.")
