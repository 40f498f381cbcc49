"""The remainder of an epoch, redistributed over all ranks, against an order that is played out sample by sample."""

import heapq
from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rescale_data.layout.layout import Layout
from rescale_data.layout.remainder import Remainder
from tests.layout.test_layout import assert_visits, layouts

Row = tuple[int, int, bool]  # shard, number of its sample, whether it is real


@st.composite
def remainders(draw: st.DrawFn) -> Remainder:
    layout = draw(layouts())
    n = layout.num_logical_shards
    left = draw(st.lists(st.integers(0, 7), min_size=n, max_size=n).filter(any))
    samples = draw(st.lists(st.integers(0, 9), min_size=n, max_size=n))
    return Remainder(layout, np.array(left), np.array(samples), draw(st.booleans()))


def most_left_first(left: np.ndarray) -> list[int]:
    """The order of the remainder: before every sample, the shard with the most samples left, the lowest among equals."""
    heap = [(-count, shard) for shard, count in enumerate(left.tolist()) if count]
    heapq.heapify(heap)
    order = []
    while heap:
        count, shard = heapq.heappop(heap)
        order.append(shard)
        if count + 1:
            heapq.heappush(heap, (count + 1, shard))
    return order


def rows_of(remainder: Remainder) -> list[list[list[Row]]]:
    """``[u][rank]`` -> rows of the micro batch."""
    found: list[list[list[Row]]] = []
    for u in range(remainder.num_micro_batches):
        turns = [remainder.turn(rank, u) for rank in range(remainder.layout.dp_world_size)]
        found.append([list(zip(turn.shards, turn.sample_numbers or [], turn.is_real, strict=True)) for turn in turns])
        for turn, rows in zip(turns, found[-1], strict=True):
            assert_visits(turn, [shard for shard, _, is_real in rows if is_real])
    return found


def in_rank_order(layout: Layout, micro_batches: list[list[list[Row]]]) -> list[list[Row]]:
    """``[t]`` -> rows of the global batch."""
    a = layout.gradient_accumulation_steps
    steps = [micro_batches[t * a : (t + 1) * a] for t in range(len(micro_batches) // a)]
    return [[row for rank in range(layout.dp_world_size) for part in step for row in part[rank]] for step in steps]


@given(remainders())
def test_every_sample_is_served_once_or_counted(remainder: Remainder) -> None:
    real = Counter((s, i) for part in rows_of(remainder) for rank in part for s, i, is_real in rank if is_real)
    first = {
        (s, remainder.start_samples[s] + j)
        for s, count in enumerate(remainder.samples_left.tolist())
        for j in range(count)
    }
    assert set(real.values()) <= {1}
    assert real.keys() <= first
    dropped = remainder.num_samples - int(remainder.samples_delivered(remainder.num_micro_batches).sum())
    assert sum(real.values()) + dropped == remainder.num_samples
    assert dropped < remainder.layout.global_batch_size
    assert not remainder.pads_last_batch or (real.keys() == first and dropped == 0)


@given(remainders())
def test_padding_fills_the_last_step_with_shards_of_its_own(remainder: Remainder) -> None:
    steps = in_rank_order(remainder.layout, rows_of(remainder))
    padded = [[row[:2] for row in step if not row[2]] for step in steps]
    assert [len(rows) for rows in padded[:-1]] == [0] * len(padded[:-1])
    assert sum(map(len, padded)) == remainder.num_padded < remainder.layout.global_batch_size
    if steps:
        assert set(padded[-1]) <= {(shard, 0) for shard, _, is_real in steps[-1] if is_real}


@given(remainders())
def test_a_step_takes_the_shards_that_have_the_most_left(remainder: Remainder) -> None:
    order, o = most_left_first(remainder.samples_left), remainder.layout.global_batch_size
    for t, rows in enumerate(in_rank_order(remainder.layout, rows_of(remainder))):
        assert [shard for shard, _, is_real in rows if is_real] == sorted(order[t * o : (t + 1) * o])


@given(remainders())
def test_at_every_micro_batch_a_shard_has_delivered_a_prefix(remainder: Remainder) -> None:
    served: dict[int, list[int]] = {shard: [] for shard in range(len(remainder.samples_left))}
    for u, part in enumerate(rows_of(remainder)):
        assert remainder.samples_delivered(u).tolist() == [len(numbers) for numbers in served.values()]
        for rank in part:
            for shard, number, is_real in rank:
                if is_real:
                    served[shard].append(number)
        for shard, numbers in served.items():
            assert sorted(numbers) == list(
                range(remainder.start_samples[shard], remainder.start_samples[shard] + len(numbers))
            )
    assert remainder.samples_delivered(remainder.num_micro_batches).tolist() == [
        len(numbers) for numbers in served.values()
    ]
