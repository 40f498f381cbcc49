"""Best fit and cumulative lengths."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rescale_data.nodes.packing.fit import best_fit
from rescale_data.nodes.packing.varlen import flat_cu_seqlens


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 4), st.integers(0, 4)), max_size=60),
    st.integers(9, 40),
    st.integers(1, 6),
)
def test_every_item_is_in_one_bin_that_holds_it(items: list[tuple[int, int, int]], capacity: int, most: int) -> None:
    """By its length, by the number of items, and by other sizes of which 4 are the most."""
    lengths, *others = zip(*items, strict=True) if items else ((), (), ())
    for limited in ([], others):
        bins = best_fit(lengths, capacity, most, [(sizes, 4) for sizes in limited])
        assert sorted(item for chosen in bins for item in chosen) == list(range(len(items)))
        for chosen in bins:
            assert 1 <= len(chosen) <= most
            assert chosen == sorted(chosen)
            assert sum(lengths[i] for i in chosen) <= capacity
            assert all(sum(sizes[i] for i in chosen) <= 4 for sizes in limited)


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
