"""`Supply`: the next documents of one source of a mixture; `Kept`: documents that were read but not drawn."""

from __future__ import annotations

import numpy as np

from rescale_data.nodes.base import View, copy_of
from rescale_data.nodes.reading.documents import Documents
from rescale_data.nodes.reading.spans import EMPTY, NOTHING, Moves, Spans
from rescale_data.state import Ints


class Kept:
    """Documents of a costly source, kept until they are drawn, so that each is read once.

    A document is read but not drawn if another source ends before it. Documents are kept by the position at which they begin,
    in the order in which they were read. For an end of an epoch, the position at which the next epoch begins is kept too.
    """

    is_costly = True

    def __init__(self, documents: Documents) -> None:
        self._documents = documents
        self._found: dict[bytes, Spans] = {}
        self._turned: dict[bytes, View] = {}

    def read(self, position: View, most: int) -> Spans:
        key = position.tobytes()
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = self._documents.read(position, most)
            if not len(found):
                self._turned[key] = after = copy_of(position)
                self._documents.turn(after)  # at once: the next bind of the node moves it away from this end
        return found if len(found) <= most else found[:most]

    def begin_at(self, position: View) -> None:
        """Forget the documents before a position."""
        there = position.tobytes()
        for key in [*self._found]:
            if key == there:
                break
            found = self._found.pop(key)
            if len(found) > 1 and (num := _num_before(found, key, position)):
                self._found = {there: found[num:], **self._found}
                break
        self._turned = {key: after for key, after in self._turned.items() if key in self._found}

    def turn(self, position: View) -> None:
        position[:] = self._turned[position.tobytes()]


def _num_before(found: Spans, begin: bytes, position: View) -> int:
    """Count the documents before a position; 0 if it is not between two of them."""
    at = np.frombuffer(begin, dtype=np.int64).copy().data
    for number in range(1, len(found)):
        found[number - 1 :].move(at, 1)
        if at == position:
            return number
    return 0


class Supply:
    """The next documents of one source, as many as are requested, also across the ends of its epochs (`turn`)."""

    def __init__(
        self,
        documents: Documents,
        position: View,
        by_tokens: bool,
        first: Spans = EMPTY,
    ) -> None:
        self._documents, self._position = documents, copy_of(position)
        self._turned, self._by_tokens = NOTHING, by_tokens
        first.move(self._position, len(first))
        self._parts, self.num = [first] if len(first) else list[Spans](), len(first)
        self.silent_epochs = 0

    def fill(self, num: int) -> bool:
        """Read one more document at least, up to ``num`` in all; return false at the end of an epoch."""
        spans = self._documents.read(self._position, num - self.num)
        if not len(spans):
            return False
        spans.move(self._position, len(spans))
        if len(self._turned):
            spans, self._turned = spans.with_moves(spans.moves.led_by(self._turned)), NOTHING
        self._parts.append(spans)
        self.num += len(spans)
        if not self._by_tokens or spans.length.any():
            self.silent_epochs = 0
        return True

    def turn(self) -> None:
        """Begin the next epoch, after `fill` has found the end of one."""
        self.silent_epochs += 1
        before = copy_of(self._position)
        self._documents.turn(self._position)
        turned = Moves.between(before, self._position)
        self._turned = Moves.join([self._turned, turned]) if len(self._turned) else turned

    @property
    def lengths(self) -> Ints:
        """The lengths of the documents read so far."""
        return np.concatenate([part.length for part in self._parts])

    def spans(self, num: int) -> list[Spans]:
        """Return the first ``num`` documents, in parts."""
        parts, num = list(self._parts), self.num - num
        while num and num >= len(parts[-1]):
            num -= len(parts.pop())
        return [*parts[:-1], parts[-1][:-num]] if num else parts
