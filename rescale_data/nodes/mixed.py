"""`MixedDocuments`: the documents of a mixture, many at a time: which source each is of first, then all of a source at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from rescale_data.nodes.base import View, copy_of
from rescale_data.nodes.circle import Arcs, Circle
from rescale_data.nodes.lengths import TokenArcs
from rescale_data.nodes.reading.documents import Documents
from rescale_data.nodes.reading.spans import EMPTY, NOTHING, Moves, Spans
from rescale_data.state import Ints

_EACH = 64  # draws for each source at once, on average
_BYTES_OF_A_SPAN = 128
_FEW = 8


class Mixture(Protocol):
    """What chooses, at any position."""

    @property
    def circle(self) -> Circle: ...

    def slots_of(self, source: int) -> slice:
        """The part of a position that is a source's."""
        ...

    def arcs_at(self, position: View) -> Arcs | TokenArcs | None:
        """`None` at the end of the epoch, which is written into the position."""
        ...

    def drawn_at(self, position: View) -> tuple[list[int], list[list[int]]]:
        """The first slot of what is counted of each source, documents and by tokens these, and the counts."""
        ...

    def settle(self, position: View) -> bool: ...

    def end_at(self, position: View, source: int) -> bool:
        """A source has ended: write that into the position. Whether the epoch has ended with it."""
        ...

    def refuse_silent(self, source: int, silent_epochs: int) -> None:
        """``DataStateError`` where a source has begun again so often without a token that it has none."""
        ...


class MixedDocuments:
    """A token column of a mixture as `Documents`; positions are those of the mixture.

    Args:
        mixture: It chooses.
        documents: Of its sources.
        repeats: Whether a source begins again where it ends.
        most: Draws at once.
    """

    def __init__(self, mixture: Mixture, documents: Sequence[Documents], *, repeats: bool, most: int) -> None:
        self._mixture, self._documents, self._repeats, self._most = mixture, documents, repeats, most

    def read(self, position: memoryview) -> Spans:
        self._after = copy_of(position)
        while (arcs := self._mixture.arcs_at(self._after)) is not None:
            spans, ended = self._draw(self._after, arcs)
            if len(spans):
                passed = Moves.between(position, self._after)
                moves = Moves.join([passed, spans.moves]).grouped(np.arange(2, 2 + len(spans)))
                return spans.with_moves(moves)
            if self._mixture.end_at(self._after, ended):
                break
        return EMPTY

    def settle(self, position: memoryview) -> None:
        self._mixture.settle(position)

    def turn(self, position: memoryview) -> None:
        position[:] = self._after

    def _draw(self, position: View, arcs: Arcs | TokenArcs) -> tuple[Spans, int]:
        """The documents from a position on up to where a source ends; where it is the first one, none, and which source."""
        first, num = position[0], self._most
        self._supplies: dict[int, Supply] = {}
        self._start = position
        if isinstance(arcs, TokenArcs):
            chosen, ended = self._choose(first, arcs)
        else:
            chosen = arcs.words.searchsorted(self._mixture.circle.points(first, num), side="right")
            chosen, ended = self._supplied(chosen)
        return (self._join(first, chosen), ended) if len(chosen) else (EMPTY, ended)

    def _choose(self, first: int, arcs: TokenArcs) -> tuple[Ints, int]:
        """Sources of the next draws, by the lengths of what they yield."""
        chosen: list[int] = []
        counts: dict[int, int] = {}
        for point in self._mixture.circle.points(first, self._most).tolist():
            source = arcs.choose(point)
            count = counts.get(source, 0)
            if not self._have(source, count + 1, max(_FEW, 2 * count)):
                return np.array(chosen, dtype=np.int64), source
            arcs.drew(source, self._supplies[source].lengths[count])
            counts[source] = count + 1
            chosen.append(source)
        return np.array(chosen, dtype=np.int64), -1

    def _supplied(self, chosen: Ints) -> tuple[Ints, int]:
        """As many of the draws as there are documents for, and the source that has ended there."""
        limit, ended = len(chosen), -1
        for source in np.unique(chosen).tolist():
            places = np.flatnonzero(chosen == source)
            if not self._have(source, len(places), len(places)):
                missing = int(places[len(self._supplies[source].lengths)])
                limit, ended = (missing, source) if missing < limit else (limit, ended)
        return chosen[:limit], ended

    def _have(self, source: int, num: int, most: int) -> bool:
        """Whether a source has so many documents; up to ``most`` are read if any are."""
        supply = self._supplies.get(source)
        if supply is None:
            below = self._start[self._mixture.slots_of(source)]
            supply = self._supplies[source] = Supply(self._documents[source], below)
        while len(supply.lengths) < num:
            if supply.fill(most, self._repeats):
                continue
            if not self._repeats:
                return False
            self._mixture.refuse_silent(source, supply.silent_epochs)
        return True

    def _join(self, first: int, chosen: Ints) -> Spans:
        """The documents of draws in their order, with what the mixture itself counts."""
        slots, counts = self._mixture.drawn_at(self._start)
        order = np.argsort(chosen, kind="stable")
        parts: list[Spans] = []
        own = np.empty((len(chosen), 1 + len(slots), 2), dtype=np.int64)
        own[:, 0, 0], own[:, 0, 1] = 0, first + 1 + np.arange(len(chosen))
        for source in np.unique(chosen).tolist():
            places = np.flatnonzero(chosen == source)
            spans = self._supplies[source].spans(len(places))
            parts.append(spans.with_moves(spans.moves.under(self._mixture.slots_of(source).start)))
            counted = (np.arange(1, len(places) + 1), np.cumsum(spans.length))
            for kind, (slot, count) in enumerate(zip(slots, counts, strict=True)):
                own[places, 1 + kind, 0], own[places, 1 + kind, 1] = slot + source, count[source] + counted[kind]
        spans = Spans.join(parts).take(np.argsort(order))
        ends = np.arange(len(chosen) + 1) * own.shape[1]
        return spans.with_moves(spans.moves.then(Moves(ends, own[..., 0].reshape(-1), own[..., 1].reshape(-1))))


def draws_at_once(num_sources: int, cache_bytes: int, num_logical_shards: int) -> int:
    """Enough for several documents of each source, little enough for those of all shards to take an eighth of the cache."""
    room = cache_bytes // 8 // num_logical_shards // _BYTES_OF_A_SPAN
    return max(16, min(_EACH * num_sources, room))


class Supply:
    """The next documents of one source, as many as are asked for, over the ends of its epochs where it begins again."""

    def __init__(self, documents: Documents, position: View) -> None:
        self._documents, self._position = documents, copy_of(position)
        self._parts: list[Spans] = []
        self._turned = NOTHING
        self.lengths: list[int] = []
        self.silent_epochs = 0

    def fill(self, num: int, repeats: bool) -> bool:
        """Have so many documents, or one more end of an epoch."""
        spans = self._documents.read(self._position)[: num - len(self.lengths)]
        if len(spans):
            spans.move(self._position, len(spans))
            first = len(self._turned)
            moves = Moves.join([self._turned, spans.moves]).grouped(np.arange(first + 1, first + 1 + len(spans)))
            self._parts.append(spans.with_moves(moves))
            self.lengths += spans.length.tolist()
            self.silent_epochs = 0 if spans.length.any() else self.silent_epochs
            self._turned = NOTHING
        elif repeats:
            self.silent_epochs += 1
            before = copy_of(self._position)
            self._documents.turn(self._position)
            self._turned = Moves.join([self._turned, Moves.between(before, self._position)])
        return len(spans) > 0

    def spans(self, num: int) -> Spans:
        return Spans.join(self._parts)[:num]
