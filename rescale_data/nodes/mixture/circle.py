"""The order in which a mixture draws from its sources: points on a circle, pure functions of integers.

The sources lie on a circle of ``TURN`` parts, each an arc as long as its share. Draw n of logical shard i of N takes the
source in whose arc this point falls:

    k * i / N  +  n * (k2 + x) / N     of a turn, k and k2 coprime to N, x the golden ratio or one like it

The points of one shard are spread like multiples of the golden ratio (Weyl's sequence): among any n of them, the number in an
arc is off by O(log n) draws. The points of all shards at one draw are evenly spaced, since k is coprime to N. So are the points
of O shards in turn, if O divides N; k2 keeps them so while shards stand at different draws. k and k2 have small partial
quotients, so neighbouring shards and successive draws lie far apart: micro batches are mixtures too. Nothing is counted: the
source of any draw is known at once, and the number of draws of a range that fall into an arc is a sum of floors.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate

import numpy as np

from rescale_data.order import Words, random_words

TURN = 1 << 64
"""Length of the whole circle. Points are 0 .. TURN - 1."""

_GOLDEN = (math.isqrt(5 << 128) - TURN) // 2  # the golden ratio's part of a turn
_SILVER = math.isqrt(2 << 128) - TURN
_PARTS = (_GOLDEN, TURN - _GOLDEN, _SILVER, TURN - _SILVER)
_SPAN = 400  # candidates on each side of the middle
_MANY_DRAWS = 10**6  # draws of one shard: beyond, quotients do not matter


@dataclass(frozen=True)
class Circle:
    """The points of one logical shard.

    Args:
        start: The point of draw 0.
        step: Distance from each point to the next.
    """

    start: int
    step: int

    def point(self, draw: int) -> int:
        return (self.start + draw * self.step) % TURN

    def points(self, first: int, num_draws: int) -> Words:
        """Return the points of the draws from ``first`` on, ``uint64[num_draws]``."""
        steps = np.arange(num_draws, dtype=np.uint64) * np.uint64(self.step)
        return steps + np.uint64(self.point(first))

    def count(self, first: int, stop: int, arc: Arc) -> int:
        """Count the draws ``first .. stop - 1`` that fall into an arc."""
        num, at = stop - first, self.point(first)
        return floor_sum(num, self.step, at - arc[0]) - floor_sum(num, self.step, at - arc[1])

    def find(self, first: int, arc: Arc, number: int) -> int:
        """Return draw number ``number`` (from 0) among the draws from ``first`` on that fall into an arc that is not empty."""
        stop = 1
        while self.count(first, first + stop, arc) <= number:
            stop *= 2
        counts = bisect_left(range(stop + 1), number + 1, key=lambda n: self.count(first, first + n, arc))
        return first + counts - 1


Arc = tuple[int, int]
"""The points from the first number up to the second, which is excluded."""

WHOLE: Arc = (0, TURN)


def circle_of(shard: int, num_logical_shards: int, path: str = "") -> Circle:
    """Return the points of a logical shard.

    Args:
        shard: Index of the shard.
        num_logical_shards: Number of logical shards.
        path: Path of a mixture that is within another one and draws apart from it. Its shards begin at random points: points
            spread regularly, in this way or another, would be correlated with the choices of the mixture above.
    """
    k, step = constants(num_logical_shards)
    if path:
        return Circle(int(random_words(1, f"mixture/{path}", shard)[0]), step)
    return Circle((k * shard % num_logical_shards) * TURN // num_logical_shards, step)


@lru_cache(maxsize=64)
def constants(num_logical_shards: int) -> tuple[int, int]:
    """Return k, and the step from draw to draw, ``(k2 + x) / N`` of a turn."""
    n = num_logical_shards
    if n == 1:
        return 0, _GOLDEN
    middle = max(1, (n * _GOLDEN + TURN // 2) // TURN)
    candidates = [k for k in range(max(1, middle - _SPAN), min(n, middle + _SPAN + 1)) if math.gcd(k, n) == 1]
    k = min(candidates, key=lambda k: (*_quotients(k, n), k))
    steps = ((k2 * TURN + part) // n for k2 in candidates for part in _PARTS)
    return k, min(steps, key=lambda step: (*_quotients(step, TURN), step))


def _quotients(p: int, q: int) -> tuple[int, int]:
    """Return the largest and the sum of the partial quotients of p / q that matter.

    The smaller they are, the more evenly its multiples lie.
    """
    found: list[int] = []
    before, denominator = 0, 1
    while q and denominator < _MANY_DRAWS:
        found.append(p // q)
        p, q = q, p % q
        before, denominator = denominator, before + found[-1] * denominator
    return max(found[1:]), sum(found[1:])


@dataclass(frozen=True)
class Arcs:
    """The arcs of sources, one behind the other.

    Args:
        ends: The end of each arc; the last one is `TURN`.
    """

    ends: tuple[int, ...]

    @cached_property
    def words(self) -> Words:
        """The ends other than `TURN`; ``searchsorted(side="right")`` finds the sources of points in them."""
        return np.array([end for end in self.ends if end < TURN], dtype=np.uint64)

    def choose(self, point: int) -> int:
        """Return the source in whose arc a point falls."""
        return bisect_right(self.ends, point)

    def arc(self, source: int) -> Arc:
        return (self.ends[source - 1] if source else 0, self.ends[source])

    def stretch(self, point: int, source: int) -> int:
        """Return the place of a point of a source's arc when the arc is stretched to the whole circle."""
        return stretched(point, self.arc(source))

    def stretch_all(self, points: Words, source: int) -> Words:
        arc = self.arc(source)
        return np.array([stretched(point, arc) for point in points.tolist()], dtype=np.uint64)


@lru_cache(maxsize=4096)
def arcs(weights: tuple[float, ...]) -> Arcs:
    """Return arcs in proportion to the weights, at least one of which is not 0."""
    return Arcs(tuple(accumulate(shares(weights, TURN))))


def shares(weights: tuple[float, ...], whole: int) -> list[int]:
    """Return the parts of ``whole`` in proportion to the weights: integers from the bits of the weights, with sum ``whole``."""
    exponent = 60 - math.frexp(max(weights))[1]
    exact = [int(math.ldexp(weight, exponent)) for weight in weights]
    total = sum(exact)
    ends = [end * whole // total for end in accumulate(exact)]
    return [stop - start for start, stop in zip([0, *ends], ends, strict=False)]


def stretched(point: int, arc: Arc) -> int:
    return (point - arc[0]) * TURN // (arc[1] - arc[0])


def within(inner: Arc, outer: Arc) -> Arc:
    """Return the part of ``outer`` whose points `stretched` moves into ``inner``."""
    length = outer[1] - outer[0]
    return (outer[0] - -inner[0] * length // TURN, outer[0] - -inner[1] * length // TURN)


def floor_sum(num: int, step: int, start: int) -> int:
    """Return the sum of ``floor((start + i * step) / TURN)`` for i in ``range(num)``, by the steps of Euclid's algorithm."""
    total, modulus = 0, TURN
    while num > 0:
        total += (num - 1) * num // 2 * (step // modulus) + num * (start // modulus)
        step, start = step % modulus, start % modulus
        last = step * num + start
        if last < modulus:
            break
        num, start, step, modulus = last // modulus, last % modulus, modulus, step
    return total
