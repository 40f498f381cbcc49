"""`TokenStream`: the tokens of documents end to end, from any position on, a sample at a time."""

from __future__ import annotations

from contextlib import suppress
from typing import Any
from weakref import ref

from rescale_data.errors import DataStateError
from rescale_data.nodes.base import Node, View, copy_of
from rescale_data.nodes.bound import Bound, require_tokens
from rescale_data.nodes.packing.aligned import Aligned, Values
from rescale_data.nodes.reading.documents import Documents
from rescale_data.nodes.reading.gather import BEHIND, Around, Rows, Stretch, fill, stretch
from rescale_data.nodes.reading.spans import MANY, Spans
from rescale_data.sources.decoded.cache import cache, owner_of

_FEW = 4  # a quarter of what there was when documents were read last
_AHEAD = 8  # of costly documents, at most an eighth of those that were read is read ahead


class TokenStream:
    """Tokens from ``position`` on, a row of ``[offset in the document | position of the documents]``.

    The documents that have been read, a `Stretch`, lie in the cache of the process; this holds integers alone. One that has
    been evicted is made again from the position. That is the one directly behind the last token, wherever stretches
    begin and end: documents without a token are passed on the way to the next one.

    Args:
        source: The node whose samples are documents.
        documents: The documents.
        around: What stands around each.
        num_tokens: Tokens of a sample.
        num_ahead: As many of those behind it are looked at, and not consumed.
        repeat: Whether to go on with the next epoch after the last document of one.
        aligned: Columns beside the tokens.
        says_where: Whether documents say where they come from.
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
        """Of the columns beside the tokens, for the sample that was drawn last and what it looked ahead at."""
        self.num_untrained, self.cuts = 0, False
        """With a loss mask: how many documents ended in that sample untrained, and whether one that began in it goes on."""
        self._source, self._bound = source, bound
        self._documents, self._around, self._repeat = documents, around, repeat
        self._num_tokens, self._width = num_tokens, num_tokens + num_ahead
        self._key = (owner_of(self), "stretch")
        self._much = 0  # tokens, when documents were read last
        self.found: Stretch | None = None
        """What has been read, as long as the cache keeps it; for who draws from many streams at once."""
        self.where: list[str] = []
        """Where the documents of the sample that was drawn last come from, if that is asked for."""

    def bind(self, position: View, *, settles: bool) -> None:
        """Go on from ``position``, and keep it up to date.

        Args:
            position: An offset in a document, and the position of the documents.
            settles: Whether what has changed between legs takes effect at the beginning of a document (`Node.settle`).
        """
        self._position, self._settles = position, settles
        self._num_read = self._num_gained = 0  # documents, and the tokens they had
        cache().forget(self._key)

    def draw(self, tokens: Rows, labels: Rows | None, doc_ids: Rows | None) -> int:
        """Write the next sample into the only row of each column; at the end of an epoch only as much of it as there is.

        Returns:
            The tokens that were there, with those looked ahead at. Without the latter there are no labels.
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
        """Note what a sample did to the documents that were left: so many have ended in it."""
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
        """Read on where little is left: streams that are read one after the other cost less than each in its time."""
        found = self.found
        if found is None or self._settles or found.left > self._much // _FEW or self._much < _FEW * self._width:
            return
        with suppress(Exception):  # which is raised when those documents are needed
            self._grow(found, found.left + 1)

    def _stretch(self) -> Stretch:
        """One with a whole sample, unless the epoch ends."""
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
        if self._position[0] and self._source.is_blocked(self._position[1:]):
            self._position[0] = 0  # the document ends here
        this: ref[TokenStream] = ref(self)
        found = stretch(self._around, self._position, lambda: _forget(this))
        before = copy_of(found.reach)
        if not self._position[0]:  # so that the position of the first document is its own
            self._source.pass_blocked(found.reach)
        if found.reach != before:
            found.append(Spans.mark(before, found.reach))
        return found

    def _extend(self, found: Stretch, num_tokens: int) -> None:
        """Append documents behind what is left of a stretch, until it has so many tokens or the epoch ends."""
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
        """Return the number of documents to ask for if so many tokens are missing: rather too few, if each of them costs."""
        if not self._documents.is_costly:
            return MANY
        needed = num_tokens * self._num_read // max(1, self._num_gained)
        return max(1, self._num_read // _AHEAD + min(needed, self._num_read))

    def _settle(self, found: Stretch) -> bool:
        """Let what has changed take effect here, as a mark; return whether it waits for the next document."""
        before = copy_of(found.reach)
        self._source.settle(found.reach)
        self._source.pass_blocked(found.reach)
        if found.reach != before:
            found.append(Spans.mark(before, found.reach))
        return self._source.is_pending(found.reach)

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
