"""Arcs for a mixture by tokens, in which the length of a document is known only after it has been drawn.

The circle is the same as by samples, over draws of documents. The arc of a source is its weight divided by the mean length of
its documents so far in this logical shard. It is longer if the source is behind in tokens by more than two of its documents,
and shorter if it is ahead by more than two. The points of the circle alone keep the source within two. So documents of equal
length are drawn as by samples, and global batches are as even. All of this follows from counts, in integers: if a last bit
differed between processors, the order would differ.

The values that all sources share, the mean length and the tokens so far, change in steps. A source is behind or ahead if it is
so at both ends of the present step. So a draw mostly changes the arc of its own source alone. A source that rests counts for
nothing: it may be left out between segments of a run.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from operator import gt, mul

import numpy as np

from rescale_data.errors import DataStateError
from rescale_data.nodes.mixture.circle import CIRCLE, shares
from rescale_data.nodes.reading.extension import kernel
from rescale_data.order import UInts
from rescale_data.state import Ints

_PRIOR_DOCS = 20  # documents of the overall mean length that are added to each source's own
_SLACK_DOCUMENTS = 2  # documents of a source by which its tokens may differ from its share
_DOUBLING_DEFICIT = 6  # a deficit of so many further documents, in an even mixture, doubles the arc of a source
# One document more for each 256 tokens of mean length: shards that follow long ones closely swing together
_MEAN_TOKENS_PER_DEFICIT_DOC = 256
_MAX_DEFICIT_DOUBLINGS = 3  # largest deficit that counts, in multiples of one that doubles the arc
_DOCS_PER_UPDATE = 1  # documents a source after which the shared values change
_MIN_SHARE = 1 / 50  # smaller shares count as this one when deficits are judged
_SHARE_BITS, _MEAN_BITS = 32, 8  # bits of a share, and fraction bits of a mean length
_MAX_MEAN = 1 << 22  # a longer mean document counts as this one: products then fit 127 bits in C


class TokenWeightArcs:
    """The arcs on the circle of one logical shard's sources at one position, for a mixture by tokens.

    Args:
        weights: Weight of each source; 0 for a source that rests.
        num_documents: Number of documents drawn from each source.
        tokens: Number of tokens in these documents.
        old_tokens: Number of those tokens that were drawn with other weights, and so count neither as ahead nor as behind.
    """

    def __init__(
        self, weights: tuple[float, ...], num_documents: Sequence[int], tokens: Sequence[int], old_tokens: Sequence[int]
    ) -> None:
        if any(map(gt, old_tokens, tokens)):
            raise DataStateError(
                "By the state a mixture had drawn more tokens when its weights changed than it has drawn now: the state was "
                "changed or damaged. Load another checkpoint."
            )
        self._shares = shares(weights, 1 << _SHARE_BITS)
        is_active = [share > 0 for share in self._shares]
        self._docs_per_update = _DOCS_PER_UPDATE * sum(is_active)
        active_counts = ([*map(mul, is_active, counts)] for counts in (num_documents, tokens, old_tokens))
        num_documents, active_source_tokens, self._old_tokens = active_counts
        self._inactive_source_tokens = sum(tokens) - sum(active_source_tokens)
        self._set_counts(num_documents, active_source_tokens)

    def _set_counts(self, documents: Sequence[int], tokens: Sequence[int]) -> None:
        self.num_documents, self.tokens = list(documents), list(tokens)
        self._total_documents, self._total_tokens = sum(documents), sum(tokens)
        self._new_tokens = self._total_tokens - sum(self._old_tokens)
        self._rebuild_arcs()

    @property
    def num_tokens(self) -> int:
        """Number of tokens drawn from all sources, sources of weight 0 included."""
        return self._total_tokens + self._inactive_source_tokens

    def choose_source(self, point: int) -> int:
        """Return the number of the source in whose arc a point lies."""
        return bisect_right([*accumulate(self._arc_lengths)], point * self._total_arc_length // CIRCLE)

    def point_within_arc(self, point: int, source: int) -> int:
        """Return the position of a point within a source's arc, scaled to the whole circle."""
        return (point * self._total_arc_length - sum(self._arc_lengths[:source]) * CIRCLE) // self._arc_lengths[source]

    def counters(self) -> Ints:
        """Return ``int64[5, S]``, the working values of `choose_sources`: five numbers for each of S sources.

        They are its share, its documents, its tokens, the tokens that do not count, and its draws in the run (0).
        """
        counts = [0] * len(self.tokens)
        return np.array([self._shares, self.num_documents, self.tokens, self._old_tokens, counts], dtype=np.int64)

    def choose_sources(
        self, points: UInts, sources: Ints, first_draw: int, counters: Ints, lengths: list[Ints | None], change_at: int
    ) -> tuple[int, int]:
        """Choose the sources of draws, from ``first_draw`` on, until the length of a document is missing or weights may change.

        Args:
            points: ``[num]``, the points of the draws.
            sources: ``[num]``; the source of each draw is written here.
            first_draw: Number of the first draw.
            counters: The result of `counters`; updated here.
            lengths: Lengths of the documents that each source yields in this run, as far as they are known.
            change_at: Number of tokens of all sources after which to stop; -1 for no end.

        Returns:
            The number of the next draw, and the source whose length is missing for it, or -1.
        """
        change_at_active_tokens = -1 if change_at < 0 else max(0, change_at - self._inactive_source_tokens)
        return kernel.run(first_draw, change_at_active_tokens, points, sources, counters, *lengths)

    def draw_fractions(self) -> list[float]:
        """Return the approximate fraction of draws that each source gets, over many draws."""
        sources = zip(self._shares, self.num_documents, self.tokens, strict=True)
        prior_tokens = _PRIOR_DOCS * self._mean
        draw_rates = [share * (docs + _PRIOR_DOCS) / max(1, tokens + prior_tokens) for share, docs, tokens in sources]
        total_rate = sum(draw_rates)
        return [rate / total_rate for rate in draw_rates]

    def add_document(self, source: int, length: int) -> None:
        """Count a document of ``length`` tokens that was drawn from a source, and update the arcs."""
        self.num_documents[source] += 1
        self.tokens[source] += length
        self._total_documents += 1
        self._total_tokens += length
        self._new_tokens += length
        if self._mean_and_token_floor() != (self._mean, self._new_tokens_floor):
            self._rebuild_arcs()
        else:
            self._total_arc_length -= self._arc_lengths[source]
            self._arc_lengths[source] = self._arc_length(source)
            self._total_arc_length += self._arc_lengths[source]

    def _mean_and_token_floor(self) -> tuple[int, int]:
        """Return the rounded mean document length and the rounded token count, on which the arcs of all sources depend.

        They are the mean length of all documents, to within an eighth, and the tokens that count, to whole steps.
        """
        mean_length = min(max(1, self._total_tokens // max(1, self._total_documents)), _MAX_MEAN)
        num_dropped_bits = max(0, mean_length.bit_length() - 4)
        mean_length = mean_length >> num_dropped_bits << num_dropped_bits
        tokens_per_update = mean_length * self._docs_per_update
        return mean_length, self._new_tokens // tokens_per_update * tokens_per_update

    def _rebuild_arcs(self) -> None:
        self._mean, self._new_tokens_floor = self._mean_and_token_floor()
        self._tokens_per_update = self._mean * self._docs_per_update
        self._arc_lengths = [self._arc_length(source) for source in range(len(self._shares))]
        self._total_arc_length = sum(self._arc_lengths)

    def _arc_length(self, source: int) -> int:
        share = self._shares[source]
        if not share:
            return 0
        tokens = self.tokens[source]
        mean_length = (tokens + _PRIOR_DOCS * self._mean << _MEAN_BITS) // (self.num_documents[source] + _PRIOR_DOCS)
        new_tokens = tokens - self._old_tokens[source] << _SHARE_BITS
        token_tolerance = _SLACK_DOCUMENTS * mean_length << _SHARE_BITS - _MEAN_BITS
        token_deficit = share * self._new_tokens_floor - new_tokens - token_tolerance
        token_surplus = new_tokens - share * (self._new_tokens_floor + self._tokens_per_update) - token_tolerance
        documents_per_unit = _DOUBLING_DEFICIT + self._mean // _MEAN_TOKENS_PER_DEFICIT_DOC
        unit = documents_per_unit * self._mean * max(share, int(_MIN_SHARE * (1 << _SHARE_BITS)))
        clipped_deficit = min(max(token_deficit, 0), _MAX_DEFICIT_DOUBLINGS * unit)
        clipped_surplus = min(max(token_surplus, 0), _MAX_DEFICIT_DOUBLINGS * unit)
        return max(1, (share * (unit + clipped_deficit) << 16) // (max(1, mean_length) * (unit + clipped_surplus)))
