"""The order in which a mixture draws from its sources, computed from points on a circle, in integers.

The sources lie on a circle of ``CIRCLE`` parts, each an arc as long as its share. Draw n of logical shard i of N takes the
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

from rescale_data.order import UInts, random_words

CIRCLE = 1 << 64
"""Length of the whole circle. Points are 0 .. CIRCLE - 1."""

_GOLDEN_RATIO = (math.isqrt(5 << 128) - CIRCLE) // 2  # the golden ratio's part of a turn
_SILVER_RATIO = math.isqrt(2 << 128) - CIRCLE
_IRRATIONAL_STEPS = (_GOLDEN_RATIO, CIRCLE - _GOLDEN_RATIO, _SILVER_RATIO, CIRCLE - _SILVER_RATIO)
_NUM_NEAR = 400  # candidates on each side of the middle
_MAX_DENOMINATOR = 10**6  # draws of one shard: beyond, quotients do not matter


@dataclass(frozen=True)
class WeightCircle:
    """The points on the circle that choose the sources for the draws of one logical shard, in constant steps.

    Args:
        start_point: The point of draw 0.
        point_step: Distance from each point to the next.
    """

    start_point: int
    point_step: int

    def point(self, draw: int) -> int:
        return (self.start_point + draw * self.point_step) % CIRCLE

    def points(self, first_draw: int, num_draws: int) -> UInts:
        """Return the points of ``num_draws`` draws, from draw number ``first_draw`` on, as ``uint64[num_draws]``."""
        steps = np.arange(num_draws, dtype=np.uint64) * np.uint64(self.point_step)
        return steps + np.uint64(self.point(first_draw))

    def count(self, first_draw: int, stop_draw: int, arc: Arc) -> int:
        """Return how many of the draws ``first_draw .. stop_draw - 1`` fall into an arc of the circle."""
        num, start_point = stop_draw - first_draw, self.point(first_draw)
        num_before_end = floor_sum(num, self.point_step, start_point - arc[0])
        return num_before_end - floor_sum(num, self.point_step, start_point - arc[1])

    def find_draw(self, first_draw: int, arc: Arc, number: int) -> int:
        """Return the draw that is the ``number``-th (from 0) to fall into a non-empty arc, from ``first_draw`` on."""
        stop = 1
        while self.count(first_draw, first_draw + stop, arc) <= number:
            stop *= 2
        num_draws = bisect_left(range(stop + 1), number + 1, key=lambda n: self.count(first_draw, first_draw + n, arc))
        return first_draw + num_draws - 1

    def first_source_end(self, first_draw: int, stop_draw: int, arcs: list[Arc], limits: list[int]) -> tuple[int, int]:
        """Return the first draw at which an arc has had as many draws as its limit, and the number of that arc.

        Return ``stop_draw`` and -1 if there is none.
        """
        ended_arc = -1
        for number, (arc, limit) in enumerate(zip(arcs, limits, strict=True)):
            if self.count(first_draw, stop_draw, arc) > limit:
                stop_draw, ended_arc = self.find_draw(first_draw, arc, limit), number
        return stop_draw, ended_arc


Arc = tuple[int, int]
"""An arc of the circle: its first point, and the first point after it."""

WHOLE_CIRCLE: Arc = (0, CIRCLE)


def weight_circle_of(shard: int, num_logical_shards: int, path: str = "") -> WeightCircle:
    """Return the points on the circle that choose the sources for the draws of one logical shard.

    Args:
        shard: Index of the shard.
        num_logical_shards: Number of logical shards.
        path: Path of a mixture that is within another one and draws apart from it. Its shards begin at random points: points
            spread regularly, in this way or another, would be correlated with the choices of the mixture above.
    """
    shard_multiplier, step = shard_factor_and_draw_step(num_logical_shards)
    if path:
        return WeightCircle(int(random_words(1, f"mixture/{path}", shard)[0]), step)
    return WeightCircle((shard_multiplier * shard % num_logical_shards) * CIRCLE // num_logical_shards, step)


@lru_cache(maxsize=64)
def shard_factor_and_draw_step(num_logical_shards: int) -> tuple[int, int]:
    """Return two constants of the circle: the factor that shard numbers are multiplied by, and the step between two draws."""
    n = num_logical_shards
    if n == 1:
        return 0, _GOLDEN_RATIO
    golden_step = max(1, (n * _GOLDEN_RATIO + CIRCLE // 2) // CIRCLE)
    numbers = range(max(1, golden_step - _NUM_NEAR), min(n, golden_step + _NUM_NEAR + 1))
    candidates = [factor for factor in numbers if math.gcd(factor, n) == 1]
    factor = min(candidates, key=lambda factor: (*_max_and_sum_of_partial_quotients(factor, n), factor))
    steps = (
        (draw_factor * CIRCLE + irrational_step) // n
        for draw_factor in candidates
        for irrational_step in _IRRATIONAL_STEPS
    )
    return factor, min(steps, key=lambda step: (*_max_and_sum_of_partial_quotients(step, CIRCLE), step))


def _max_and_sum_of_partial_quotients(dividend: int, divisor: int) -> tuple[int, int]:
    """Return the largest partial quotient in the continued fraction of ``dividend / divisor``, and their sum.

    The smaller they are, the more evenly the multiples of the fraction lie. Quotients too deep to matter are left out.
    """
    partial_quotients: list[int] = []
    previous_denominator, denominator = 0, 1
    while divisor and denominator < _MAX_DENOMINATOR:
        partial_quotients.append(dividend // divisor)
        dividend, divisor = divisor, dividend % divisor
        previous_denominator, denominator = denominator, previous_denominator + partial_quotients[-1] * denominator
    return max(partial_quotients[1:]), sum(partial_quotients[1:])


@dataclass(frozen=True)
class WeightArcs:
    """The arcs of all sources of a mixture on the circle, one after the other; lengths are shares.

    Args:
        arc_ends: The end of each arc; the last one is `CIRCLE`.
    """

    arc_ends: tuple[int, ...]

    @cached_property
    def end_points(self) -> UInts:
        """The ends of arcs below `CIRCLE`, as ``uint64``; ``searchsorted(side="right")`` finds sources of points in them."""
        return np.array([end for end in self.arc_ends if end < CIRCLE], dtype=np.uint64)

    def choose_source(self, point: int) -> int:
        """Return the number of the source in whose arc a point lies."""
        return bisect_right(self.arc_ends, point)

    def arc(self, source: int) -> Arc:
        return (self.arc_ends[source - 1] if source else 0, self.arc_ends[source])

    def point_within_arc(self, point: int, source: int) -> int:
        """Return the position of a point within a source's arc, scaled to the whole circle."""
        return scale_arc_to_circle(point, self.arc(source))

    def points_within_arc(self, points: UInts, source: int) -> UInts:
        arc = self.arc(source)
        return np.array([scale_arc_to_circle(point, arc) for point in points.tolist()], dtype=np.uint64)


