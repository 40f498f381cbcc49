"""Arcs for a mixture by tokens: how long the documents of a source are is known only once they have been drawn.

The same circle as by samples, over draws of documents. The arc of a source is as long as its weight divided by the mean length
of its documents so far in this logical shard, and longer where the source is behind in tokens by more than two of its
documents, shorter where it is ahead by more. The points of the circle alone keep it within two, so documents of one length are
drawn as by samples, and global batches are as even. All of it follows from counts, in integers: a last bit that differs between
processors would be another order.

What belongs to all sources, the mean length and the tokens so far, counts in steps: a source is behind or ahead if it is at
both ends of the present one. So a draw changes the arc of its own source alone, most of the time. A source that rests counts
for nothing: it may be left out between segments of a run.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from operator import mul

import numpy as np

from rescale_data.nodes.mixture.circle import TURN, shares
from rescale_data.nodes.reading.gather import kernel
from rescale_data.order import Words
from rescale_data.state import Ints

_PRIOR = 20  # documents of the mean length of all that each source is taken to have had
_SLACK = 2  # documents of a source by which its tokens may differ from its share
_PATIENCE = 6  # documents more, of an even mixture's, that double the arc of a source
_LONG = 256  # tokens of a mean document, one such document more: shards that follow long ones closely swing together
_MOST = 3  # such doublings at once
_STEP = 1  # documents a source after which what all share is looked at again
_SMALL = 1 / 50  # a share below it counts as that, when deficits are judged
_SHARE, _FINE = 32, 8  # bits of a share, and of a mean length behind the point


class TokenArcs:
    """The arcs of one logical shard's sources at one position.

    Args:
        weights: Of each; 0 for one that rests.
        documents: That have been drawn from each.
        tokens: In these.
        since: How many of those tokens do not count as ahead or behind, being of other weights.
    """

    def __init__(
        self, weights: tuple[float, ...], documents: Sequence[int], tokens: Sequence[int], since: Sequence[int]
    ) -> None:
        self._shares = shares(weights, 1 << _SHARE)
        goes = [share > 0 for share in self._shares]
        self._grid = _STEP * sum(goes)
        documents, going, self._since = ([*map(mul, goes, counts)] for counts in (documents, tokens, since))
        self._resting = sum(tokens) - sum(going)
        self._count(documents, going)

    def _count(self, documents: Sequence[int], tokens: Sequence[int]) -> None:
        self.documents, self.tokens = list(documents), list(tokens)
        self._all_documents, self._all_tokens = sum(documents), sum(tokens)
        self._counted = self._all_tokens - sum(self._since)
        self._rebuild()

    @property
    def num_tokens(self) -> int:
        """The tokens drawn from all sources, also from those that rest."""
        return self._all_tokens + self._resting

    def choose(self, point: int) -> int:
        """The source in whose arc a point falls."""
        return bisect_right([*accumulate(self._arcs)], point * self._total // TURN)

    def stretch(self, point: int, source: int) -> int:
        """Return the place of a point of a source's arc when the arc is stretched to the whole circle."""
        return (point * self._total - sum(self._arcs[:source]) * TURN) // self._arcs[source]

    def numbers(self) -> Ints:
        """Return ``int64[5, S]`` for `run`: of each source its share, documents, tokens, those of them that do not count, and
        draws in the run."""
        counts = [0] * len(self.tokens)
        return np.array([self._shares, self.documents, self.tokens, self._since, counts], dtype=np.int64)

    def run(
        self, points: Words, chosen: Ints, first: int, numbers: Ints, lengths: list[Ints | None], turn_at: int
    ) -> tuple[int, int]:
        """Draw at points, from number ``first`` on, until a source has no length at hand or other weights may count.

        Args:
            points, chosen: ``[num]``; the source of each is written.
            numbers: What has been drawn, and is written.
            lengths: Of the documents that each source yields in this run, as far as they are known.
            turn_at: So many tokens of all sources are enough; -1 where there is no end.

        Returns:
            The number of the next draw, and the source whose length is missing for it, or -1.
        """
        missing = -2
        if kernel is not None:
            going_at = -1 if turn_at < 0 else max(0, turn_at - self._resting)
            first, missing = kernel.run(points, chosen, first, numbers, lengths, going_at)
        if missing > -2:
            return first, missing
        self._count(*numbers[1:3].tolist())  # without a compiler, or of documents that are very long
        _, documents, tokens, _, counts = numbers
        for number in range(first, len(points)):
            source = self.choose(int(points[number]))
            known, count = lengths[source], counts[source]
            if known is None or count == len(known):
                return number, source
            self.drew(source, int(known[count]))
            chosen[number], counts[source] = source, count + 1
            documents[source], tokens[source] = self.documents[source], self.tokens[source]
            if 0 <= turn_at <= self.num_tokens:
                return number + 1, -1
        return len(points), -1

    def parts(self) -> list[float]:
        """About what part of many draws falls to each source."""
        counted = zip(self._shares, self.documents, self.tokens, strict=True)
        rates = [share * (docs + _PRIOR) / max(1, tokens + _PRIOR * self._mean) for share, docs, tokens in counted]
        total = sum(rates)
        return [rate / total for rate in rates]

    def drew(self, source: int, length: int) -> None:
        """A document of so many tokens has been drawn from a source."""
        self.documents[source] += 1
        self.tokens[source] += length
        self._all_documents += 1
        self._all_tokens += length
        self._counted += length
        if self._shared() != (self._mean, self._due):
            self._rebuild()
        else:
            self._total -= self._arcs[source]
            self._arcs[source] = self._arc(source)
            self._total += self._arcs[source]

    def _shared(self) -> tuple[int, int]:
        """The mean length of all documents, to an eighth of it, and the tokens that count, to a multiple of that."""
        mean = max(1, self._all_tokens // max(1, self._all_documents))
        coarse = max(0, mean.bit_length() - 4)
        mean = mean >> coarse << coarse
        step = mean * self._grid
        return mean, self._counted // step * step

    def _rebuild(self) -> None:
        self._mean, self._due = self._shared()
        self._step = self._mean * self._grid
        self._arcs = [self._arc(source) for source in range(len(self._shares))]
        self._total = sum(self._arcs)

    def _arc(self, source: int) -> int:
        share = self._shares[source]
        if not share:
            return 0
        tokens = self.tokens[source]
        mean = (tokens + _PRIOR * self._mean << _FINE) // (self.documents[source] + _PRIOR)
        counted, slack = tokens - self._since[source] << _SHARE, _SLACK * mean << _SHARE - _FINE
        behind, ahead = share * self._due - counted - slack, counted - share * (self._due + self._step) - slack
        unit = (_PATIENCE + self._mean // _LONG) * self._mean * max(share, int(_SMALL * (1 << _SHARE)))
        longer, shorter = min(max(behind, 0), _MOST * unit), min(max(ahead, 0), _MOST * unit)
        return max(1, (share * (unit + longer) << 16) // (max(1, mean) * (unit + shorter)))
