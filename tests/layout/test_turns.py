"""Serving the shard that has delivered the fewest samples: the closed forms against the order itself."""

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rescale_data.layout.balance import FewestFirst, feasible_picks, water_fill
from rescale_data.layout.layout import Layout
from rescale_data.layout.turns import AlignedTurns, BalancedTurns
from tests.layout.test_layout import assert_visits, layouts

counts = st.lists(st.integers(0, 15), min_size=1, max_size=8)


def picked(samples: list[int], num_picks: int) -> list[int]:
    """The order by its definition: a search for the smallest pair (samples, shard) before every pick."""
    now, picks = list(samples), []
    for _ in range(num_picks):
        shard = min(range(len(now)), key=lambda i: (now[i], i))
        now[shard] += 1
        picks.append(shard)
    return picks


@given(counts, st.integers(0, 60), st.integers(0, 100))
def test_fewest_first(samples: list[int], num_picks: int, first: int) -> None:
    fewest = FewestFirst(samples, first)
    assert [fewest.pick_shard() for _ in range(num_picks)] == [first + shard for shard in picked(samples, num_picks)]


@given(st.lists(st.tuples(counts, st.integers(0, 60)), min_size=1, max_size=4))
def test_water_fill_counts_the_picks_of_each_block(blocks: list[tuple[list[int], int]]) -> None:
    found = [Counter(picked(samples, num_picks)) for samples, num_picks in blocks]
    expected = [here[shard] for here, (samples, _) in zip(found, blocks, strict=True) for shard in range(len(samples))]
    samples, starts = joined([samples for samples, _ in blocks])
    assert water_fill(samples, np.array([num_picks for _, num_picks in blocks]), starts).tolist() == expected


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 15), st.integers(0, 6)), min_size=1, max_size=8), min_size=1, max_size=4)
)
def test_feasible_picks_stop_before_a_shard_that_has_none_left(blocks: list[list[tuple[int, int]]]) -> None:
    (samples, starts), (left, _) = (joined([[shard[i] for shard in block] for block in blocks]) for i in range(2))
    for block, feasible in zip(blocks, feasible_picks(samples, left, starts).tolist(), strict=True):
        picks = picked([samples for samples, _ in block], feasible + 1)
        served, last = Counter(picks), picks[-1]
        assert served[last] == block[last][1] + 1
        assert all(served[shard] <= block[shard][1] for shard in range(len(block)) if shard != last)


def joined(blocks: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """All blocks in one array, and where each begins."""
    return np.array([value for block in blocks for value in block]), np.cumsum([0, *map(len, blocks)])


@given(layouts(), st.data())
def test_each_worker_serves_its_own_block_in_that_order(layout: Layout, data: st.DataObject) -> None:
    n, k, b = layout.num_logical_shards, layout.workers, layout.micro_batch_size
    if n < layout.dp_world_size * k:
        return
    samples = np.array(data.draw(st.lists(st.integers(0, 9), min_size=n, max_size=n)), dtype=np.int64)
    for rank in range(layout.dp_world_size):
        turns = BalancedTurns(layout, rank, samples)
        taken: list[list[int]] = [[] for _ in range(k)]
        for u in range(3 * k):
            turn = turns.turn(u)
            assert_visits(turn, n)
            taken[u % k] += turn.shards
        for worker, shards in enumerate(taken):
            block = layout.owned(rank, worker)
            own = samples[block.start : block.stop].tolist()
            assert shards == [block.start + shard for shard in picked(own, 3 * b)]


@given(layouts())
def test_what_a_worker_serves_is_what_its_micro_batches_come_from(layout: Layout) -> None:
    for rank in range(layout.dp_world_size):
        here: list[int] = []
        for worker in range(layout.workers):
            served = layout.served(rank, worker).tolist()
            here += served
            if layout.aligned:
                turns = AlignedTurns(layout, rank)
                micro_batches = range(worker, 2 * layout.period, layout.workers)
                assert served == sorted({shard for u in micro_batches for shard in turns.turn(u).shards})
        assert sorted(here) == list(layout.owned(rank))  # each shard has one worker
