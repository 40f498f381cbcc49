"""`TokenStream`: draws the tokens of documents end to end, from any position on, a sample at a time."""

from __future__ import annotations

from contextlib import suppress
from typing import Any
from weakref import ref

from rescale_data.errors import DataStateError
from rescale_data.nodes.base import Node, View, copy_of
from rescale_data.nodes.bound import Bound, require_tokens
from rescale_data.nodes.changing import is_blocked, is_pending, pass_blocked, settle
from rescale_data.nodes.packing.aligned import Aligned, Values
from rescale_data.nodes.reading.documents import Documents
from rescale_data.nodes.reading.gather import BEHIND, Around, Rows, Stretch, fill, stretch
from rescale_data.nodes.reading.spans import MANY, Spans
from rescale_data.sources.decoded.cache import cache, owner_of

_FEW = 4  # few tokens are left: a quarter of those there were after the last read
_AHEAD = 8  # costly documents are read ahead by an eighth of the number read so far


class TokenStream:
    """Tokens from a position on, which is a row of ``[offset in the document | position of the documents]``.

    The documents that have been read, a `Stretch`, lie in the cache of the process; this object holds integers alone. A stretch
    that was evicted is made again from the position. The position is directly behind the last token, wherever stretches begin
    and end: documents without a token are passed on the way to the next token.

    Args:
        source: The node whose samples are documents.
        documents: The documents.
        around: The tokens around each document.
        num_tokens: Tokens of a sample.
        num_ahead: Number of tokens behind the sample that are looked at, and not consumed.
        repeat: True to go on with the next epoch after the last document of one.
        bound: Limits the number of documents without tokens.
        aligned: Columns alongside the tokens.
        says_where: True if documents come with their provenance.
    """

    def __init__(
        self,
        source: Node[Any],
        documents: Documents,
        around: Around,
        *,
        num_tokens: int,
        num_ahead: int,
        repeat: bool,
        bound: Bound,
        aligned: Aligned,
        says_where: bool,
    ) -> None:
        self._aligned, self.one_by_one = aligned, bool(aligned) or says_where
        self.values: Values = {}
        """Values of the columns alongside the tokens, for the last drawn sample and the tokens it looked ahead at."""
        self.num_untrained, self.cuts = 0, False
        """With a loss mask: the number of documents that ended untrained in that sample, and true if one that began in it goes
        on."""
        self._source, self._bound = source, bound
        self._documents, self._around, self._repeat = documents, around, repeat
        self._num_tokens, self._width = num_tokens, num_tokens + num_ahead
        self._key = (owner_of(self), "stretch")
        self._much = 0  # tokens left after documents were read last
        self.found: Stretch | None = None
        """The stretch that has been read, as long as the cache keeps it; used to draw from many streams at once."""
        self.where: list[str] = []
        """Provenance of the documents in the last drawn sample, if ``says_where``."""

    def bind(self, position: View, *, settles: bool) -> None:
        """Go on from ``position``, and keep it up to date.

        Args:
            position: An offset in a document, and the position of the documents.
            settles: True if changes between segments take effect at the beginning of a document (`settle`).
        """
        self._position, self._settles = position, settles
        self._num_read = self._num_gained = 0  # documents, and the tokens they had
        cache().forget(self._key)

    def draw(self, tokens: Rows, labels: Rows | None, doc_ids: Rows | None) -> int:
        """Write the next sample into the only row of each column; at the end of an epoch, write the tokens that are left.

        Returns:
            The number of tokens that were left for this, including tokens to look ahead at. If these are missing, no labels are
            written.
        """
        found = self._stretch()
        num_ready, offset = min(found.left, self._width), self._position[0]
        size, rest = min(num_ready, self._num_tokens), found.rest() if self.one_by_one else None
        if self._aligned and rest is not None:
            self.values = self._aligned.of_sample(rest, offset, num_ready, self._around)
        if num_ready == self._width:
            fill([found], 0, tokens, labels, doc_ids)
        elif size:
            fill([found], 0, tokens[:, :size], None, None if doc_ids is None else doc_ids[:, :size])
        if rest is not None:
            self._look_at(rest, len(rest) - len(found.rest()), begins=not offset)
        return num_ready

    def _look_at(self, rest: Spans, num_passed: int, *, begins: bool) -> None:
        """Note the effect of a sample on the documents that were left.

        Args:
            rest: The documents that were left before the sample.
            num_passed: Number of documents that ended in the sample.
            begins: True if the sample begins with a document's first token.
        """
        is_within = self._position[0] > 0
        if self._aligned.has_mask:
            self.num_untrained = self._aligned.num_untrained(rest[:num_passed], self._around)
            self.cuts = is_within and (num_passed > 0 or begins)
        if rest.where is not None:
            self._say_where(rest[: num_passed + is_within])

    def turn(self) -> None:
        """Move to the beginning of the next epoch, after `draw` has found the end of this one."""
        self._documents.turn(self._position[1:])
        self._position[0] = 0
        cache().forget(self._key)

    def read_ahead(self) -> None:
        """Read more documents if few tokens are left: to read for many streams in a row costs less than at separate times."""
        found = self.found
        if found is None or self._settles or found.left > self._much // _FEW or self._much < _FEW * self._width:
            return
        with suppress(Exception):  # the error comes again when these documents are needed
            self._grow(found, found.left + 1)

    def _stretch(self) -> Stretch:
        """Return a stretch with a whole sample, unless the epoch ends."""
        if self.found is None or self.found.left < self._width:
            found = self.found or self._begin()
            self._grow(found, self._width)
            return found
        return self.found

    def _grow(self, found: Stretch, num_tokens: int) -> None:
        self._extend(found, num_tokens)
        self._much = found.left
        cache().forget(self._key)
        self.found = found
        cache().put(self._key, found)

    def _begin(self) -> Stretch:
        if self._position[0] and is_blocked(self._source, self._position[1:]):
            self._position[0] = 0  # the document ends here
        this: ref[TokenStream] = ref(self)
        found = stretch(self._around, self._position, lambda: _forget(this))
        before = copy_of(found.reach)
        if not self._position[0]:  # so that the position points at the first document itself
            pass_blocked(self._source, found.reach)
        if found.reach != before:
            found.append(Spans.mark(before, found.reach))
        return found

    def _extend(self, found: Stretch, num_tokens: int) -> None:
        """Append documents to a stretch until it has ``num_tokens`` tokens left, or the epoch ends."""
        position = found.reach
        num_turns = misses = 0
        found.nbytes = position.nbytes
        while found.left < num_tokens:
            waits = found.left < 0  # within a document, which goes on as it began
            if self._settles and not waits:
                waits = self._settle(found)
            most = 1 if self._settles and waits else self._num_documents(num_tokens - found.left)
            spans = self._documents.read(position, most)
            if not len(spans):
                if not self._repeat:
                    break
                spans, num_turns = self._turned(position, num_turns), num_turns + 1
            before = found.left
            found.append(spans)
            found.nbytes += spans.nbytes
            gained = found.left > before
            self._num_read, self._num_gained = self._num_read + len(spans), self._num_gained + found.left - before
            num_turns = 0 if gained else num_turns
            misses = 0 if gained else self._bound.missed(misses, position, len(spans))
        if found.left < 0:
            raise DataStateError(BEHIND)

    def _num_documents(self, num_tokens: int) -> int:
        """Return the number of documents to request for ``num_tokens`` missing tokens: rather too few, if they are costly."""
        if not self._documents.is_costly:
            return MANY
        needed = num_tokens * self._num_read // max(1, self._num_gained)
        return max(1, self._num_read // _AHEAD + min(needed, self._num_read))

    def _settle(self, found: Stretch) -> bool:
        """Let changes take effect here, as a mark; return true if a change waits for the next document."""
        before = copy_of(found.reach)
        settle(self._source, found.reach)
        pass_blocked(self._source, found.reach)
        if found.reach != before:
            found.append(Spans.mark(before, found.reach))
        return is_pending(self._source, found.reach)

    def _turned(self, position: View, num_turns: int) -> Spans:
        require_tokens(num_turns)
        after = copy_of(position)
        self._documents.turn(after)
        return Spans.mark(position, after)

    def _say_where(self, there: Spans) -> None:
        has_tokens = self._around.lengths(there) > 0
        self.where = [name for name, counts in zip(there.where or (), has_tokens.tolist(), strict=True) if counts]


def _forget(stream: ref[TokenStream]) -> None:
    found = stream()
    if found is not None:
        found.found = None
