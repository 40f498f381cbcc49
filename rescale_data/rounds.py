"""Divides the rows of an epoch among the logical shards, as contiguous ranges whose sizes differ by at most one.

Of fewer rows than shards some ranges are empty. Then all ranges move on from epoch to epoch, so that every shard reads every
range once in N epochs, a *round*; by how much is a hash of (seed, round). Rows are shuffled anew in each round.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from rescale_data.order import random_words
from rescale_data.state import Ints


def shard_starts(shards: Ints, num_rows: int, num_logical_shards: int) -> Ints:
    """Return the first row of each logical shard, in fragment order; ``num_rows`` for shard number ``num_logical_shards``."""
    min_rows, num_extra_rows = divmod(num_rows, num_logical_shards)
    return shards * min_rows + shards * num_extra_rows // num_logical_shards  # i * R // N without its overflow


def shard_sizes(shards: Ints, num_rows: int, num_logical_shards: int) -> Ints:
    """Return the number of rows of each logical shard in one epoch; they differ by at most one."""
    return shard_starts(shards + 1, num_rows, num_logical_shards) - shard_starts(shards, num_rows, num_logical_shards)


def row_range_index(shard: int, epoch: int, num_rows: int, num_logical_shards: int, seed: int) -> int:
    """Return the number of the range that one shard reads in one epoch of fewer rows than shards."""
    round_number, round_epoch = divmod(epoch, num_logical_shards)
    first_range, range_stride = _first_range_and_stride(num_logical_shards, seed, round_number)
    return (shard + first_range + range_stride * round_epoch) % num_logical_shards


def next_epoch_with_rows(shard: int, epoch: int, num_rows: int, num_logical_shards: int, seed: int) -> int:
    """Return the first epoch, from ``epoch`` on, in which a shard has a row, in logarithmic time."""
    n = num_logical_shards
    while num_rows < n:
        # Range j has a row where j * R mod N is N - R at least.
        residue = row_range_index(shard, epoch, num_rows, n, seed) * num_rows % n
        step = _first_range_and_stride(n, seed, epoch // n)[1] * num_rows % n
        low, high = n - num_rows - residue, n - 1 - residue
        epochs_to_row = 0 if low <= 0 else _first_multiple_within(step, n, low, high)
        if epoch % n + epochs_to_row < n and epochs_to_row >= 0:
            return epoch + epochs_to_row
        epoch += n - epoch % n  # none in the rest of this round, and some in each
    return epoch


def _first_multiple_within(factor: int, modulus: int, low: int, high: int) -> int:
    """Return the smallest i with ``low <= factor * i % modulus <= high``, where 0 < low; -1 if there is none."""
    if not factor:
        return -1
    first_index = -(-low // factor)
    if first_index * factor <= high:
        return first_index
    modulus_wraps = _first_multiple_within(modulus % factor, factor, -high % factor, -low % factor)
    return -1 if modulus_wraps < 0 else -(-(low + modulus * modulus_wraps) // factor)


def rows_before(shards: Ints, epochs: Ints, num_rows: int, num_logical_shards: int, seed: int) -> Ints:
    """Return the number of rows that shards have in all epochs before the given ones, ``int64[M]``."""
    if num_rows >= num_logical_shards:
        return epochs * shard_sizes(shards, num_rows, num_logical_shards)
    rounds, round_epochs = np.divmod(epochs, num_logical_shards)
    ranges_and_strides = [_first_range_and_stride(num_logical_shards, seed, number) for number in rounds.tolist()]
    first_ranges, strides = np.array(ranges_and_strides).reshape(-1, 2).T
    # Range j has floor((j + 1) * R / N) - floor(j * R / N) rows, whatever multiple of N is added to j.
    offset, factor = (shards + first_ranges) % num_logical_shards * num_rows, strides * num_rows
    starts, stops = (floor_sum(round_epochs, num_logical_shards, factor, offset + extra) for extra in (0, num_rows))
    return rounds * num_rows + stops - starts


@lru_cache(maxsize=1024)
def _first_range_and_stride(num_logical_shards: int, seed: int, round_number: int) -> tuple[int, int]:
    """Return shard 0's first range in a round (N epochs) and the stride from epoch to epoch, which is coprime to N."""
    words = random_words(2, "ranges", seed, round_number).tolist()
    first_range, range_stride = (int(word) % num_logical_shards for word in words)
    while math.gcd(range_stride, num_logical_shards) != 1:
        range_stride += 1
    return first_range, range_stride


def floor_sum(num_terms: Ints, modulus: int | Ints, factor: Ints, offset: Ints) -> Ints:
    """Return the sum of ``(factor * i + offset) // modulus`` over ``0 <= i < num_terms``, in logarithmic time."""
    floor_sums = np.zeros_like(num_terms)
    while True:
        floor_sums += (num_terms - 1) * num_terms // 2 * (factor // modulus) + num_terms * (offset // modulus)
        factor, offset = factor % modulus, offset % modulus
        end = factor * num_terms + offset
        has_terms_left = end >= modulus
        if not has_terms_left.any():
            return floor_sums
        num_terms, offset = np.where(has_terms_left, end // modulus, 0), np.where(has_terms_left, end % modulus, 0)
        modulus, factor = np.where(has_terms_left, factor, 1), np.where(has_terms_left, modulus, 0)
