"""`MixedDocuments`: reads documents of a mixture, many at a time: it chooses their sources, then reads source by source."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from rescale_data.nodes.base import View, copy_of
from rescale_data.nodes.bound import SILENT_EPOCHS
from rescale_data.nodes.mixture.circle import Arcs
from rescale_data.nodes.mixture.draws import MixtureDraws
from rescale_data.nodes.mixture.lengths import TokenArcs
from rescale_data.nodes.mixture.supply import Kept, Supply
from rescale_data.nodes.mixture.weights import InUse
from rescale_data.nodes.mixture.woven import woven
from rescale_data.nodes.reading.documents import Documents
from rescale_data.nodes.reading.fragment_documents import FragmentDocuments
from rescale_data.nodes.reading.spans import EMPTY, MANY, Moves, Spans
from rescale_data.nodes.reading.together import read_together
from rescale_data.order import Words
from rescale_data.state import Ints

_FIRST, _SECOND, _FASTER = 16, 256, 4  # draws in the first read and in the second; then so many times more each
_MOST, _OF_EACH = 2**15, 2048  # most draws at once, in all and on average for each source
_READS = 256  # reads of sources after which a call ends (at least 4 for each): an epoch may hold only a row or two
_AT_ONCE = 16  # documents of each source in the second read, if they lie at hand: a few cost as much as one
_EXPECTED = 2  # by tokens, expected documents from which on a source is read together with others
_BYTES_OF_A_SPAN = 128
_NOWHERE = np.zeros((2, 0), dtype=np.int64)


class MixedDocuments:
    """A token column of a mixture as `Documents`; positions are rows of the mixture.

    Few documents are read at first, then more each time: the first batch does not wait for later documents.

    Args:
        mixture: The draws, which choose the sources.
        column: The column of the tokens.
        documents: The documents of each source; they are opened again when they are read.
        repeats: True if a source begins again when it ends.
        by_tokens: True if a source without tokens counts as one that yields nothing.
        room: Returns about how many bytes may be read at once.
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
        self._num_sources, self.is_costly = len(documents), any(each.is_costly for each in documents)
        self._kept: dict[int, Kept | MixedDocuments] = {}
        self._num, self._reads, self._room = _FIRST, 0, room
        self._enough = max(_READS, 4 * len(documents))
        self._second = max(_SECOND, _AT_ONCE * sum([isinstance(each, FragmentDocuments) for each in documents]))
        self._forget()

    def _forget(self) -> None:
        """Drop the documents read for one call of `read`: there may be hundreds of sources, in each logical shard."""
        self._supplies: dict[int, Supply] = {}
        self._together, self._places = EMPTY, _NOWHERE

    def _of(self, source: int) -> Documents:
        found = self._kept.get(source) or self._mixture.sources.documents(source, self._column)
        if found.is_costly and source not in self._kept:
            found = self._kept[source] = found if isinstance(found, MixedDocuments) else Kept(found)
        return found

    def begin_at(self, position: View) -> None:
        """Drop the costly documents before a position, and keep the later ones."""
        for source, kept in self._kept.items():
            kept.begin_at(position[self._mixture.slots_of(source)])

    def read(self, position: View, most: int, points: Words | None = None) -> Spans:
        """Return the next documents as `Documents.read` does; ``points`` are given if a mixture above chooses them."""
        self._after = copy_of(position)
        if points is None:
            self.begin_at(position)
        num_silent: Counter[int] = Counter()
        while True:
            in_use = self._mixture.weights.at(self._after)
            arcs = self._mixture.arcs_at(self._after, in_use)
            if arcs is None:
                break
            self._seen_ends, self._turn_at = in_use.ending, in_use.turn_at
            room = MANY if self._by_tokens or in_use.turn_at is None else max(1, in_use.turn_at - self._after[0])
            if points is None:
                points_here = self._mixture.circle.points(self._after[0], min(most, self._num, room))
            else:
                points_here = points[: min(most, room)]
            spans, ended = self._draw(self._after, arcs, points_here)
            if len(spans):
                self._grow(spans)
                if self._by_tokens and in_use.turn_at is not None:
                    spans = self._turned(spans, in_use)
                if self._after != position:
                    spans = spans.with_moves(spans.moves.led_by(Moves.between(position, self._after)))
                self._after = self._start = position  # frees the copy: there may be many shards
                return spans
            num_silent[ended] += 1
            if self._repeats and (ended not in self._seen_ends or num_silent[ended] > SILENT_EPOCHS):
                self._mixture.refuse_silent(ended)
            self._of(ended).turn(self._after[self._mixture.slots_of(ended)])
            self._mixture.weights.end(self._after, ended, in_use)
            if not self._repeats and self._mixture.end_at(self._after, ended):
                break
        return EMPTY

    def turn(self, position: View) -> None:
        position[:] = self._after

    def _turned(self, spans: Spans, in_use: InUse) -> Spans:
        """Return the same documents, where the last one moves the position to other weights if these count behind it."""
        before = copy_of(self._after)
        spans.move(before, len(spans))
        after = copy_of(before)
        self._mixture.weights.turn(after, in_use)
        if after == before:
            return spans
        moves = Moves.join([spans.moves, Moves.between(before, after)])
        return spans.with_moves(moves.grouped(np.array([*range(1, len(spans)), len(spans) + 1])))

    def _grow(self, spans: Spans) -> None:
        copied = sum([array.nbytes for array, kept in zip(spans.arrays, spans.keeps, strict=True) if kept is None])
        mean = _BYTES_OF_A_SPAN + copied // len(spans)
        most = min(_MOST, _OF_EACH * self._num_sources, self._room() // mean)
        more = max(self._second, _FASTER * self._num)
        if self._reads > self._num_sources:  # some sources give few at a time
            more = min(more, len(spans) * self._enough // self._reads)
        self._num = max(_FIRST, min(more, most))

    def _draw(self, position: View, arcs: Arcs | TokenArcs, points: Words) -> tuple[Spans, int]:
        """Return the documents of the next draws, up to a draw whose source has ended, and that source; -1 if none has."""
        self._start, self._reads = position, 0
        try:
            if isinstance(arcs, TokenArcs):
                chosen, ended = self._choose(points, arcs)
            else:
                chosen, ended = self._supplied(arcs.words.searchsorted(points, side="right"), points, arcs)
            spans = self._join(position[0], chosen) if len(chosen) else EMPTY
        finally:  # also after a read that fails: the next one may be at another position
            self._forget()
        return spans, ended

    def _read_together(self, wanted: Sequence[int]) -> Ints:
        """Read up to ``wanted`` documents of each source that can be read together; return the number read of each."""
        asked = [
            (source, (documents, self._mixture.slots_of(source), num, self._repeats and source not in self._seen_ends))
            for source, num in enumerate(wanted)
            if num and isinstance(documents := self._of(source), FragmentDocuments)
        ]
        self._places = np.zeros((2, self._num_sources), dtype=np.int64)
        if asked:
            self._together, places = read_together([each for _, each in asked], self._start)
            self._places[:, [source for source, _ in asked]] = places
            self._reads += len(asked)
        return self._places[1]

    def _read_of(self, source: int) -> Spans:
        """Return the documents of a source among those read together."""
        first, num = self._places[:, source].tolist()
        return self._together[first : first + num]

    def _choose(self, points: Words, arcs: TokenArcs) -> tuple[Ints, int]:
        """Return the sources of the next draws, by the lengths of their documents, and a source that has ended, or -1."""
        parts = arcs.parts()
        chosen, numbers = np.empty(len(points), dtype=np.int64), arcs.numbers()
        counts = numbers[4]
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
            most = count + max(1, int(more)) if self._of(missing).is_costly else count + 1 + int(more + more**0.5)
            self._have(missing, most, most)
            if self._supplies[missing].num == count:
                break
            supply = self._supplies[missing]
            lengths[missing] = supply.lengths
        return chosen[:num], missing

    def _supplied(self, chosen: Ints, points: Words, arcs: Arcs) -> tuple[Ints, int]:
        """Return the sources of the draws up to the first without a document, and the source that has ended there, or -1."""
        limit, ended = len(chosen), -1
        wanted = np.bincount(chosen, minlength=self._num_sources)
        if (self._read_together(wanted.tolist()) == wanted).all():
            return chosen, -1
        order = np.argsort(chosen.astype(np.min_scalar_type(self._num_sources)), kind="stable")
        for source, places in enumerate(np.split(order, np.cumsum(wanted[:-1]))):
            if self._places[1, source] == len(places):
                continue
            documents = self._of(source)
            if isinstance(documents, MixedDocuments):
                documents = AtPoints(documents, arcs.stretch_all(points[places], source))
            if not self._have(source, len(places), len(places), documents):
                missing = int(places[self._supplies[source].num])
                limit, ended = (missing, source) if missing < limit else (limit, ended)
        return chosen[:limit], ended

    def _have(self, source: int, num: int, most: int, documents: Documents | None = None) -> bool:
        """True if a source has ``num`` documents. If documents have to be read for that, up to ``most`` are."""
        supply = self._supplies.get(source)
        if supply is None:
            slots = self._mixture.slots_of(source)
            first = self._read_of(source)
            first = first.with_moves(first.moves.under(-slots.start))
            supply = Supply(documents or self._of(source), self._start[slots], self._by_tokens, first)
            self._supplies[source] = supply
        while supply.num < num:
            if supply.num and self._reads >= self._enough:
                return False
            self._reads += 1
            if supply.fill(most):
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
        """Return the documents of draws in their order, with moves that include the mixture's own counts."""
        parts, first_slots = [self._together], [0]
        begins, at = self._places[0].copy(), len(self._together)
        each = np.bincount(chosen, minlength=self._num_sources).tolist()
        for source, supply in self._supplies.items():
            parts += supply.spans(each[source])
            first_slots += [self._mixture.slots_of(source).start] * (len(parts) - len(first_slots))
            begins[source], at = at, at + each[source]
        return woven(chosen, Spans.join(parts, first_slots), begins, first, self._mixture.row.counted_at(self._start))


class AtPoints:
    """The documents of a mixture within a mixture, drawn at the points that the outer one gives."""

    is_costly = True

    def __init__(self, documents: MixedDocuments, points: Words) -> None:
        self._documents, self._points = documents, points

    def read(self, position: View, most: int) -> Spans:
        spans = self._documents.read(position, most, self._points)
        self._points = self._points[len(spans) :]
        return spans

    def turn(self, position: View) -> None:
        self._documents.turn(position)
