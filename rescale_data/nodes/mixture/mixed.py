"""`MixedDocuments`: the documents of a mixture, many at a time: which source each is of first, then all of a source at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from rescale_data.nodes.base import View, copy_of
from rescale_data.nodes.mixture.circle import Arcs
from rescale_data.nodes.mixture.draws import MixtureDraws
from rescale_data.nodes.mixture.ends import SILENT_EPOCHS
from rescale_data.nodes.mixture.lengths import TokenArcs
from rescale_data.nodes.mixture.weights import MixtureWeights
from rescale_data.nodes.reading.documents import Documents
from rescale_data.nodes.reading.fragment_documents import FragmentDocuments, read_together
from rescale_data.nodes.reading.spans import EMPTY, MANY, NOTHING, Moves, Spans
from rescale_data.order import Words
from rescale_data.state import Ints

_FIRST, _SECOND, _FASTER = 16, 256, 4  # draws at once: of the first reads, and as many times more of each that follows
_MOST, _OF_EACH = 2**15, 1024  # draws at once, and of each source
_READS = 256  # of sources, or four of each: enough at once, whose epochs may hold a row or two in this shard
_AT_ONCE = 16  # documents of each source in the second read, where they lie at hand: a few cost as much as one
_EXPECTED = 2  # by tokens, documents of a source that are likely, and so read with those of others
_BYTES_OF_A_SPAN = 128
_NOWHERE = np.zeros((2, 0), dtype=np.int64)


class MixedDocuments:
    """A token column of a mixture as `Documents`; positions are those of the mixture.

    Few documents are read at first, then more each time: a first batch does not wait for what comes after it.

    Args:
        mixture: It chooses.
        column: Of the tokens.
        documents: Those of its sources, which are opened again when they are read.
        repeats: Whether a source begins again where it ends.
        by_tokens: Whether a source without tokens counts as one that yields nothing.
        room: About how many bytes are read at once.
    """

    def __init__(
        self,
        mixture: MixtureDraws,
        column: str,
        documents: Sequence[Documents],
        *,
        repeats: bool,
        by_tokens: bool,
        room: Callable[[], int],
    ) -> None:
        self._mixture, self._column, self._repeats, self._by_tokens = mixture, column, repeats, by_tokens
        self._num_sources = len(documents)
        self._num, self._reads, self._room = _FIRST, 0, room
        self._enough = max(_READS, 4 * len(documents))
        self._second = max(_SECOND, _AT_ONCE * sum([isinstance(each, FragmentDocuments) for each in documents]))
        self._forget()

    def _forget(self) -> None:
        """What was read for one answer: there may be hundreds of sources, in each logical shard."""
        self._supplies: dict[int, Supply] = {}
        self._together, self._places = EMPTY, _NOWHERE

    def _of(self, source: int) -> Documents:
        return self._mixture.sources.documents(source, self._column)

    def read(self, position: View, most: int, points: Words | None = None) -> Spans:
        """`Documents.read`; ``points`` are those of the next draws, where a mixture above says them."""
        self._after = copy_of(position)
        num_silent: Counter[int] = Counter()
        while True:
            self._rule = rule = self._mixture.rule_at(self._after)
            arcs = self._mixture.arcs_at(self._after)
            if arcs is None:
                break
            self._caps, room = {}, MANY
            self._seen_ends: Container[int] = ()
            self._turn_at = None
            if rule is not None:
                self._caps, self._seen_ends = rule.caps, rule.ends_count(self._after)
                room, self._turn_at = rule.room(self._after)
            if points is None:
                points_here = self._mixture.circle.points(self._after[0], min(most, self._num, room))
            else:
                points_here = points[: min(most, room)]
            spans, ended = self._draw(self._after, arcs, points_here)
            if len(spans):
                self._grow(spans)
                if rule is not None:
                    spans = self._changed(spans, rule)
                if self._after != position:
                    spans = spans.with_moves(spans.moves.led_by(Moves.between(position, self._after)))
                self._after = self._start = position  # there may be many shards
                return spans
            num_silent[ended] += 1
            if self._repeats and (ended not in self._seen_ends or num_silent[ended] > SILENT_EPOCHS):
                self._mixture.refuse_silent(ended)
            self._of(ended).turn(self._after[self._mixture.slots_of(ended)])
            if rule is not None and ended in self._seen_ends:
                rule.change(self._after, [ended])
            if not self._repeats and self._mixture.end_at(self._after, ended):
                break
        return EMPTY

    def settle(self, position: View) -> bool:
        self._mixture.settle(position)
        self._mixture.pass_blocked(position)
        return False

    def turn(self, position: View) -> None:
        position[:] = self._after

    def _changed(self, spans: Spans, rule: MixtureWeights) -> Spans:
        """The same documents; behind the last of them others weights may count."""
        before = copy_of(self._after)
        spans.move(before, len(spans))
        after = copy_of(before)
        rule.change(after, rule.caps)
        if after == before:
            return spans
        moves = Moves.join([spans.moves, Moves.between(before, after)])
        return spans.with_moves(moves.grouped(np.array([*range(1, len(spans)), len(spans) + 1])))

    def _grow(self, spans: Spans) -> None:
        copied = sum([array.nbytes for array, kept in zip(spans.arrays, spans.keeps, strict=True) if kept is None])
        mean = _BYTES_OF_A_SPAN + copied // len(spans)
        most = min(_MOST, _OF_EACH * self._num_sources, self._room() // mean)
        more = max(self._second, _FASTER * self._num)
        if self._reads > self._num_sources:  # some have few at a time
            more = min(more, len(spans) * self._enough // self._reads)
        self._num = max(_FIRST, min(more, most))

    def _draw(self, position: View, arcs: Arcs | TokenArcs, points: Words) -> tuple[Spans, int]:
        """The documents from a position on up to where a source ends; where it is the first one, none, and which source."""
        self._start, self._reads = position, 0
        try:
            if isinstance(arcs, TokenArcs):
                chosen, ended = self._choose(points, arcs)
            else:
                chosen, ended = self._supplied(arcs.words.searchsorted(points, side="right"), points, arcs)
            spans = self._join(position[0], chosen) if len(chosen) else EMPTY
        finally:  # also after a read that fails: the next one may be from elsewhere
            self._forget()
        return spans, ended

    def _read_together(self, wanted: Sequence[int]) -> Ints:
        """Up to so many documents of each source, of those that can be read so; how many there are."""
        asked = [
            (source, (documents, self._mixture.slots_of(source), num, self._repeats and source not in self._seen_ends))
            for source, num in enumerate(wanted)
            if num and isinstance(documents := self._of(source), FragmentDocuments) and source not in self._caps
        ]
        self._places = np.zeros((2, self._num_sources), dtype=np.int64)
        if asked:
            self._together, places = read_together([each for _, each in asked], self._start)
            self._places[:, [source for source, _ in asked]] = places
            self._reads += len(asked)
        return self._places[1]

    def _read_of(self, source: int) -> Spans:
        """Those of a source among them."""
        first, num = self._places[:, source].tolist()
        return self._together[first : first + num]

    def _choose(self, points: Words, arcs: TokenArcs) -> tuple[Ints, int]:
        """Sources of the next draws, by the lengths of what they yield."""
        parts = arcs.parts()
        chosen, numbers = np.empty(len(points), dtype=np.int64), arcs.numbers()
        _, documents, _, _, counts, most_documents, most_tokens = numbers
        for source, cap in self._caps.items():
            most = {"samples": most_documents, "tokens": most_tokens}.get(cap.unit)
            if most is not None and cap.drawn(self._start) < cap.limit:
                most[source] = cap.limit
        expected = [int(more + more**0.5) for more in (len(points) * part for part in parts)]
        have = self._read_together([more if more >= _EXPECTED else 0 for more in expected])
        lengths = [self._read_of(source).length if num else None for source, num in enumerate(have.tolist())]
        num, missing = 0, -1
        turn_at = -1 if self._turn_at is None else self._turn_at
        while True:
            num, missing = arcs.run(points, chosen, num, numbers, lengths, turn_at)
            if missing < 0:
                break
            count = int(counts[missing])
            more = (len(points) - num) * parts[missing]  # about as many, and some to spare
            most = count + 1 + int(more + more**0.5)
            self._have(missing, most, most)
            if self._supplies[missing].num == count:
                break
            supply = self._supplies[missing]
            lengths[missing] = supply.lengths
            if supply.full_at < MANY:
                most_documents[missing] = documents[missing] - count + supply.full_at
        return chosen[:num], missing

    def _supplied(self, chosen: Ints, points: Words, arcs: Arcs) -> tuple[Ints, int]:
        """As many of the draws as there are documents for, and the source that has ended there."""
        limit, ended = len(chosen), -1
        wanted = np.bincount(chosen, minlength=self._num_sources)
        if (self._read_together(wanted.tolist()) == wanted).all():
            return chosen, -1
        for source, places in Drawn.of(chosen).each():
            if self._places[1, source] == len(places):
                continue
            inner = isinstance(self._of(source), MixedDocuments)
            below = arcs.stretch_all(points[places], source) if inner else None
            if not self._have(source, len(places), len(places), below):
                missing = int(places[self._supplies[source].num])
                limit, ended = (missing, source) if missing < limit else (limit, ended)
            if source in self._caps and (last := self._last(source)) <= len(places):
                limit = min(limit, int(places[last - 1]) + 1)
        return chosen[:limit], ended

    def _last(self, source: int) -> int:
        """By samples, the document of a source's, from 1, with which it reaches its cap, if it does among those at hand."""
        cap = self._caps[source]
        return self._supplies[source].full_at if cap.unit == "epochs" else cap.limit - cap.drawn(self._start)

    def _have(self, source: int, num: int, most: int, points: Words | None = None) -> bool:
        """Whether a source has so many documents; up to ``most`` are read if any are."""
        supply = self._supplies.get(source)
        if supply is None:
            slots, cap = self._mixture.slots_of(source), self._caps.get(source)
            stop = None if cap is None or cap.unit != "epochs" else (cap.slot - slots.start, cap.limit)
            first = self._read_of(source)
            first = first.with_moves(first.moves.under(-slots.start))
            supply = Supply(self._of(source), self._start[slots], self._by_tokens, stop, first)
            self._supplies[source] = supply
        while supply.num < num:
            if supply.full_at < MANY or (supply.num and self._reads >= self._enough):
                return False
            self._reads += 1
            if supply.fill(most, points):
                continue
            if not self._repeats or source in self._seen_ends:
                return False
            if supply.silent_epochs == SILENT_EPOCHS:
                if self._by_tokens:  # its documents without tokens may have been drawn
                    self._mixture.refuse_silent(source)
                return False
            supply.turn()
        return True

    def _join(self, first: int, chosen: Ints) -> Spans:
        """The documents of draws in their order, with what the mixture itself counts."""
        counted = self._mixture.drawn_at(self._start)
        drawn = Drawn.of(chosen)
        counts, number = np.diff(drawn.ends), np.arange(len(chosen))
        parts, first_slots = [self._together], [0]
        begins, at = self._places[0].copy(), len(self._together)
        for source, num in zip(drawn.sources.tolist(), counts.tolist(), strict=True):
            if source in self._supplies:
                parts += self._supplies[source].spans(num)
                first_slots += [self._mixture.slots_of(source).start] * (len(parts) - len(first_slots))
                begins[source], at = at, at + num
        spans = Spans.join(parts, first_slots)
        index = np.empty_like(number)
        index[drawn.order] = np.repeat(begins[drawn.sources] - drawn.ends[:-1], counts) + number
        spans = spans.take(index)
        starts, tokens = drawn.ends[:-1], np.concatenate([[0], np.cumsum(spans.length[drawn.order])])
        after = (number - np.repeat(starts, counts) + 1, tokens[1:] - np.repeat(tokens[starts], counts))
        slots, values = np.zeros((2, len(chosen), 1 + len(counted)), dtype=np.int64)
        values[:, 0] = first + 1 + number
        for kind, ((slot, before), count) in enumerate(zip(counted, after, strict=False), 1):
            slots[:, kind] = slot + chosen
            values[drawn.order, kind] = count + np.repeat(np.array(before)[drawn.sources], counts)
        return spans.with_moves(spans.moves.then(Moves.of(slots, values)))


@dataclass(frozen=True, slots=True)
class Drawn:
    """Draws by source: of ``sources[i]`` those with the numbers ``order[ends[i] : ends[i + 1]]``."""

    sources: Ints
    order: Ints
    ends: Ints

    @staticmethod
    def of(chosen: Ints) -> Drawn:
        counts = np.bincount(chosen)
        sources = np.flatnonzero(counts)
        order = np.argsort(chosen.astype(np.uint16) if len(counts) <= 1 << 16 else chosen, kind="stable")
        return Drawn(sources, order, np.concatenate([[0], np.cumsum(counts[sources])]))

    def each(self) -> Iterator[tuple[int, Ints]]:
        ends = self.ends.tolist()
        for source, start, stop in zip(self.sources.tolist(), ends, ends[1:], strict=False):
            yield source, self.order[start:stop]


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

    def fill(self, num: int, points: Words | None = None) -> bool:
        """Have up to so many documents, one more at least; false at the end of an epoch."""
        have = self.num
        if points is not None and isinstance(self._documents, MixedDocuments):
            spans = self._documents.read(self._position, num - have, points[have:])
        else:
            spans = self._documents.read(self._position, num - have)
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
