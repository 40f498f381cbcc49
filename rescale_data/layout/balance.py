"""Serving the shard that has delivered the fewest samples, the lowest index first: what a worker does where a layout is
not aligned. Sample s of shard i is served in the order of the pair (s, i), so that counts follow in closed form.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from rescale_data.state import Ints


class Fewest:
    """The order itself: which shard is next.

    Args:
        samples: What each shard has delivered.
        first: Index of the first of these shards.
    """

    def __init__(self, samples: Sequence[int], first: int) -> None:
        self._heap = [(s, first + i) for i, s in enumerate(samples)]
        heapq.heapify(self._heap)

    def pick(self) -> int:
        samples, shard = self._heap[0]
        heapq.heapreplace(self._heap, (samples + 1, shard))
        return shard


def water_fill(samples: Ints, num_picks: int) -> Ints:
    """How many of the next ``num_picks`` samples each shard serves.

    Args:
        samples: ``int64[M]``, what each has delivered.

    Returns:
        ``int64[M]``, adding up to ``num_picks``.
    """
    low, high = int(samples.min()), int(samples.min()) + num_picks
    while low < high:  # the highest level that the picks fill for all shards
        middle = (low + high + 1) // 2
        low, high = (middle, high) if np.maximum(middle - samples, 0).sum() <= num_picks else (low, middle - 1)
    counts = np.maximum(low - samples, 0)
    ready = np.flatnonzero(samples <= low)
    counts[ready[: num_picks - int(counts.sum())]] += 1
    return counts


def feasible_picks(samples: Ints, left: Ints) -> int:
    """How many samples are served before the order asks a shard that has none left.

    Args:
        samples: ``int64[M]``, what each has delivered.
        left: ``int64[M]``, what each still has.
    """
    end = samples + left
    shard = int(np.lexsort((np.arange(len(end)), end))[0])  # the first request (s, i) that cannot be served
    before = np.maximum(end[shard] - samples + (np.arange(len(end)) < shard), 0)
    return int(before.sum())