@lru_cache(maxsize=4096)
def arcs(weights: tuple[float, ...]) -> WeightArcs:
    """Return arcs whose lengths are in proportion to the weights, of which at least one is not 0."""
    return WeightArcs(tuple(accumulate(shares(weights, CIRCLE))))


def shares(weights: tuple[float, ...], whole_amount: int) -> list[int]:
    """Divide the integer ``whole_amount`` into integers in proportion to the weights."""
    exponent = 60 - math.frexp(max(weights))[1]
    integer_weights = [int(math.ldexp(weight, exponent)) for weight in weights]
    total_weight = sum(integer_weights)
    ends = [end * whole_amount // total_weight for end in accumulate(integer_weights)]
    return [stop - start for start, stop in zip([0, *ends], ends, strict=False)]


def scale_arc_to_circle(point: int, arc: Arc) -> int:
    return (point - arc[0]) * CIRCLE // (arc[1] - arc[0])


def scale_circle_to_arc(inner: Arc, outer: Arc) -> Arc:
    """Return the arc inside ``outer`` that becomes ``inner`` if ``outer`` is scaled to the whole circle."""
    outer_length = outer[1] - outer[0]
    return (outer[0] - -inner[0] * outer_length // CIRCLE, outer[0] - -inner[1] * outer_length // CIRCLE)


def floor_sum(num: int, step: int, start: int) -> int:
    """Return the sum of ``floor((start + i * step) / CIRCLE)`` for i in ``range(num)``, in logarithmic time."""
    sum_of_floors, modulus = 0, CIRCLE
    while num > 0:
        sum_of_floors += (num - 1) * num // 2 * (step // modulus) + num * (start // modulus)
        step, start = step % modulus, start % modulus
        stop = step * num + start
        if stop < modulus:
            break
        num, start, step, modulus = stop // modulus, stop % modulus, modulus, step
    return sum_of_floors
