"""`WholeDocumentPacker`: samples of documents that are not cut."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from rescale_data.errors import DataStateError, require_int
from rescale_data.nodes.aligned import MASK, Aligned, Values
from rescale_data.nodes.base import Node, View, copy_of
from rescale_data.nodes.bins import best_fit
from rescale_data.nodes.bound import Bound
from rescale_data.nodes.column import ColumnDocuments
from rescale_data.nodes.form import History, num_tokens
from rescale_data.nodes.guard import say_again
from rescale_data.nodes.packer import DTYPES, IGNORED, require_pad
from rescale_data.nodes.provenance import joined as joined_places
from rescale_data.nodes.reading.gather import Around, joined
from rescale_data.nodes.reading.spans import Spans, TokenArray
from rescale_data.nodes.tray import Tray
from rescale_data.sources.decoded.cache import cache, owner_of
from rescale_data.state import Field, Ints

Long: TypeAlias = Literal["split", "truncate", "drop"]
Piece: TypeAlias = tuple[int, int, int]
"""Of a document: where it begins and ends among the tokens of a window, and the document's number."""

_EMITTED, _PADDING, _LONG, _UNTRAINED = 0, 1, 2, 3
_DIGIT = 21  # bits of "emitted": samples of this window in the form of now, then, where it has changed, in those before
_MOST = 2**_DIGIT - 1
_COUNTED = {"split": "split_documents", "truncate": "truncated_documents", "drop": "dropped_documents"}
_SILENT_EPOCHS = 2
_BYTES_OF_A_PIECE = 250


@dataclass(frozen=True)
class Window:
    """Some documents in a row, and which of them share a sample.

    Args:
        tokens: Of all of them, end to end.
        pieces: Where each lies in ``tokens``, and its number.
        bins: The pieces of each sample.
        used: How many tokens each sample has.
        num_long: Documents longer than a sample.
        after: The position of the source after them.
        where: Where each document comes from, where that is asked for.
        values: Of the columns beside the tokens, end to end as these.
        num_untrained: Documents of which no token is learned.
    """

    tokens: TokenArray
    pieces: list[Piece]
    bins: list[list[int]]
    used: list[int]
    num_long: int
    after: View
    where: list[str]
    values: Values
    num_untrained: int

    @property
    def nbytes(self) -> int:
        return (
            self.tokens.nbytes
            + sum(values.nbytes for values in self.values.values())
            + _BYTES_OF_A_PIECE * (len(self.pieces) + len(self.where))
        )


