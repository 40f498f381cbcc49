"""`rd.plan`: the topologies that keep the order, as data and as a table."""

import itertools
import re
from typing import Any

import numpy as np
import pytest

import rescale_data as rd
from tests.layout.test_layout import layout_of

Topologies = set[tuple[int, int, int]]


def topologies(plan: Any) -> Topologies:
    return {(option.dp_world_size, option.micro_batch_size, option.num_workers) for option in plan}


def aligned_with(o: int, n: int, workers: Any) -> Topologies:
    """Return every W, b and K that is aligned, by trying them."""
    found = set()
    for w, b, k in itertools.product(range(1, o + 1), range(1, o + 1), workers):
        try:
            layout = layout_of(n, o, w, b, k)
        except ValueError:
            continue
        if layout.aligned:
            found.add((w, b, k))
    return found


@pytest.mark.parametrize(("o", "n"), [(12, None), (24, 24), (60, 30), (7, None), (36, 12)])
def test_is_every_topology_that_is_aligned(o: int, n: int | None) -> None:
    expected = aligned_with(o, n or 4 * o, (0, 1, 2, 4, 8))
    plan = rd.plan(o, num_logical_shards=n)
    assert topologies(plan) == expected
    assert all(p.gradient_accumulation_steps * p.micro_batch_size * p.dp_world_size == o for p in plan)
    assert topologies(rd.plan(o, 2, n, 4)) == {(w, b, k) for w, b, k in expected if (b, k) == (2, 4)}


@pytest.mark.parametrize("several", [[24, 36, 48], [12, 24], [12, 18], [8, 8]])
def test_several_global_batches_get_the_topologies_aligned_with_each(several: list[int]) -> None:
    plan = rd.plan(several, num_workers=(0, 2))
    assert plan.global_batch_sizes == tuple(several)
    aligned = [aligned_with(o, plan.num_logical_shards, (0, 2)) for o in several]
    assert topologies(plan) == set.intersection(*aligned)
    assert len(plan) >= max(len(rd.plan(several, num_logical_shards=4 * o, num_workers=(0, 2))) for o in several) > 1


def test_the_default_number_of_shards_is_small_and_keeps_the_order_for_0_1_2_and_4_workers() -> None:
    for o in range(1, 40):
        for w in (w for w in range(1, o + 1) if o % w == 0):
            assert {p.num_workers for p in rd.plan(o, o // w) if p.dp_world_size == w} >= {0, 1, 2, 4}
    found = {o: rd.plan(o, num_workers=0).num_logical_shards for o in (512, 513, 768, 1025, 2048, 6144, 8192, 2053)}
    assert found == {512: 2048, 513: 1026, 768: 1536, 1025: 1025, 2048: 2048, 6144: 1536, 8192: 2048, 2053: 2053}
    assert {option.dp_world_size for option in rd.plan(8192, num_workers=0)} == {2**k for k in range(12)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"global_batch_size": 0}, "global_batch_size=0: it is at least 1"),
        ({"global_batch_size": []}, "give one O"),
        ({"global_batch_size": "12"}, "global_batch_size='12'"),
        ({"global_batch_size": b"12"}, "global_batch_size=b'12'"),
        ({"global_batch_size": 10**25}, "a plan goes through all its divisors, up to 4294967296"),
        ({"global_batch_size": 12, "micro_batch_size": 0}, "micro_batch_size=0: it is at least 1"),
        ({"global_batch_size": 12, "num_logical_shards": -1}, "num_logical_shards=-1: it is at least 1"),
        ({"global_batch_size": 12, "num_workers": -1}, "num_workers=-1: it is at least 0"),
    ],
)
def test_a_number_out_of_range_is_an_error_and_no_empty_table(arguments: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        rd.plan(**arguments)


def test_ints_of_numpy_are_ints() -> None:
    few = rd.plan(np.int8(24), np.int8(2), np.int8(96), [np.int8(2)])  # type: ignore[list-item]
    assert list(few) == list(rd.plan(24, 2, 96, 2))
    assert list(few) == list(rd.plan([np.int8(24)], 2, 96, np.int8(2)))  # type: ignore[arg-type]


def test_prints_as_a_table() -> None:
    assert str(rd.plan(6, num_workers=(0, 1, 2, 3, 8))).splitlines()[:6] == [
        "global_batch_size=6, num_logical_shards=24: these keep the same global batches",
        "  ranks W  workers K      micro batches b",
        "        1  0, 1, 2, 3, 8  1",
        "        1  0, 1, 2, 3     2",
        "        1  0, 1, 2, 8     3",
        "        1  0, 1, 2        6",
    ]
    many = str(rd.plan(6, num_workers=(0, 1, 2, 3, 6, 12, 24))).splitlines()
    assert many[1:3] == ["  ranks W  workers K              micro batches b", "        1  0, 1, 2, 3, 6, 12, 24  1"]
    assert repr(rd.plan(6)) == str(rd.plan(6))
    assert "no ranks, micro batch and workers that were asked for keep the same" in str(rd.plan(12, micro_batch_size=5))


def test_prints_every_topology_once_and_what_n_means() -> None:
    class Small:
        name, num_rows, fragment_bytes = "small", 4608, 1_000_000

    plan = rd.plan([768, 1536], num_workers=(0, 4), sources=[Small(), Small()])
    lines = str(plan).splitlines()
    assert lines[0].startswith("global_batch_size=768, 1536, num_logical_shards=1536: these")
    rows = [re.split("  +", line.strip()) for line in lines[2:-5]]
    printed = [(int(w), int(b), int(k)) for w, ks, bs in rows for b in bs.split(", ") for k in ks.split(", ")]
    assert sorted(printed) == sorted(topologies(plan))
    assert len(lines) < 60
    assert "        1 rank(s): 3072 open fragments a rank, 3.07 GB decoded" in lines
    assert "      768 rank(s): 4 open fragments a rank, 4 MB decoded" in lines
    assert lines[-2:] == [
        "    the table in a checkpoint: at least 111 kB",
        "    the smallest source, small: 4608 rows, 3 a logical shard",
    ]
