"""`TokenStream`: the tokens of documents end to end, from any position on, a sample at a time."""

from __future__ import annotations

from collections.abc import Callable

from rescale_data.errors import DataStateError
from rescale_data.nodes.aligned import Aligned, Values
from rescale_data.nodes.base import View, copy_of
from rescale_data.nodes.bound import Bound
from rescale_data.nodes.reading.documents import Documents
from rescale_data.nodes.reading.gather import Around, Rows, Stretch, fill, stretch
from rescale_data.nodes.reading.spans import MANY, Spans
from rescale_data.sources.decoded.cache import cache, owner_of

_SILENT_EPOCHS = 2


class TokenStream:
    """Tokens from ``position`` on, a row of ``[offset in the document | position of the documents]``.

    The documents that have been read, a `Stretch`, lie in the cache of the process; this holds integers alone. One that has
    been evicted is made again from the position. That is the one directly behind the last token, wherever stretches
    begin and end: documents without a token are passed on the way to the next one.

    Args:
        documents: Where documents come from.
        around: What stands around each.
        num_tokens: Tokens of a sample.
        num_ahead: As many of those behind it are looked at, and not consumed.
        repeat: Whether to go on with the next epoch after the last document of one.
        is_blocked: Of a position of the documents, whether the one that is begun there is blocked since.
        pass_blocked: Moves such a position behind documents that are blocked.
        aligned: Columns beside the tokens.
    """

    def __init__(
        self,
        documents: Documents,
        around: Around,
        *,
        num_tokens: int,
        num_ahead: int,
        repeat: bool,
        bound: Bound,
        is_blocked: Callable[[View], bool],
        pass_blocked: Callable[[View], None],
        aligned: Aligned,
    ) -> None:
        self._aligned = aligned
        self.values: Values = {}
        """Of the columns beside the tokens, for the sample that was drawn last and what it looked ahead at."""
        self._is_blocked, self._pass_blocked = is_blocked, pass_blocked
        self._bound = bound
        self._documents, self._around, self._repeat = documents, around, repeat
        self._num_tokens, self._width = num_tokens, num_tokens + num_ahead
        self.key = (owner_of(self), "stretch")
        """Where the stretch is in the cache, for who draws from many streams at once."""
        self.where: list[str] = []
        """Where the documents of the sample that was drawn last come from, if that is asked for."""

    def bind(self, position: View, *, settles: bool) -> None:
        """Go on from ``position``, and keep it up to date.

        Args:
            position: An offset in a document, and the position of the documents.
            settles: Whether what has changed between legs takes effect at the beginning of a document (`Node.settle`).
        """
        self._position, self._settles = position, settles
        cache().forget(self.key)

    def draw(self, tokens: Rows, labels: Rows | None, doc_ids: Rows | None) -> int:
        """Write the next sample into the only row of each column; at the end of an epoch only as much of it as there is.

        Returns:
            The tokens that were there, with those looked ahead at. Without the latter there are no labels.
        """
        found = self._stretch()
        before, num_ready = found.document, min(found.left, self._width)
        size = min(num_ready, self._num_tokens)
        if self._aligned:
            self.values = self._aligned.of_sample(found.owner[before:], self._position[0], num_ready, self._around)
        if num_ready == self._width:
            fill([found], 0, tokens, labels, doc_ids)
        elif size:
            fill([found], 0, tokens[:, :size], None, None if doc_ids is None else doc_ids[:, :size])
        if found.owner.where is not None:
            self._say_where(found, before)
        return num_ready

    def turn(self) -> None:
        """Move to the beginning of the next epoch, after `draw` has found the end of this one."""
        self._documents.turn(self._position[1:])
        self._position[0] = 0
        cache().forget(self.key)

    def _stretch(self) -> Stretch:
        """One with a whole sample, unless the epoch ends."""
        found: Stretch | None = cache().get(self.key)
        if found is None or found.left < self._width:
            found = self._extend(found)
            cache().put(self.key, found)
        return found

    def _extend(self, old: Stretch | None) -> Stretch:
        """What is left of a stretch, and documents behind it."""
        if old is None and self._position[0] and self._is_blocked(self._position[1:]):
            self._position[0] = 0  # the document ends here
        position, offset = copy_of(self._position[1:]), self._position[0]
        parts = self._passed(position) if old is None and not offset else []
        parts += [] if old is None else [old.owner.rest(old.document)]
        for part in parts:
            part.move(position, len(part))
        length = -offset if old is None else old.left
        num_turns = misses = 0
        while length < self._width:
            marks, waits = [], bool(offset and not parts)  # within a document, which goes on as it began
            if self._settles and not waits:
                marks, waits = self._settled(position)
            parts += marks
            spans = self._documents.read(position, 1 if self._settles and waits else MANY)
            if not len(spans):
                if not self._repeat:
                    break
                spans, num_turns = self._turned(position, num_turns), num_turns + 1
            spans.move(position, len(spans))
            parts.append(spans)
            length += (gained := self._around.num_tokens(spans))
            num_turns = 0 if gained else num_turns
            misses = 0 if gained else self._bound.missed(misses, position, len(spans))
        return stretch(Spans.join(parts), self._around, self._position)

    def _passed(self, position: View) -> list[Spans]:
        """A mark behind what is blocked, so that the position of the first document is its own."""
        before = copy_of(position)
        self._pass_blocked(position)
        return [] if position == before else [Spans.mark(before, position)]

    def _settled(self, position: View) -> tuple[list[Spans], bool]:
        """What has changed takes effect here, as a mark, if anything has; whether it waits for the next document."""
        before = copy_of(position)
        waits = self._documents.settle(position)
        return [] if position == before else [Spans.mark(before, position)], waits

    def _turned(self, position: View, num_turns: int) -> Spans:
        """The mark between two epochs."""
        if num_turns > _SILENT_EPOCHS:
            raise DataStateError(
                f"A logical shard had no token in {_SILENT_EPOCHS} whole epochs: its documents are empty or filtered out. "
                f"Check the column and the filters, or give fewer logical shards."
            )
        after = copy_of(position)
        self._documents.turn(after)
        return Spans.mark(position, after)

    def _say_where(self, found: Stretch, before: int) -> None:
        stop = found.document + (self._position[0] > 0)
        there = found.owner[before:stop]
        has_tokens = self._around.lengths(there) > 0
        self.where = [name for name, counts in zip(there.where or (), has_tokens.tolist(), strict=True) if counts]