class WholeDocumentPacker(Node[dict[str, Any]]):
    """Documents, each whole, packed by best fit into samples of ``seq_len`` tokens.

    Documents are taken in windows of ``window``; those of one window share samples among themselves, and the rest of a sample
    is padding. The position is that of the source at the beginning of the window and the samples of it that have been yielded:
    who resumes reads the window again. A window lies in the process's cache; a larger one pads less, and takes more to resume.
    ``seq_len``, ``labels``, ``dtype`` and ``max_documents`` may change when a state is loaded: what is left of a window is then
    packed anew.

    Args:
        source: A node whose samples hold the tokens of a document under ``column``.
        column: Which.
        seq_len: Tokens of a sample.
        eos_id: Put after each document, and counted in its length; `None` for nothing.
        bos_id: Put before each document.
        window: Documents that are packed together.
        long: Of documents longer than ``seq_len``: "split" into several of that length and a rest, "truncate" to their first
            tokens, or "drop". They are counted: ``split_documents``, ``truncated_documents`` or ``dropped_documents``.
        labels: Add ``"labels"``: the next token of the same document, -100 where there is none.
        dtype: ``torch.int64`` or ``torch.int32``, of all but the loss mask and the cumulative lengths.
        max_documents: Of one sample; default 64, or a 32nd of ``seq_len`` if that is more.
        pad_id: The token to pad with; default ``eos_id``, or 0.
        columns: What else each sample holds with one value a token, ``{name: dtype}``, cut and packed with the tokens; 0 where
            padded, and for eos and bos. ``"loss_mask"``, ``torch.bool``, says which tokens are learned, an eos as the token
            before it; documents without any are counted (``untrained_documents``). Samples are then read one at a time.
        pad_documents_to: Fill up each document to a multiple of this, of 2 * cp for context parallel slices.
        cost: Add ``"cost": Int64[1]``, the sum of the squared lengths of the sample's documents.

    Yields:
        | ``"tokens": Tensor[seq_len]``
        | ``"positions": Tensor[seq_len]``, of each token in its document, 0 where padded
        | ``"doc_ids": Tensor[seq_len]``, 0 for the first document of the sample, 1 for the second, ..., -1 where padded
        | ``"loss_mask": Bool[seq_len]``, whether the next token is of the same document, and learned; else the label is -100
        | each of ``columns``: ``[seq_len]``
        | ``"cu_seqlens": Int32[max_documents + 2]``: 0, the end of each document, and ``seq_len`` from there on, so what is
          padded counts as a sequence; `rescale_data.flat_cu_seqlens` makes of a batch what flash attention takes

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

    FIELDS: ClassVar[tuple[Field, ...]] = (
        Field(("emitted",)),
        Field(("padding",), counts=True),
        Field(("long",), counts=True),
    )
    READS_AHEAD: ClassVar[bool] = True
    UNTRAINED: ClassVar[Field] = Field(("untrained",), counts=True)
    """What is kept in addition where there is a loss mask."""
    FORM: ClassVar[frozenset[str]] = frozenset({"seq_len", "labels", "dtype", "max_documents"})

    def __init__(
        self,
        source: Node[Any],
        *,
        column: str,
        seq_len: int,
        eos_id: int | None = None,
        bos_id: int | None = None,
        window: int = 256,
        long: Long = "split",
        labels: bool = False,
        dtype: torch.dtype = torch.int64,
        max_documents: int | None = None,
        pad_id: int | None = None,
        columns: Mapping[str, torch.dtype] = MappingProxyType({}),
        pad_documents_to: int = 1,
        cost: bool = False,
    ) -> None:
        require_int(seq_len=seq_len, window=window, pad_documents_to=pad_documents_to)
        self.max_documents = max(64, seq_len // 32) if max_documents is None else max_documents
        _check(seq_len, window, self.max_documents, long, dtype)
        require_pad(pad_id, dtype)
        if pad_documents_to < 1 or seq_len % pad_documents_to:
            raise ValueError(f"pad_documents_to={pad_documents_to}: give a number that divides seq_len={seq_len}.")
        names = ("tokens", "positions", "doc_ids", *["labels"] * labels)
        self._aligned = Aligned(columns, column, {*names, "labels", "cu_seqlens", "cost"}, type(self).__name__)
        self.pad_documents_to, self.cost = pad_documents_to, cost
        super().__init__(source=source)
        self.column, self.seq_len, self.eos_id, self.bos_id, self.window = column, seq_len, eos_id, bos_id, window
        self.long, self.labels, self.dtype = long, labels, dtype
        self.pad_id = pad_id if pad_id is not None else eos_id or 0
        self._numpy_dtype = DTYPES[dtype]
        self.writes = {
            **{name: (seq_len, kind) for name, kind in self._aligned.dtypes.items()},
            **dict.fromkeys(names, (seq_len, self._numpy_dtype)),
            "loss_mask": (seq_len, np.dtype(np.bool_)),
            "cu_seqlens": (self.max_documents + 2, np.dtype(np.int32)),
            **({"cost": (1, np.dtype(np.int64))} if cost else {}),
        }
        child = self.children["source"]
        found = None if self._aligned else child.documents(column)
        self._documents = found or ColumnDocuments(child, column, type(self).__name__, self._aligned)
        self._around = Around(eos_id, bos_id, self._numpy_dtype)
        self._before: History = ()
        self._repeat = any(node.repeat for _, node in child.walk())
        self._key = (owner_of(self), "window")
        self._bound = Bound(self)

    def seek(self) -> None:
        self._bookmark = self.bookmark("source")
        self._read = False  # whether the cached window is the one at the bookmark
        self._over = False

    def next(self) -> dict[str, Any]:
        tray = Tray(self.writes, 1)
        self.write(tray, 0)
        return tray.sample()

    def write(self, tray: Tray, place: int) -> None:
        window = self._window()
        number = self.position[_EMITTED] & _MOST
        self._go_on(window)
        self._write(tray, place, window, window.bins[number])

    def skip(self, num_samples: int) -> None:
        for _ in range(num_samples):
            self._go_on(self._window())

    def settle(self, position: View) -> bool:
        return self.settle_within(position, _EMITTED)

    def parameters(self) -> dict[str, Any]:
        names = ("column", "seq_len", "eos_id", "bos_id", "window", "long", "labels", "max_documents", "pad_id")
        added: dict[str, Any] = {}  # where they are in use
        if self._aligned:
            added["columns"] = self._aligned.described
        if self.pad_documents_to > 1:
            added["pad_documents_to"] = self.pad_documents_to
        return {**{name: getattr(self, name) for name in names}, "dtype": str(self.dtype), **added}

    def progress(self, rows: Ints, shards: Ints, samples: Ints) -> dict[str, float]:
        names = "+".join(sorted({node.reads.name for _, node in self.walk() if node.reads is not None}))
        total, padding = num_tokens(self._before, samples, self.seq_len), float(rows[:, _PADDING].sum())
        return {
            f"tokens/{names}": total - padding,
            f"padding_share/{names}": padding / total if total else 0.0,
            _COUNTED[self.long]: float(rows[:, _LONG].sum()),
            **({"untrained_documents": float(rows[:, _UNTRAINED].sum())} if MASK in self._aligned.dtypes else {}),
        }

    def own_fields(self) -> tuple[Field, ...]:
        return (*self.FIELDS, self.UNTRAINED) if MASK in self._aligned.dtypes else self.FIELDS

    def adopt(self, history: Sequence[tuple[int, Mapping[str, Any]]]) -> None:
        self._before = history

    def reform(self, rows: Ints) -> None:
        if (rows[:, _EMITTED] >> (2 * _DIGIT)).any():
            raise DataStateError(
                "A third change of seq_len or max_documents within one window of a WholeDocumentPacker. Train on with the form "
                "before until the logical shards have begun their next windows."
            )
        rows[:, _EMITTED] <<= _DIGIT

    # Windows

    def _window(self) -> Window:
        """The window of the next sample; ends the epoch if need be."""
        window: Window | None = cache().get(self._key) if self._read else None
        num_turns = misses = 0
        while window is None and not self._over:
            window = self._pack()
            if window is None:
                self._documents.turn(self._bookmark)
                num_turns += 1
                self._over = not self._repeat
            elif not window.bins:
                self._leave(window)
                window = None
                misses = self._bound.missed(misses)
            if num_turns > _SILENT_EPOCHS:
                raise DataStateError(
                    f"A logical shard had no token in {_SILENT_EPOCHS} whole epochs: its documents are empty, filtered out or "
                    f"dropped. Check the column and the filters, or give fewer logical shards."
                )
        if window is None:
            raise StopIteration
        if not self._read:
            cache().put(self._key, window)
            self._read = True
        return window

    def _go_on(self, window: Window) -> None:
        number = self.position[_EMITTED] & _MOST
        self.position[_PADDING] += self.seq_len - window.used[number]
        self.position[_EMITTED] += 1
        if number + 1 == len(window.bins):
            self._leave(window)

    def _leave(self, window: Window) -> None:
        self._bookmark[:] = window.after
        self.position[_EMITTED] = 0
        self.position[_LONG] += window.num_long
        if MASK in window.values:
            self.position[_UNTRAINED] += window.num_untrained
        self._read = False

    def _pack(self) -> Window | None:
        """The window at the bookmark; `None` where the epoch has ended."""
        if self.position[_EMITTED] and not self.reread and self.children["source"].is_relisted(self._bookmark):
            say_again(self)
            self.position[_EMITTED] = 0
        if not (self.reread or self.position[_EMITTED]):
            self._documents.settle(self._bookmark)
        position = copy_of(self._bookmark)
        spans = self._documents_at(position)
        if not len(spans):
            return None
        tokens, starts = joined(spans, self._around)
        ends = starts[1:].tolist()
        bounds = list(zip([0, *ends[:-1]], ends, range(len(ends)), strict=True))
        pieces, bins, num_long = self._fit(bounds)
        used = [sum(pieces[i][1] - pieces[i][0] for i in items) for items in bins]
        values = self._aligned.end_to_end(spans, self._around) if self._aligned else {}
        learned = values.get(MASK)
        num_untrained = 0 if learned is None else sum(a < b and not learned[a:b].any() for a, b, _ in bounds)
        where = list(spans.where or ())
        return Window(tokens, pieces, bins, used, num_long, position, where, values, num_untrained)

    def _fit(self, pieces: list[Piece]) -> tuple[list[Piece], list[list[int]], int]:
        """Pack documents: in each form of which samples were yielded what the one before has left, then in that of now."""
        long: set[int] = set()
        bins: list[list[int]] = []
        for seq_len, max_documents, num_emitted in self._stages():
            long |= {document for start, stop, document in pieces if stop - start > seq_len}
            pieces = [part for piece in pieces for part in self._pieces(*piece, seq_len)]
            bins = best_fit([self._room(piece) for piece in pieces], seq_len, max_documents)
            if num_emitted:
                pieces = sorted(pieces[i] for items in bins[num_emitted:] for i in items)
        if len(bins) > _MOST:
            raise ValueError(f"A window has {len(bins)} samples, the most are {_MOST}. Give a smaller window.")
        return pieces, bins, len(long)

    def _stages(self) -> Iterator[tuple[int, int, int]]:
        """``(seq_len, max_documents, samples yielded)`` of the forms that this window was packed in."""
        for back in (2, 1):
            num_emitted = self.position[_EMITTED] >> (back * _DIGIT) & _MOST
            if num_emitted:
                form = self._before[-back][1]
                yield form["seq_len"], form["max_documents"], num_emitted
        yield self.seq_len, self.max_documents, 0

    def _documents_at(self, position: View) -> Spans:
        """The documents of a window from a position on, which moves behind them."""
        parts: list[Spans] = []
        left = self.window
        while left and len(spans := self._documents.read(position, left)):
            spans.move(position, len(spans))
            parts.append(spans)
            left -= len(spans)
        return Spans.join(parts)

    def _pieces(self, start: int, stop: int, document: int, step: int) -> list[Piece]:
        """What is packed of a document in samples of ``step`` tokens."""
        if stop - start <= step:
            return [(start, stop, document)] if stop > start else []
        if self.long == "split":
            return [(first, min(first + step, stop), document) for first in range(start, stop, step)]
        return [(start, start + step, document)] if self.long == "truncate" else []

    # Samples

    def _write(self, tray: Tray, place: int, window: Window, items: list[int]) -> None:
        pieces = [window.pieces[item] for item in items]
        lengths = np.array([self._room(piece) for piece in pieces])
        ends = np.cumsum(lengths)
        tokens = self._laid(window.tokens, pieces, self.pad_id)
        follows = np.zeros(len(tokens), dtype=np.bool_)  # whether the next token is learned
        follows[:-1] = self._learned(window, pieces)[1:]
        follows[ends - 1] = False
        tray.put("tokens", place, tokens, self.pad_id)
        tray.put("positions", place, np.arange(len(tokens)) - np.repeat(ends - lengths, lengths), 0)
        tray.put("doc_ids", place, np.repeat(np.arange(len(items)), lengths), -1)
        tray.put("loss_mask", place, follows, fill=False)
        tray.put("cu_seqlens", place, np.concatenate([[0], ends]), self.seq_len)
        if self.labels:
            following = np.where(follows, np.append(tokens[1:], tokens[:1]).astype(np.int64), IGNORED)
            tray.put("labels", place, following, IGNORED)
        for name in self._aligned.dtypes.keys() - {MASK}:
            tray.put(name, place, self._laid(window.values[name], pieces, 0), 0)
        if self.cost:
            tray.put("cost", place, np.array([np.square(lengths).sum()]), 0)
        if window.where:
            tray.where.append(joined_places(window.where[document] for _, _, document in pieces))

    def _room(self, piece: Piece) -> int:
        """Of a piece in a sample, filled up."""
        start, stop, _ = piece
        return -(-(stop - start) // self.pad_documents_to) * self.pad_documents_to

    def _laid(self, values: npt.NDArray[Any], pieces: list[Piece], fill: int) -> npt.NDArray[Any]:
        """The values of some pieces end to end, each filled up."""
        parts = [values[start:stop] for start, stop, _ in pieces]
        if self.pad_documents_to > 1:
            parts = [np.pad(part, (0, -len(part) % self.pad_documents_to), constant_values=fill) for part in parts]
        return np.concatenate(parts)

    def _learned(self, window: Window, pieces: list[Piece]) -> npt.NDArray[np.bool_]:
        """Whether each token of some pieces is learned; those that fill up are not."""
        return self._laid(window.values.get(MASK, np.ones(len(window.tokens), dtype=np.bool_)), pieces, 0)


def _check(seq_len: int, window: int, max_documents: int, long: str, dtype: torch.dtype) -> None:
    require_int(max_documents=max_documents)
    for name, value in (("seq_len", seq_len), ("window", window), ("max_documents", max_documents)):
        if value < 1:
            raise ValueError(f"{name}={value}: give at least 1.")
    if long not in _COUNTED:
        raise ValueError(f"long={long!r}: give 'split', 'truncate' or 'drop', for documents longer than seq_len.")
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype}: give one of {list(DTYPES)}.")
