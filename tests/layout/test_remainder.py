"""The remainder of an epoch, redistributed over all ranks, against an order that is played out sample by sample."""

import heapq

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
        turns = [remainder.batch_shards(rank, u) for rank in range(remainder.layout.dp_world_size)]
        found.append(
            [
                list(zip(batch_shards.shards, batch_shards.sample_numbers or [], batch_shards.is_real, strict=True))
                for batch_shards in turns
            ]
        )
        for batch_shards, rows in zip(turns, found[-1], strict=True):
            assert_visits(batch_shards, [shard for shard, _, is_real in rows if is_real])
    return found


def in_rank_order(layout: Layout, micro_batches: list[list[list[Row]]]) -> list[list[Row]]:
    """``[t]`` -> rows of the global batch."""
    a = layout.gradient_accumulation_steps
    steps = [micro_batches[t * a : (t + 1) * a] for t in range(len(micro_batches) // a)]
    return [[row for rank in range(layout.dp_world_size) for part in step for row in part[rank]] for step in steps]


@given(remainders())
def test_a_step_takes_the_shards_that_have_the_most_left_until_less_than_a_step_is_left(remainder: Remainder) -> None:
    """That rest is dropped, or it is the last step, which is padded with the first samples of its own shards."""
    order, o = most_left_first(remainder.samples_left), remainder.layout.global_batch_size
    steps, has_padding = in_rank_order(remainder.layout, rows_of(remainder)), remainder.pads_last_batch
    assert len(steps) == (-(-len(order) // o) if has_padding else len(order) // o)
    assert remainder.num_padded == (-len(order) % o if has_padding else 0)
    for t, rows in enumerate(steps):
        expected = sorted(order[t * o : (t + 1) * o])
        assert [shard for shard, _, is_real in rows if is_real] == expected
        assert {row[:2] for row in rows if not row[2]} <= {(shard, 0) for shard in expected}


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
