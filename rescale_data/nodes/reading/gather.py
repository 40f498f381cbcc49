"""The functions of `kernel.c`, and its `TokenQueue`, with checks and types: most of them make samples from `Spans`.

spans    | document | document | mark | document |        places in memory
queue    |b document e b document e     b document e|     with bos and eos around each; nothing is copied yet
samples      |  row 0  |  row 1  |  ...                   copied and widened once, into the batch
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from rescale_data.errors import DataStateError, require_int
from rescale_data.nodes.reading.extension import kernel
from rescale_data.nodes.reading.spans import EMPTY_SPANS, PositionUpdates, Spans, TokenArray
from rescale_data.order import FragmentOrder, ShardOrder
from rescale_data.sources.decoded.cache import ReferencedCostlyValue
from rescale_data.state import Ints

IntRows: TypeAlias = npt.NDArray[np.integer[Any]]
"""Rows of a batch: ``[b, seq_len]``, int64 or int32."""
BEYOND_END_MESSAGE = (
    "the position is behind the end of its document: the data is not what it was when the position was saved"
)


@dataclass(frozen=True)
class SpecialTokens:
    """The bos and eos tokens to put around each document, and the dtype of tokens in a batch.

    Args:
        eos_id, bos_id: Tokens to put after and before each document; `None` for nothing.
        dtype: int64 or int32.
    """

    eos_id: int | None
    bos_id: int | None
    dtype: np.dtype[Any]

    def __post_init__(self) -> None:
        for name in ("eos_id", "bos_id"):
            token = getattr(self, name)
            if token is not None:
                require_int(**{name: token})
            if token is not None and not 0 <= token <= np.iinfo(self.dtype).max:
                raise ValueError(
                    f"{name}={token}: give a token from 0 to {np.iinfo(self.dtype).max}, or None for no such token."
                )

    @property
    def tokens(self) -> list[int]:
        """The eos and bos tokens between two documents."""
        return [token for token in (self.eos_id, self.bos_id) if token is not None]

    def num_tokens(self, spans: Spans) -> int:
        """Return the number of tokens of all documents, including their bos and eos tokens."""
        return int(spans.length.sum()) + len(self.tokens) * int(np.count_nonzero(spans.array >= 0))

    def lengths(self, spans: Spans) -> Ints:
        """Return ``int64[D]``, the length of each document with bos and eos; 0 for a mark, which only moves the position."""
        return np.where(spans.array < 0, 0, spans.length + len(self.tokens))

    def documents_with_tokens(self, spans: Spans) -> Spans:
        """Return the documents that have tokens, bos and eos counted."""
        return spans.take(np.flatnonzero(self.lengths(spans)))

    def documents_within(self, spans: Spans, num_tokens: int) -> Spans:
        """Return the documents that begin within the first ``num_tokens`` tokens of some documents."""
        return spans[: int(np.cumsum(self.lengths(spans)).searchsorted(num_tokens)) + 1]


class TokenQueue(kernel.TokenQueue, ReferencedCostlyValue):
    """Documents from which `fill` draws samples. A draw advances the position that the queue was made with.

    Args:
        special_tokens: The tokens around each document.
        position: int64 slots: an offset in the first document, and the position from which documents are read.
        on_drop: Called when the cache drops the token queue.

    Attributes:
        nbytes: Bytes that the queue keeps alive, set by the caller of `append`.
        end_position: The position behind all of its documents, without the offset.
        left: Number of tokens not drawn yet; negative if the position is within a document that has not been appended yet.
    """

    __slots__ = ("end_position", "nbytes", "on_dropped")

    def __new__(
        cls, special_tokens: SpecialTokens, position: memoryview, on_drop: Callable[[], None] = lambda: None
    ) -> Self:
        end_position = np.array(position[1:], dtype=np.int64).data
        bos, eos = (-1 if token is None else token for token in (special_tokens.bos_id, special_tokens.eos_id))
        queue = super().__new__(cls, position, end_position, bos, eos)
        queue.on_dropped, queue.end_position, queue.nbytes = on_drop, end_position, 0
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


def fill(queues: list[Any], first_row: int, tokens: IntRows, labels: IntRows | None, doc_ids: IntRows | None) -> int:
    """Write the next sample of each token queue into its row of the batch, from row ``first_row`` on, and advance the queues.

    It stops at a missing token queue, and at a token queue with too few tokens: a sample, and with labels one token more.

    Returns:
        The first row that was not written.
    """
    try:
        return kernel.TokenQueue.fill(queues, first_row, tokens, labels, doc_ids)
    except OverflowError as error:
        queue: TokenQueue = queues[error.args[0]]
        _require_tokens_fit(queue.rest(), tokens.dtype)
        raise


def rows_of_window(order: ShardOrder, epoch: int, row: int, fragments: FragmentOrder | None) -> Ints:
    """Return ``order.rows(epoch, row, fragments)``, computed in C if the rows are permuted in windows."""
    if order.permutes_all_rows or not order.window:
        return order.rows(epoch, row, fragments)
    first_row, stop_row = order.window_bounds(row)
    rows = np.empty(stop_row - first_row, dtype=np.int64)
    starts, row_starts = None, None
    if fragments is not None:
        starts = np.ascontiguousarray(fragments.starts_in_order)
        row_starts = np.ascontiguousarray(fragments.fragment_starts)
    kernel.permute(order.shard_start + first_row, order.permutation_key(epoch, first_row), starts, row_starts, rows)
    return rows


def copy_documents(array: TokenArray, start: Ints, length: Ints) -> TokenArray:
    """Return a copy of documents of one array, concatenated."""
    destination = np.empty(int(length.sum()), dtype=array.dtype)
    kernel.join(array.itemsize, array, np.ascontiguousarray(start), np.ascontiguousarray(length), destination)
    return destination


def fragments_of(rows: Ints, fragment_starts: Ints) -> tuple[list[int], Ints]:
    """Return the fragments that hold the rows, sorted, and for each row the index of its fragment in that list.

    Args:
        rows: ``int64[n]``.
        fragment_starts: ``int64[F + 1]``, the first row of each fragment.
    """
    fragment_index = np.empty_like(rows)
    return kernel.find(rows, fragment_starts, fragment_index), fragment_index


def offsets_and_lengths(rows: Ints, fragment: Ints, first_row: Sequence[int], offsets: list[Ints]) -> tuple[Ints, Ints]:
    """Return the offset of each row in the values of its fragment, and the length of each row.

    Args:
        rows, fragment: Rows, and the index of each row's fragment, as in `fragments_of`.
        first_row: For each fragment, the row at which its offsets begin.
        offsets: ``int64`` offsets of each fragment.
    """
    start, length = np.empty_like(rows), np.empty_like(rows)
    kernel.cut(rows, fragment, np.array(first_row, dtype=np.int64), start, length, *offsets)
    return start, length


def interleave_documents(
    sources: Ints, spans: Spans, first_indices: Ints, num_drawn: int, counts_by_slot: Sequence[tuple[int, list[int]]]
) -> Spans:
    """Return documents in the order of their draws, with position updates that also count the draws.

    Args:
        sources: The source of each draw.
        spans: The next documents of all these sources, source by source, with moves of the mixture's row.
        first_indices: Index in ``spans`` of the first document of each source.
        num_drawn: Number of draws before these.
        counts_by_slot: The result of `MixtureRow.slot_counts`: first slot and values of the numbers of documents, and by tokens
            also of the numbers of tokens.
    """
    moves, num_draws = spans.moves, len(sources)
    slots, counts = np.array([slot for slot, _ in counts_by_slot]), np.array([count for _, count in counts_by_slot])
    document_index, ends = np.empty(num_draws, dtype=np.int64), np.empty(num_draws + 1, dtype=np.int64)
    new_slots, new_values = np.empty((2, len(moves.slot) + num_draws * (1 + len(slots))), dtype=np.int64)
    arrays = (sources, first_indices.copy(), spans.length, moves.ends, moves.slot, moves.slot_values, slots, counts)
    kernel.interleave(num_drawn, *map(np.ascontiguousarray, arrays), document_index, ends, new_slots, new_values)
    return spans.take(document_index, PositionUpdates(ends, new_slots[: ends[-1]], new_values[: ends[-1]]))


def join_documents(spans: Spans, special_tokens: SpecialTokens) -> tuple[TokenArray, Ints]:
    """Return the concatenated documents with bos and eos tokens, and ``int64[D + 1]``, the offset of each document.

    The dtype is the stored one if it holds all tokens.
    """
    ends = np.concatenate([[0], np.cumsum(special_tokens.lengths(spans))])
    dtypes = {array.dtype for array in spans.arrays}
    _require_tokens_fit(spans, special_tokens.dtype)
    dtype = dtypes.pop() if len(dtypes) == 1 else special_tokens.dtype
    dtype = special_tokens.dtype if any(token > np.iinfo(dtype).max for token in special_tokens.tokens) else dtype
    views = [v if v.format == dtype.char else np.asarray(v).astype(dtype).data for v in spans.document_views()]
    separator = np.array(special_tokens.tokens, dtype=dtype).tobytes()
    # One join of [nothing, the documents, nothing]: an eos too many at the front and a bos too many at the end.
    tokens = np.frombuffer(separator.join((b"", *views, b"")), dtype=dtype)
    num_leading_eos = int(special_tokens.eos_id is not None)
    return tokens[num_leading_eos : num_leading_eos + int(ends[-1])], ends


def _require_tokens_fit(spans: Spans, dtype: np.dtype[Any]) -> None:
    """Raise ``ValueError`` if a token of the documents is out of range for ``dtype``."""
    if all(np.can_cast(array.dtype, dtype) for array in spans.arrays):
        return
    views = [np.asarray(view) for view in spans.document_views() if len(view)]
    low, high = min((int(view.min()) for view in views), default=0), max((int(view.max()) for view in views), default=0)
    if low < np.iinfo(dtype).min or high > np.iinfo(dtype).max:
        raise ValueError(f"The tokens from {low} to {high} do not fit {dtype}: give a wider dtype.")
