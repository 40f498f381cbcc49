"""`TokenStream`: draws samples of one length from the concatenated tokens of documents, from any position on."""

from __future__ import annotations

from contextlib import suppress
from typing import Any
from weakref import ref

from rescale_data.errors import DataStateError
from rescale_data.nodes.base import Node, View
from rescale_data.nodes.changing import apply_changes_at, is_node_change_due, is_on_blocklist, skip_blocked_rows
from rescale_data.nodes.empty_draws import EmptyDrawLimit, limit_empty_epochs
from rescale_data.nodes.reading.documents import DocumentReader
from rescale_data.nodes.reading.gather import BEYOND_END_MESSAGE, IntRows, SpecialTokens, TokenQueue, fill
from rescale_data.nodes.reading.spans import UNLIMITED_DOCUMENTS, Spans
from rescale_data.sources.decoded.cache import cache, owner_id
from rescale_data.state import copy_of

_REFILL_DIVISOR = 4  # few tokens are left: a quarter of those there were after the last read
_READ_AHEAD_DIVISOR = 8  # costly documents are read ahead by an eighth of the number read so far


class TokenStream:
    """Concatenated tokens of documents, drawn sample by sample.

    The position is a row of ``[offset in the document | position of the documents]``.

    The documents that have been read, a `TokenQueue`, lie in the cache of the process; this object holds integers alone. A
    token queue that was evicted is made again from the position. The position is directly behind the last token, wherever token
    queues begin and end: documents without a token are passed on the way to the next token.

    Args:
        source: The node whose samples are documents.
        documents: The documents.
        special_tokens: The tokens around each document.
        tokens_per_sample: Tokens of a sample.
        num_tokens_ahead: Number of tokens behind the sample that are looked at, and not consumed.
        repeat: True to go on with the next epoch after the last document of one.
        draw_limit: Limits the number of documents without tokens.
    """

    def __init__(
        self,
        source: Node[Any],
        documents: DocumentReader,
        special_tokens: SpecialTokens,
        *,
        tokens_per_sample: int,
        num_tokens_ahead: int,
        repeat: bool,
        draw_limit: EmptyDrawLimit,
    ) -> None:
        self._source, self._draw_limit = source, draw_limit
        self._documents, self._special_tokens, self._repeat = documents, special_tokens, repeat
        self._tokens_per_sample, self._num_tokens_needed = tokens_per_sample, tokens_per_sample + num_tokens_ahead
        self._cache_key = (owner_id(self), "queue")
        self._num_after_read = 0  # tokens left after documents were read last
        self.queue: TokenQueue | None = None
        """The token queue that has been read, as long as the cache keeps it; used to draw from many streams at once."""

    def bind(self, position: View, *, node_may_change: bool) -> None:
        """Continue from ``position``; each draw then updates this array in place.

        Args:
            position: An offset in a document, and the position of the documents.
            node_may_change: True if changes between segments take effect at the beginning of a document (`apply_changes_at`).
        """
        self._position, self._node_may_change = position, node_may_change
        self._num_documents_read = self._num_tokens_read = 0  # documents, and the tokens they had
        self._forget_queue()

    def draw_sample(self, tokens: IntRows, labels: IntRows | None, doc_ids: IntRows | None) -> int:
        """Write the next sample into arrays with one row; at the end of an epoch, write the remaining tokens.

        Returns:
            The number of tokens that were left for this, including tokens to look ahead at. If these are missing, no labels are
            written.
        """
        queue = self._filled_queue()
        num_ready = min(queue.left, self._num_tokens_needed)
        num_drawn = min(num_ready, self._tokens_per_sample)
        if num_ready == self._num_tokens_needed:
            fill([queue], 0, tokens, labels, doc_ids)
        elif num_drawn:
            fill([queue], 0, tokens[:, :num_drawn], None, None if doc_ids is None else doc_ids[:, :num_drawn])
        return num_ready

    def documents_left(self) -> Spans:
        """Return the documents with tokens that are at hand for the next sample and for later ones."""
        return self._special_tokens.documents_with_tokens(self._filled_queue().rest())

    def begin_next_epoch(self) -> None:
        """Move to the beginning of the next epoch, after `draw_sample` has reached the end of the present one."""
        self._documents.begin_next_epoch(self._position[1:])
        self._position[0] = 0
        self._forget_queue()

    def _forget_queue(self) -> None:
        self.queue = None  # which the cache may not know: Ctrl-C can come between
        cache().forget(self._cache_key)

    def read_ahead(self) -> None:
        """Read more documents if few tokens are left; reading for many streams at once is cheaper than at separate times."""
        queue = self.queue
        if (
            queue is None
            or self._node_may_change
            or queue.left > self._num_after_read // _REFILL_DIVISOR
            or self._num_after_read < _REFILL_DIVISOR * self._num_tokens_needed
        ):
            return
        with suppress(Exception):  # the error comes again when these documents are needed
            self._refill(queue, queue.left + 1)

    def _filled_queue(self) -> TokenQueue:
        """Return a token queue that holds the next sample, or all remaining tokens of the epoch."""
        if self.queue is None or self.queue.left < self._num_tokens_needed:
            queue = self.queue or self._new_queue()
            self._refill(queue, self._num_tokens_needed)
            return queue
        return self.queue

    def _refill(self, queue: TokenQueue, num_tokens: int) -> None:
        self._extend(queue, num_tokens)
        self._num_after_read = queue.left
        cache().forget(self._cache_key)
        self.queue = queue
        cache().put(self._cache_key, queue)

    def _new_queue(self) -> TokenQueue:
        if self._position[0] and is_on_blocklist(self._source, self._position[1:]):
            self._position[0] = 0  # the document ends here
        stream_ref: ref[TokenStream] = ref(self)
        queue = TokenQueue(self._special_tokens, self._position, lambda: _forget_stream_queue(stream_ref))
        position_before = copy_of(queue.end_position)
        if not self._position[0]:  # so that the position points at the first document itself
            skip_blocked_rows(self._source, queue.end_position)
        if queue.end_position != position_before:
            queue.append(Spans.position_update_only(position_before, queue.end_position))
        return queue

    def _extend(self, queue: TokenQueue, num_tokens: int) -> None:
        """Append documents to a token queue until it has ``num_tokens`` tokens left, or the epoch ends."""
        position = queue.end_position
        num_epochs = num_empty = 0
        queue.nbytes = position.nbytes
        while queue.left < num_tokens:
            is_deferred = queue.left < 0  # within a document, which goes on as it began
            if self._node_may_change and not is_deferred:
                is_deferred = self._change_nodes(queue)
            max_documents = 1 if self._node_may_change and is_deferred else self._num_documents(num_tokens - queue.left)
            spans = self._documents.read(position, max_documents)
            if not len(spans):
                if not self._repeat:
                    break
                spans, num_epochs = self._skip_epoch_end(position, num_epochs), num_epochs + 1
            left_before = queue.left
            queue.append(spans)
            queue.nbytes += spans.nbytes
            has_read_tokens = queue.left > left_before
            self._num_documents_read += len(spans)
            self._num_tokens_read += queue.left - left_before
            num_epochs = 0 if has_read_tokens else num_epochs
            num_empty = 0 if has_read_tokens else self._draw_limit.count_empty_draws(num_empty, position, len(spans))
        if queue.left < 0:
            raise DataStateError(BEYOND_END_MESSAGE)

    def _num_documents(self, num_tokens: int) -> int:
        """Return the number of documents to request for ``num_tokens`` tokens; a low estimate if documents are costly."""
        if not self._documents.is_costly_to_read:
            return UNLIMITED_DOCUMENTS
        num_needed = num_tokens * self._num_documents_read // max(1, self._num_tokens_read)
        return max(1, self._num_documents_read // _READ_AHEAD_DIVISOR + min(num_needed, self._num_documents_read))

    def _change_nodes(self, queue: TokenQueue) -> bool:
        """Apply changes between segments (weights, blocklist) at the end of the queue; true if one must wait for a document."""
        position_before = copy_of(queue.end_position)
        apply_changes_at(self._source, queue.end_position)
        skip_blocked_rows(self._source, queue.end_position)
        if queue.end_position != position_before:
            queue.append(Spans.position_update_only(position_before, queue.end_position))
        return is_node_change_due(self._source, queue.end_position)

    def _skip_epoch_end(self, position: View, num_epochs: int) -> Spans:
        limit_empty_epochs(num_epochs)
        next_position = copy_of(position)
        self._documents.begin_next_epoch(next_position)
        return Spans.position_update_only(position, next_position)


def _forget_stream_queue(stream_ref: ref[TokenStream]) -> None:
    """Let a stream drop its token queue, if the stream still exists."""
    stream = stream_ref()
    if stream is not None:
        stream.queue = None
