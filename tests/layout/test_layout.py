"""The arithmetic of who serves what, against its definition and against runs that are played out sample by sample."""

import dataclasses
import heapq
import itertools
import re
from collections import Counter

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import rescale_data as rd
from rescale_data.layout.batch_shards import AlignedBatchShards, BatchShards, UnalignedBatchShards
from rescale_data.layout.layout import Layout
from rescale_data.layout.remainder import Remainder

GRID = [(96, 24), (24, 24), (24, 96), (12, 36), (12, 12), (48, 12), (30, 60)]
WORKERS = (0, 1, 2, 3, 4, 6, 8)


def layout_of(n: int, o: int, w: int, b: int, k: int = 0) -> Layout:
    return Layout(num_logical_shards=n, global_batch_size=o, dp_world_size=w, micro_batch_size=b, num_workers=k)


def by_definition(n: int, o: int, step: int) -> list[int]:
    """The shard of each row of a global batch, as docs/design.md, 4, writes it."""
    if n % o == 0:
        tracks = n // o
        return [q * tracks + step % tracks for q in range(o)]
    return [q // (o // n) for q in range(o)]


def assert_visits(batch_shards: BatchShards, shards: list[int]) -> None:
    """A turn says which rows of the table it visits, and how often."""
    visited = np.zeros(512, np.int64)  # more than any N here
    visited[batch_shards.rows] += batch_shards.samples_per_shard
    assert (visited == np.bincount(np.array(shards, np.int64), minlength=512)).all()


def global_batches(layout: Layout, num_steps: int) -> list[list[tuple[int, int]]]:
    """``[t]`` -> (shard, number of its sample) of each row in rank order; samples are numbered as time goes by."""
    a, taken, batches = layout.gradient_accumulation_steps, Counter[int](), []
    turns = [AlignedBatchShards(layout, rank) for rank in range(layout.dp_world_size)]
    for t in range(num_steps):
        rows: list[list[tuple[int, int]]] = [[] for _ in turns]
        for u, rank in itertools.product(range(t * a, (t + 1) * a), range(len(turns))):
            batch_shards = turns[rank].batch_shards(u)
            assert_visits(batch_shards, batch_shards.shards)
            for shard in batch_shards.shards:
                rows[rank].append((shard, taken[shard]))
                taken[shard] += 1
        batches.append([row for rank in rows for row in rank])
    return batches


@pytest.mark.parametrize(("n", "o"), GRID)
def test_every_aligned_topology_gives_the_same_global_batches(n: int, o: int) -> None:
    num_steps = 2 * max(1, n // o) + 1
    taken, expected = Counter[int](), []
    for step in range(num_steps):
        batch = []
        for shard in by_definition(n, o, step):
            batch.append((shard, taken[shard]))
            taken[shard] += 1
        expected.append(batch)
    topologies = rd.plan(o, num_logical_shards=n, num_workers=WORKERS)
    assert len(topologies) > 20
    for each in topologies:
        layout = layout_of(n, o, each.dp_world_size, each.micro_batch_size, each.num_workers)
        assert global_batches(layout, num_steps) == expected, layout


@st.composite
def layouts(draw: st.DrawFn, max_ranks: int = 6) -> Layout:
    """Any topology that is allowed, aligned or not."""
    w, b, a = draw(st.integers(1, max_ranks)), draw(st.integers(1, 5)), draw(st.integers(1, 4))
    k = draw(st.integers(0, 3))
    o = w * b * a
    n = draw(st.sampled_from([o, 2 * o, 4 * o, *(d for d in range(1, o) if o % d == 0), w * max(k, 1), 7, 12, 30]))
    try:
        return layout_of(n, o, w, b, k)
    except ValueError:
        assume(False)
        raise


@given(layouts())
def test_a_misfit_names_values_that_keep_the_order(layout: Layout) -> None:
    """The cure that a warning names works: nothing else has to change with it."""
    assert layout.aligned == (layout.unaligned_reason is None)
    cures = (layout.unaligned_reason or "").partition("keeps the order: ")[2]
    for name, texts in re.findall(r"(\w+)=(\d+(?: or \d+)?)", cures):
        values = [int(value) for value in texts.split(" or ")]
        assert 1 <= len(values) <= 2
        assert all(dataclasses.replace(layout, **{name: value}).aligned for value in values)
        between = range(min(values) + 1, max(values)) if len(values) == 2 else []
        assert not any(fits(layout, name, value) for value in between)


def fits(layout: Layout, name: str, value: int) -> bool:
    try:
        return dataclasses.replace(layout, **{name: value}).aligned
    except ValueError:
        return False


def fewest_first(samples: list[int], num_picks: int) -> list[int]:
    """Return the order by its definition: a search for the smallest pair (samples, shard) before every pick."""
    now, picks = list(samples), []
    for _ in range(num_picks):
        shard = min(range(len(now)), key=lambda i: (now[i], i))
        now[shard] += 1
        picks.append(shard)
    return picks


@given(layouts(), st.data())
def test_not_aligned_each_worker_serves_of_its_own_block_the_shard_with_the_fewest_samples(
    layout: Layout, data: st.DataObject
) -> None:
    n, k, b = layout.num_logical_shards, layout.workers_per_rank, layout.micro_batch_size
    if n < layout.dp_world_size * k:
        return
    samples = np.array(data.draw(st.lists(st.integers(0, 12), min_size=n, max_size=n)))  # as after any load
    for rank in range(layout.dp_world_size):
        turns = UnalignedBatchShards(layout, rank, samples)
        taken: list[list[int]] = [[] for _ in range(k)]
        for u in range(3 * k):
            batch_shards = turns.batch_shards(u)
            assert_visits(batch_shards, batch_shards.shards)
            taken[u % k] += batch_shards.shards
        for worker, shards in enumerate(taken):
            block = layout.owned_shards(rank, worker)
            own = samples[block.start : block.stop].tolist()
            assert shards == [block.start + shard for shard in fewest_first(own, 3 * b)]


@given(layouts())
def test_what_a_worker_serves_is_what_its_micro_batches_come_from(layout: Layout) -> None:
    for rank in range(layout.dp_world_size):
        here: list[int] = []
        for worker in range(layout.workers_per_rank):
            served = layout.served_shards(rank, worker).tolist()
            here += served
            if layout.aligned:
                turns = AlignedBatchShards(layout, rank)
                micro_batches = range(worker, 2 * layout.batch_period, layout.workers_per_rank)
                assert served == sorted({shard for u in micro_batches for shard in turns.batch_shards(u).shards})
        assert sorted(here) == list(layout.owned_shards(rank))  # each shard has one worker


# The remainder of an epoch, redistributed over all ranks

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
    assert remainder.num_padding_samples == (-len(order) % o if has_padding else 0)
    for t, rows in enumerate(steps):
        expected = sorted(order[t * o : (t + 1) * o])
        assert [shard for shard, _, is_real in rows if is_real] == expected
        assert {row[:2] for row in rows if not row[2]} <= {(shard, 0) for shard in expected}
