"""In which order a mixture draws from its sources, from counts alone: pure functions of integers.

Samples: source i has a share w_i of all. R. Tijdeman, "The chairman assignment problem" (1980), draws so that after n samples
source i has given w_i * n of them, to within 1 - 1 / (2k - 2) for k sources, for every n. Among the sources that are
not ahead it takes the one that would be late first.

Tokens: how many a sample has is known once it is drawn. The same rule in units of the longest sample so far, L: sources
that are not ahead, the earliest deadline first. No source gets ahead by more than L, nor behind by more than 2 L.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache

import numpy as np

from rescale_data.order import permutation, random_words
from rescale_data.state import Ints

Shares = tuple[int, ...]
"""Whole numbers in the proportion of the weights; 0 for a source that is not drawn from."""

_TABLE = 1024
_VARIANTS = 16


@lru_cache(maxsize=1024)
def shares(weights: tuple[float, ...]) -> Shares:
    """The weights as whole numbers in the same proportion, 0.7 being 7/10."""
    exact = [Fraction(repr(float(weight))) for weight in weights]
    denominator = math.lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * denominator) for weight in exact]
    return tuple(weight // math.gcd(*whole) for weight in whole)


def by_samples(shares: Shares, counts: Sequence[int]) -> int:
    """The next source, when ``counts`` samples have been drawn from each; no share is 0."""
    total, n, slack = sum(shares), sum(counts) + 1, max(1, 2 * len(shares) - 2)
    best, best_late = -1, 0
    for i, (share, count) in enumerate(zip(shares, counts, strict=True)):
        if slack * (n * share - count * total) < total:
            continue
        late = (count + 1) * slack - 1  # over share: when it would be late
        if best < 0 or late * shares[best] < best_late * share:
            best, best_late = i, late
    return best


class Order:
    """The order by samples of one logical shard.

    Every order keeps the bound of one sample. Which of them a logical shard follows depends on its index: so that
    what all shards draw at a time, a global batch, is a mixture too. Sources of share 0 do not change it.

    Args:
        shard: Seed and index; `None` for an order that does not depend on them.
    """

    def __init__(self, shares: Shares, shard: tuple[int, int] | None) -> None:
        self._sources = [i for i, share in enumerate(shares) if share]
        self._shares = shares = tuple(share for share in shares if share)
        which, at, back = (0, 0, 0) if shard is None else random_words(3, "mixture", *shard).tolist()
        self._cycle: tuple[int, ...] = ()
        if sum(shares) <= _TABLE:
            order, starts = _cycle(shares, which % _VARIANTS if shard else 0)
            start = starts[at % len(starts)]
            turned = order[start:] + order[:start]
            self._cycle = turned[::-1] if back % 2 else turned
        else:
            starts = _beginnings(shares)
            self._begin = starts[at % len(starts)]

    def next(self, counts: Sequence[int]) -> int:
        """The next source, when ``counts`` samples have been drawn from each."""
        if self._cycle:
            return self._sources[self._cycle[sum(counts) % len(self._cycle)]]
        drawn = [counts[i] + begin for i, begin in zip(self._sources, self._begin, strict=True)]
        return self._sources[by_samples(self._shares, drawn)]


class TokenOrder:
    """The order by tokens."""

    def __init__(self, shares: Shares) -> None:
        self._shares = shares

    def next(self, counts: Sequence[int]) -> int:
        """The next source, when ``counts[:-1]`` tokens have been drawn from each, and ``counts[-1]`` at most at once."""
        total, drawn, longest = sum(self._shares), sum(counts[:-1]), max(counts[-1], 1)
        best, best_late = -1, 0
        for i, (share, count) in enumerate(zip(self._shares, counts, strict=False)):
            if not share or count * total > drawn * share:
                continue
            late = count + longest  # over share: when it would be late
            if best < 0 or late * self._shares[best] < best_late * share:
                best, best_late = i, late
        return best


@lru_cache(maxsize=1024)
def _cycle(shares: Shares, variant: int) -> tuple[tuple[int, ...], list[int]]:
    """One order of the sources until it repeats, and the places at which one may begin and stay within one sample."""
    names = permutation(len(shares), "mixture/order", variant).tolist() if variant else list(range(len(shares)))
    permuted, total = tuple(shares[name] for name in names), sum(shares)
    order, counts = _draw(permuted, total)
    ahead = counts * total - np.arange(total)[:, None] * np.array(permuted)  # in units of a sample over the total
    within = (ahead.max(axis=0) - ahead < total) & (ahead - ahead.min(axis=0) < total)
    return tuple(names[i] for i in order), np.flatnonzero(within.all(axis=1)).tolist()


@lru_cache(maxsize=64)
def _beginnings(shares: Shares) -> list[tuple[int, ...]]:
    """Counts with which one may begin in an order that repeats late: so little ahead or behind as the bound leaves room for."""
    total, slack = sum(shares), max(1, 2 * len(shares) - 2)
    _, counts = _draw(shares, _TABLE)
    return [
        tuple(row)
        for n, row in enumerate(counts.tolist())
        if all(slack * abs(count * total - n * share) < total for count, share in zip(row, shares, strict=True))
    ]


def _draw(shares: Shares, num_samples: int) -> tuple[list[int], Ints]:
    """The order of the first samples, and the counts before each."""
    order: list[int] = []
    counts = np.zeros((num_samples + 1, len(shares)), dtype=np.int64)
    for n in range(num_samples):
        order.append(by_samples(shares, counts[n].tolist()))
        counts[n + 1] = counts[n]
        counts[n + 1, order[-1]] += 1
    return order, counts[:-1]
