"""Best fit and cumulative lengths."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rescale_data.nodes.packing.fit import best_fit
from rescale_data.nodes.packing.varlen import flat_cu_seqlens


@given(st.lists(st.integers(1, 20), max_size=60), st.integers(20, 40), st.integers(1, 6))
def test_every_item_is_in_one_bin_that_holds_it(lengths: list[int], capacity: int, max_items: int) -> None:
    bins = best_fit(lengths, capacity, max_items)
    assert sorted(item for items in bins for item in items) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in items) <= capacity for items in bins)
    assert all(1 <= len(items) <= max_items and items == sorted(items) for items in bins)


@given(st.lists(st.integers(1, 20), max_size=60))
def test_few_bins(lengths: list[int]) -> None:
    bins = best_fit(lengths, 20, 100)
    least = -(-sum(lengths) // 20)
    assert len(bins) <= least * 2
    assert sum(sum(lengths[i] for i in items) * 2 <= 20 for items in bins) <= 1  # two that are half empty would be one


def test_takes_the_bin_with_the_least_room() -> None:
    assert best_fit([6, 5, 4, 3], 10, 9) == [[0, 2], [1, 3]]


@pytest.mark.parametrize(
    ("rows", "flat", "longest"),
    [([[0, 3, 8, 8, 8], [0, 8, 8, 8, 8]], [0, 3, 8, 16], 8), ([[0, 2, 4, 5, 8]], [0, 2, 4, 5, 8], 3)],
)
def test_cumulative_lengths_of_a_batch(rows: list[list[int]], flat: list[int], longest: int) -> None:
    found, length = flat_cu_seqlens(torch.tensor(rows, dtype=torch.int32))
    assert (found.tolist(), found.dtype, length) == (flat, torch.int32, longest)
