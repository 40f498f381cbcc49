"""Order is a function of integers: properties say what it must be; `tests.golden` pins it (a change is an ORDER break)."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rescale_data.order import encipher, random_words
from rescale_data.rounds import shard_sizes, shard_starts


def test_the_cipher_of_ten_billion_rows_stays() -> None:
    """Of few rows, and in windows, `tests.golden` pins the order."""
    golden = [5777835583, 3623993228, 8107066865, 5160644834, 3730125638, 7724282719]
    assert encipher(np.arange(6), 10**10, "full", 7, 1).tolist() == golden


@given(st.integers(1, 3000) | st.integers(1, 2**62), st.integers(0, 2**70), st.data())
def test_cipher_is_a_permutation_that_stays_inside_whatever_the_size(size: int, seed: int, data: st.DataObject) -> None:
    few = st.sets(st.integers(0, size - 1), max_size=8)
    index = np.arange(size) if size <= 3000 else np.array(sorted(data.draw(few)), dtype=np.int64)
    found = set(encipher(index, size, "full", seed).tolist())
    assert len(found) == len(index)
    assert all(0 <= row < size for row in found)


@pytest.mark.parametrize("size", [3, 4])
def test_cipher_reaches_every_permutation_about_equally(size: int) -> None:
    draws = 400 * int(np.prod(np.arange(1, size + 1)))
    counts = Counter(tuple(encipher(np.arange(size), size, "x", seed).tolist()) for seed in range(draws // 4))
    expected = draws / 4 / np.prod(np.arange(1, size + 1))
    chi_square = sum((count - expected) ** 2 / expected for count in counts.values())
    freedom = np.prod(np.arange(1, size + 1)) - 1
    assert len(counts) == freedom + 1
    assert chi_square < freedom + 5 * np.sqrt(2 * freedom)


def test_seed_and_epoch_are_hashed_not_added() -> None:
    words = {tuple(random_words(4, "fragments", seed, epoch).tolist()) for seed in range(8) for epoch in range(8)}
    assert len(words) == 64


@given(st.integers(0, 2**61), st.integers(1, 5000))
@example(2**61, 2**20 + 1)
def test_shards_partition_the_rows(num_rows: int, num_shards: int) -> None:
    shards = np.arange(num_shards + 1)
    starts = shard_starts(shards, num_rows, num_shards)
    assert starts.tolist() == [i * num_rows // num_shards for i in range(num_shards + 1)]
    sizes = shard_sizes(shards[:-1], num_rows, num_shards)
    assert sizes.sum() == num_rows
    assert sizes.max() - sizes.min() <= 1
