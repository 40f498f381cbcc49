"""The functions of `kernel.c`, and the same in NumPy: most of them make samples from `Spans`.

    spans    | document | document | mark | document |        places in memory
    queue    |b document e b document e     b document e|     with bos and eos around each; nothing is copied yet
    samples      |  row 0  |  row 1  |  ...                   copied and widened once, into the batch

C does this if the kernel was built with the package. Otherwise NumPy does it, with the same result, by copying twice.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache as once
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from rescale_data.errors import DataStateError, require_int
from rescale_data.nodes.reading.spans import EMPTY_SPANS, NO_UPDATES, Spans, TokenArray
from rescale_data.order import FragmentOrder, ShardOrder
from rescale_data.sources.decoded.cache import UserHeldValue
from rescale_data.state import Ints

KERNEL_VERSION = 4
"""Version of the extension (`kernel.c` and `draws.c`) that this package calls. An extension of another version is not used."""

try:
    from rescale_data.nodes.reading import kernel
except ImportError:  # built without a compiler
    kernel = None


def module_if_current(module: Any) -> Any:
    """Return the C extension ``module`` if it has the version that this package needs, else `None`."""
    return module if getattr(module, "VERSION", 0) == KERNEL_VERSION else None


_is_old = kernel is not None and module_if_current(kernel) is None
kernel = module_if_current(kernel)

IntRows: TypeAlias = npt.NDArray[np.integer[Any]]
"""Rows of a batch: ``[b, seq_len]``, int64 or int32."""

_log = logging.getLogger("rescale_data")


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
        """Return ``int64[D]``, the length of each document including its bos and eos tokens; 0 for a mark."""
        return np.where(spans.array < 0, 0, spans.length + len(self.tokens))

    def documents_with_tokens(self, spans: Spans) -> Spans:
        """Return the documents that have tokens, bos and eos counted."""
        return spans.take(np.flatnonzero(self.lengths(spans)))


def token_queue(
    special_tokens: SpecialTokens, position: memoryview, on_drop: Callable[[], None] = lambda: None
) -> TokenQueue:
    """Return an empty token queue, of the C class if the extension is available.

    Args:
        special_tokens: The tokens around each document.
        position: int64 slots: an offset in the first document, and the position from which documents are read.
        on_drop: Called when the cache drops the token queue.
    """
    return (TokenQueue if kernel is None else _native_queue_type(kernel.TokenQueue))(special_tokens, position, on_drop)


def fill(queues: list[Any], first_row: int, tokens: IntRows, labels: IntRows | None, doc_ids: IntRows | None) -> int:
    """Write the next sample of each token queue into its row of the batch, from row ``first_row`` on, and advance the queues.

    It stops at a missing token queue, and at a token queue with too few tokens: a sample, and with labels one token more.

    Returns:
        The first row that was not written.
    """
    if kernel is None:
        while first_row < len(queues) and _draw_sample(queues[first_row], first_row, tokens, labels, doc_ids):
            first_row += 1
        return first_row
    try:
        return kernel.fill(queues, first_row, tokens, labels, doc_ids)
    except OverflowError as error:
        queue: TokenQueue = queues[error.args[0]]
        _require_fit(queue.rest(), tokens.dtype)
        raise


def rows_around(order: ShardOrder, epoch: int, row: int, fragments: FragmentOrder | None) -> Ints:
    """Return ``order.rows(epoch, row, fragments)``, computed in C if possible."""
    if kernel is None or order.permutes_all_rows or not order.window:
        return order.rows(epoch, row, fragments)
    first_row, stop_row = order.window_bounds(row)
    rows = np.empty(stop_row - first_row, dtype=np.int64)
    virtual, first_rows = None, None
    if fragments is not None:
        virtual, first_rows = np.ascontiguousarray(fragments.virtual_starts), np.ascontiguousarray(fragments.first)
    kernel.permute(order.permutation_key(epoch, first_row), order.range_start + first_row, virtual, first_rows, rows)
    return rows


def copy_documents(array: TokenArray, start: Ints, length: Ints) -> TokenArray:
    """Return a copy of documents of one array, concatenated."""
    if kernel is None:
        spans = Spans((array,), np.zeros_like(start), start, length, NO_UPDATES, (None,))
        return np.frombuffer(b"".join(spans.document_views()), dtype=array.dtype)
    destination = np.empty(int(length.sum()), dtype=array.dtype)
    kernel.join(array, np.ascontiguousarray(start), np.ascontiguousarray(length), destination)
    return destination


def fragments_of(rows: Ints, fragment_starts: Ints) -> tuple[list[int], Ints]:
    """Return the fragments that hold the rows, sorted, and for each row the index of its fragment in that list.

    Args:
        rows: ``int64[n]``.
        fragment_starts: ``int64[F + 1]``, the first row of each fragment.
    """
    if kernel is None:
        fragment_of_row = np.searchsorted(fragment_starts, rows, side="right") - 1
        fragments = np.unique(fragment_of_row)
        return fragments.tolist(), np.searchsorted(fragments, fragment_of_row)
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
    if kernel is not None:
        kernel.cut(rows, fragment, np.array(first_row, dtype=np.int64), offsets, start, length)
        return start, length
    for fragment_number, (fragment_begin, ends) in enumerate(zip(first_row, offsets, strict=True)):
        row_indices = np.flatnonzero(fragment == fragment_number)
        local_rows = rows[row_indices] - fragment_begin
        start[row_indices], length[row_indices] = ends[local_rows], ends[local_rows + 1] - ends[local_rows]
    return start, length


def join_documents(spans: Spans, special_tokens: SpecialTokens) -> tuple[TokenArray, Ints]:
    """Return the concatenated documents with bos and eos tokens, and ``int64[D + 1]``, the offset of each document.

    The dtype is the stored one if it holds all tokens.
    """
    ends = np.concatenate([[0], np.cumsum(special_tokens.lengths(spans))])
    dtypes = {array.dtype for array in spans.arrays}
    _require_fit(spans, special_tokens.dtype)
    dtype = dtypes.pop() if len(dtypes) == 1 else special_tokens.dtype
    dtype = special_tokens.dtype if any(token > np.iinfo(dtype).max for token in special_tokens.tokens) else dtype
    views = [v if v.format == dtype.char else np.asarray(v).astype(dtype).data for v in spans.document_views()]
    separator = np.array(special_tokens.tokens, dtype=dtype).tobytes()
    # One join of [nothing, the documents, nothing]: an eos too many at the front and a bos too many at the end.
    tokens = np.frombuffer(separator.join((b"", *views, b"")), dtype=dtype)
    num_front = int(special_tokens.eos_id is not None)
    return tokens[num_front : num_front + int(ends[-1])], ends


def log_if_no_kernel() -> None:
    """Log, once, that packing uses the slower NumPy code because the C extension is not available."""
    if kernel is None:
        _log_no_kernel()


@once
def _log_no_kernel() -> None:
    reason, remedy = "was installed without a C compiler", "Install it again where there is a compiler."
    if _is_old:
        reason, remedy = (
            "has a C extension of another version",
            "Rebuild it: python setup.py build_ext --inplace, or install again.",
        )
    _log.log(
        logging.WARNING if _is_old else logging.INFO,
        "rescale_data %s: packing goes through NumPy, with the same samples, at about half the speed. %s",
        reason, remedy
    )  # fmt: skip


@once
def _native_queue_type(base: Any) -> Any:
    """Return a subclass of ``base``, the token queue class of the C extension, whose objects the cache can hold."""

    class Native(base, UserHeldValue):
        __slots__ = ("nbytes", "on_dropped", "reach")

        def __new__(cls, special_tokens: SpecialTokens, position: memoryview, on_drop: Callable[[], None]) -> Any:
            end_position = np.array(position[1:], dtype=np.int64).data
            bos, eos = (-1 if token is None else token for token in (special_tokens.bos_id, special_tokens.eos_id))
            queue = super().__new__(cls, position, end_position, bos, eos)
            queue.on_dropped, queue.reach, queue.nbytes = on_drop, end_position, 0
            return queue

        def append(self, spans: Spans) -> None:
            moves = spans.moves
            numbers = (spans.array, spans.start, spans.length, moves.ends, moves.slot, moves.slot_values)
            try:
                super().append(spans.arrays, *map(np.ascontiguousarray, numbers), spans)
            except ValueError as error:
                raise DataStateError(str(error)) from None

        def rest(self) -> Spans:
            first_part, *other_parts = self.parts or [EMPTY_SPANS]
            return Spans.join([first_part[self.document :], *other_parts])

    return Native


class TokenQueue(UserHeldValue):
    """Concatenated documents from which samples are drawn. A draw advances the position that the queue was made with.

    This class does it in NumPy. The C class `kernel.TokenQueue` has the same methods and results.

    Attributes:
        nbytes: Bytes that the queue keeps alive, set by the caller of `append`.
        reach: The position behind all of its documents, without the offset.
    """

    def __init__(self, special_tokens: SpecialTokens, position: memoryview, on_drop: Callable[[], None]) -> None:
        self.nbytes, self.on_dropped = 0, on_drop
        self.reach = np.array(position[1:], dtype=np.int64).data
        self._special_tokens, self._position, self._spans, self._document = special_tokens, position, EMPTY_SPANS, 0
        self.tokens: TokenArray = np.zeros(0, dtype=np.int8)
        self._starts = np.zeros(1, dtype=np.int64)
        self._offset, self._is_used = position[0], False

    @property
    def left(self) -> int:
        """Number of tokens not drawn yet; negative if the position is within a document that has not been appended yet."""
        return len(self.tokens) - self._offset

    def append(self, spans: Spans) -> None:
        """Append documents to the queue.

        Raises:
            IndexError: A document is not within its array.
            ValueError: The offset is behind the end of the first document.
        """
        begin = int(self._starts[self._document])
        tokens, starts = join_documents(spans, self._special_tokens)
        self._spans = Spans.join([self.rest(), spans])
        self.tokens = np.concatenate([self.tokens[begin:], tokens])
        self._starts = np.concatenate([self._starts[self._document :] - begin, starts[1:] + (self._starts[-1] - begin)])
        self._document, self._offset = 0, self._offset - begin
        spans.move(self.reach, len(spans))
        if self._offset > self._starts[min(1, len(self._spans))]:
            raise DataStateError(BEYOND_END_MESSAGE)

    def rest(self) -> Spans:
        """Return the documents that still have tokens to draw."""
        return self._spans[self._document :]

    def was_used(self) -> bool:
        used, self._is_used = self._is_used, False
        return used

    def next(self, num_tokens: int) -> tuple[TokenArray, Ints]:
        """Return the next tokens and the indices at which documents end among them; advance the position."""
        start, stop = self._offset, self._offset + num_tokens
        stop_document = int(self._starts.searchsorted(stop))
        stop_document -= int(self._starts[stop_document] > stop)
        ends = self._starts[self._document + 1 : stop_document + 1] - start
        self._spans[self._document : stop_document].move(self._position[1:], stop_document - self._document)
        self._offset, self._document, self._position[0] = stop, stop_document, stop - int(self._starts[stop_document])
        self._is_used = True
        return self.tokens[start:stop], ends


def _draw_sample(queue: Any, row: int, tokens: IntRows, labels: IntRows | None, doc_ids: IntRows | None) -> bool:
    sample_length = tokens.shape[1]
    if not isinstance(queue, TokenQueue) or queue.left < sample_length + (labels is not None) or not sample_length:
        return False
    first_token = len(queue.tokens) - queue.left
    tokens[row], ends = queue.next(sample_length)
    if labels is not None:
        labels[row] = queue.tokens[first_token + 1 : first_token + sample_length + 1]
    if doc_ids is not None:
        begins_document = np.zeros(sample_length + 1, dtype=np.int64)
        begins_document[ends[ends > 0]] = 1  # a document that ends before the first token has no token here
        doc_ids[row] = np.cumsum(begins_document[:sample_length])
    return True


def _require_fit(spans: Spans, dtype: np.dtype[Any]) -> None:
    """Raise ``ValueError`` if a token of the documents is out of range for ``dtype``."""
    if all(np.can_cast(array.dtype, dtype) for array in spans.arrays):
        return
    views = [np.asarray(view) for view in spans.document_views() if len(view)]
    low, high = min((int(view.min()) for view in views), default=0), max((int(view.max()) for view in views), default=0)
    if low < np.iinfo(dtype).min or high > np.iinfo(dtype).max:
        raise ValueError(f"The tokens from {low} to {high} do not fit {dtype}: give a wider dtype.")


BEYOND_END_MESSAGE = (
    "the position is behind the end of its document: the data is not what it was when the position was saved"
)
