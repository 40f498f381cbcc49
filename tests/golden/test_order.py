"""The first 1,000 global batches of ten runs are those of ``order.json``: another order is a change of kind ORDER.

Order is a function of integers, and properties say what that must be.
"""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rescale_data.order import encipher
from rescale_data.rounds import shard_sizes, shard_starts
from tests.golden.pipelines import RUNS, digests, run

FILE = Path(__file__).parent / "order.json"
NUM_BATCHES, EVERY = 1000, 100


@pytest.mark.parametrize("name", RUNS)
def test_the_order_of_rows_stays(name: str, tmp_path: Path) -> None:
    golden = json.loads(FILE.read_text())
    assert golden.keys() == RUNS.keys()
    assert digests(run(name, tmp_path, NUM_BATCHES), EVERY) == golden[name], (
        "each digest is of 100 global batches; a change on purpose: python -m tests.golden, and a line in CHANGELOG.md"
    )


def test_the_cipher_of_ten_billion_rows_stays() -> None:
    """Of few rows, and in windows, the runs pin it."""
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


@given(st.integers(0, 2**61), st.integers(1, 5000))
@example(2**61, 2**20 + 1)
def test_shards_partition_the_rows(num_rows: int, num_shards: int) -> None:
    shards = np.arange(num_shards + 1)
    starts = shard_starts(shards, num_rows, num_shards)
    assert starts.tolist() == [i * num_rows // num_shards for i in range(num_shards + 1)]
    sizes = shard_sizes(shards[:-1], num_rows, num_shards)
    assert sizes.sum() == num_rows
    assert sizes.max() - sizes.min() <= 1
