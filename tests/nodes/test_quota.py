"""The order of a mixture stays near the weights in every prefix, and global batches are mixtures."""

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rescale_data.nodes.quota import Order, TokenOrder, shares

weights = st.lists(
    st.sampled_from([0, 0.05, 0.1, 0.25, 0.3, 1, 2, 7]) | st.floats(0.001, 10), min_size=1, max_size=6
).filter(any)
shards = st.none() | st.tuples(st.integers(0, 5), st.integers(0, 200))


@given(weights, shards, st.integers(1, 300))
@settings(max_examples=60)
def test_samples_deviate_by_less_than_one_in_every_prefix(
    weights: list[float], shard: tuple[int, int] | None, length: int
) -> None:
    order, counts = Order(shares(tuple(weights)), shard), [0] * len(weights)
    total = sum(Fraction(repr(float(w))) for w in weights)
    for n in range(1, length + 1):
        counts[order.next(counts)] += 1
        for weight, count in zip(weights, counts, strict=True):
            assert abs(count - n * Fraction(repr(float(weight))) / total) < 1


@given(weights, st.lists(st.sampled_from([0, 1, 3, 40, 1000]) | st.integers(1, 90), min_size=1, max_size=300))
@example([11] + [1] * 11, [1] * 300)
@settings(max_examples=150)
def test_tokens_deviate_by_at_most_twice_the_longest_so_far(weights: list[float], lengths: list[int]) -> None:
    order, counts, longest = TokenOrder(shares(tuple(weights))), [0] * len(weights), 0
    total = sum(Fraction(repr(float(w))) for w in weights)
    for length in lengths:
        counts[order.next([*counts, longest])] += length
        longest = max(longest, length)
        drawn = sum(counts)
        for weight, count in zip(weights, counts, strict=True):
            assert abs(count - drawn * Fraction(repr(float(weight))) / total) <= 2 * longest


@pytest.mark.parametrize("weights", [(0.5, 0.3, 0.2), (0.45, 0.25, 0.15, 0.1, 0.05), (6, 3, 1), (0.41234, 0.3333, 0.2)])
def test_so_it_is_wherever_a_logical_shard_begins(weights: tuple[float, ...]) -> None:
    whole = shares(weights)
    for shard in range(150):
        order, counts = Order(whole, (0, shard)), [0] * len(whole)
        for n in range(1, 41):
            counts[order.next(counts)] += 1
            assert all(
                abs(count * sum(whole) - n * share) < sum(whole) for count, share in zip(counts, whole, strict=True)
            )


@given(weights, st.integers(0, 3))
@settings(max_examples=30)
def test_the_order_follows_from_counts_alone(weights: list[float], seed: int) -> None:
    kept, counts = Order(shares(tuple(weights)), (seed, 1)), [0] * len(weights)
    for _ in range(60):
        chosen = kept.next(counts)
        assert Order(shares(tuple(weights)), (seed, 1)).next(counts) == chosen
        counts[chosen] += 1


@pytest.mark.parametrize(
    ("weights", "tolerance"), [([0.5, 0.5], 0.1), ([0.9, 0.1], 0.1), ([0.5, 0.3, 0.2], 0.2), ([0.41234, 0.58766], 0.1)]
)
def test_what_all_shards_draw_at_a_time_is_a_mixture(weights: list[float], tolerance: float) -> None:
    """Not all of one source, as it would be if all logical shards followed one order."""
    orders = [Order(shares(tuple(weights)), (0, shard)) for shard in range(256)]
    all_counts = [[0] * len(weights) for _ in orders]
    for _ in range(50):
        drawn: Counter[int] = Counter()
        for order, counts in zip(orders, all_counts, strict=True):
            chosen = order.next(counts)
            counts[chosen] += 1
            drawn[chosen] += 1
        for i, weight in enumerate(weights):
            assert abs(drawn[i] / len(orders) - weight) < tolerance


def test_weights_are_what_is_written() -> None:
    assert shares((0.7, 0.2, 0.1)) == (7, 2, 1)
    assert shares((3, 0, 6)) == (1, 0, 2)


@given(weights)
def test_a_source_of_weight_0_rests(weights: list[float]) -> None:
    weights = [*weights, 0]
    order, counts = Order(shares(tuple(weights)), (0, 0)), [0] * len(weights)
    for _ in range(40):
        counts[order.next(counts)] += 1
    assert all(count == 0 for weight, count in zip(weights, counts, strict=True) if weight == 0)
