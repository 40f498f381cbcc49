"""`Supply`: the next documents of one source of a mixture."""

from __future__ import annotations

import numpy as np

from rescale_data.nodes.base import View, copy_of
from rescale_data.nodes.reading.documents import Documents
from rescale_data.nodes.reading.spans import EMPTY, MANY, NOTHING, Moves, Spans
from rescale_data.state import Ints


class Supply:
    """The next documents of one source, as many as are asked for, over the ends of its epochs where it begins again."""

    def __init__(
        self,
        documents: Documents,
        position: View,
        by_tokens: bool,
        stop: tuple[int, int] | None = None,
        first: Spans = EMPTY,
    ) -> None:
        self._documents, self._position = documents, copy_of(position)
        self._turned, self._by_tokens, self._stop = NOTHING, by_tokens, stop
        first.move(self._position, len(first))
        self._parts, self.num = [first] if len(first) else list[Spans](), len(first)
        self.silent_epochs = 0
        self.full_at = MANY
        """So many documents are enough: behind them a slot has come to ``stop``, within what is an epoch for who reads."""

    def fill(self, num: int) -> bool:
        """Have up to so many documents, one more at least; false at the end of an epoch."""
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
        if self._stop is not None and self._position[self._stop[0]] >= self._stop[1]:
            self.full_at = self.num
        return True

    def turn(self) -> None:
        """Begin the next epoch, where `fill` has found an end."""
        self.silent_epochs += 1
        before = copy_of(self._position)
        self._documents.turn(self._position)
        turned = Moves.between(before, self._position)
        self._turned = Moves.join([self._turned, turned]) if len(self._turned) else turned

    @property
    def lengths(self) -> Ints:
        """Of its documents."""
        return np.concatenate([part.length for part in self._parts])

    def spans(self, num: int) -> list[Spans]:
        """The first of them, in parts."""
        parts, num = list(self._parts), self.num - num
        while num and num >= len(parts[-1]):
            num -= len(parts.pop())
        return [*parts[:-1], parts[-1][:-num]] if num else parts
