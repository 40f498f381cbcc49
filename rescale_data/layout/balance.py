"""Chooses shards in a layout that is not aligned: a worker serves next the shard with the fewest delivered samples.

Among equals the lowest index comes first. Sample s of shard i is served in the order of the pair (s, i), so that counts
follow in closed form.
"""

from __future__ import annotations

import numpy as np

from rescale_data.state import Ints


def water_fill(delivered: Ints, quotas: Ints, block_starts: Ints) -> Ints:
    """Return how many samples each shard serves if each block of shards serves ``quotas``, fewest delivered first.

    Args:
        delivered: ``int64[M]``, the samples that each shard has delivered.
        quotas: ``int64[B]``, the samples that each block serves.
        block_starts: ``int64[B + 1]``, the first shard of each block, which has one at least, and M.

    Returns:
        ``int64[M]``, adding up to ``quotas`` in each block.
    """
    block_sizes = np.diff(block_starts)
    min_level = np.minimum.reduceat(delivered, block_starts[:-1])
    mid_level = max_level = (np.add.reduceat(delivered, block_starts[:-1]) + quotas) // block_sizes  # if none has more
    while (min_level < max_level).any():  # the highest level that the picks of a block fill for all of its shards
        num_needed = np.add.reduceat(np.maximum(np.repeat(mid_level, block_sizes) - delivered, 0), block_starts[:-1])
        fits = num_needed <= quotas
        min_level, max_level = np.where(fits, mid_level, min_level), np.where(fits, max_level, mid_level - 1)
        mid_level = (min_level + max_level + 1) // 2
    fill_level = np.repeat(min_level, block_sizes)
    num_served = np.maximum(fill_level - delivered, 0)
    num_extra = quotas - np.add.reduceat(num_served, block_starts[:-1])
    is_ready = delivered <= fill_level
    num_before = np.cumsum(is_ready) - is_ready  # ready shards before each, of all blocks, then of its own
    num_before -= np.repeat(num_before[block_starts[:-1]], block_sizes)
    num_served += is_ready & (num_before < np.repeat(num_extra, block_sizes))
    return num_served


def max_samples_served(delivered: Ints, samples_left: Ints, block_starts: Ints) -> Ints:
    """Return how many samples each block of shards can serve, fewest delivered first, before a shard has none left.

    Args:
        delivered: ``int64[M]``, the samples that each shard has delivered.
        samples_left: ``int64[M]``, the samples that each shard has left.
        block_starts: ``int64[B + 1]``, as in `water_fill`.

    Returns:
        ``int64[B]``.
    """
    end_samples, block_sizes, shards = delivered + samples_left, np.diff(block_starts), np.arange(len(delivered))
    lowest_end = np.repeat(np.minimum.reduceat(end_samples, block_starts[:-1]), block_sizes)
    first_shard = np.minimum.reduceat(np.where(end_samples == lowest_end, shards, len(delivered)), block_starts[:-1])
    # (least, first) is the first request (s, i) of a block that cannot be served
    num_before = np.maximum(lowest_end - delivered + (shards < np.repeat(first_shard, block_sizes)), 0)
    return np.add.reduceat(num_before, block_starts[:-1])
