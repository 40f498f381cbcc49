"""`rd.plan`: the topologies that keep the order, as data and as a table."""

from typing import Any

import numpy as np
import pytest

import rescale_data as rd
from rescale_data.layout.layout import Layout


@pytest.mark.parametrize(("o", "n"), [(12, None), (24, 24), (60, 30), (7, None), (36, 12)])
def test_is_every_topology_that_is_aligned(o: int, n: int | None) -> None:
    found = {(p.dp_world_size, p.micro_batch_size, p.num_workers) for p in rd.plan(o, num_logical_shards=n)}
    expected = set()
    for w in range(1, o + 1):
        for b in range(1, o + 1):
            for k in (0, 1, 2, 4, 8):
                try:
                    layout = Layout(
                        num_logical_shards=n or 4 * o,
                        global_batch_size=o,
                        dp_world_size=w,
                        micro_batch_size=b,
                        num_workers=k,
                    )
                except ValueError:
                    continue
                if layout.aligned:
                    expected.add((w, b, k))
    assert found == expected


def test_narrowed_to_a_micro_batch_and_workers() -> None:
    plan = rd.plan(768, micro_batch_size=8, num_logical_shards=4 * 768, num_workers=4)
    assert [p.dp_world_size for p in plan] == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 96]
    assert {(p.micro_batch_size, p.num_workers) for p in plan} == {(8, 4)}
    assert all(p.gradient_accumulation_steps * 8 * p.dp_world_size == 768 for p in plan)
    assert plan[0].gradient_accumulation_steps == 96
    assert len(plan) == 12


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"global_batch_size": 0}, "global_batch_size=0: it is at least 1"),
        ({"global_batch_size": 10**25}, "a plan goes through all its divisors, up to 4294967296"),
        ({"global_batch_size": 12, "micro_batch_size": 0}, "micro_batch_size=0: it is at least 1"),
        ({"global_batch_size": 12, "num_logical_shards": -1}, "num_logical_shards=-1: it is at least 1"),
        ({"global_batch_size": 12, "num_workers": -1}, "num_workers=-1: it is at least 0"),
        ({"global_batch_size": 12.0}, "global_batch_size=12.0 is a float; give an int"),
    ],
)
def test_a_number_out_of_range_is_an_error_and_no_empty_table(arguments: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        rd.plan(**arguments)


def test_says_that_nothing_fits() -> None:
    assert str(rd.plan(12, micro_batch_size=5)).startswith(
        "global_batch_size=12, num_logical_shards=48: no ranks, micro batch and workers that were asked for keep the same"
    )


def test_prints_as_a_table() -> None:
    assert str(rd.plan(6, micro_batch_size=2, num_workers=(0, 1, 2, 3))) == (
        "global_batch_size=6, num_logical_shards=24: these keep the same global batches\n"
        "  ranks W  micro batch b  accumulation A  workers K\n"
        "        1              2               3  0, 1, 2, 3\n"
        "        3              2               1  0, 1, 2"
    )
    assert repr(rd.plan(6)) == str(rd.plan(6))


def test_the_default_number_of_shards_keeps_the_order_for_0_1_2_and_4_workers() -> None:
    for o in range(1, 40):
        for w in (w for w in range(1, o + 1) if o % w == 0):
            assert {p.num_workers for p in rd.plan(o, o // w) if p.dp_world_size == w} >= {0, 1, 2, 4}


def test_the_default_number_of_shards_stays_small_and_fits_the_global_batch() -> None:
    found = {o: rd.plan(o, num_workers=0).num_logical_shards for o in (512, 513, 768, 1025, 2048, 6144, 8192, 2053)}
    assert found == {512: 2048, 513: 1026, 768: 1536, 1025: 1025, 2048: 2048, 6144: 1536, 8192: 2048, 2053: 2053}
    assert {option.dp_world_size for option in rd.plan(8192, num_workers=0)} == {2**k for k in range(12)}


@pytest.mark.parametrize("several", [[1024, 1536, 2048], [12, 24], [12, 18], [8, 8], [512, 768, 8192]])
def test_several_global_batches_get_the_topologies_aligned_with_each(several: list[int]) -> None:
    plan = rd.plan(several)
    assert plan.global_batch_sizes == tuple(several)
    assert len(plan) > 1
    for option in plan:
        for o in several:
            layout = Layout(
                num_logical_shards=plan.num_logical_shards,
                global_batch_size=o,
                dp_world_size=option.dp_world_size,
                micro_batch_size=option.micro_batch_size,
                num_workers=option.num_workers,
            )
            assert layout.aligned
    assert len(plan) >= max(len(rd.plan(several, num_logical_shards=4 * o)) for o in several)


def test_prints_one_screen_and_what_n_means() -> None:
    class Small:
        name, num_rows, fragment_bytes = "small", 4608, 1_000_000

    plan = rd.plan([768, 1536], num_workers=(0, 4), sources=[Small(), Small()])
    lines = str(plan).splitlines()
    assert lines[0].startswith("global_batch_size=768, 1536, num_logical_shards=1536: these")
    assert lines[1:3] == [
        "  workers K  ranks W",
        "          0  1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 768",
    ]
    assert "        1 rank(s): 3072 open fragments a rank, 3.07 GB decoded" in lines
    assert "      768 rank(s): 4 open fragments a rank, 4 MB decoded" in lines
    assert lines[-2:] == [
        "    the table in a checkpoint: at least 111 kB",
        "    the smallest source, small: 4608 rows, 3 a logical shard",
    ]
    assert len(plan.table().splitlines()) > 100 > 25 > max(len(lines), 1)
    with pytest.raises(ValueError, match="give one O"):
        rd.plan([])


def test_ints_of_numpy_are_ints() -> None:
    few = rd.plan(np.int8(24), np.int8(2), np.int8(96), [np.int8(2)])  # type: ignore[list-item]
    assert list(few) == list(rd.plan(24, 2, 96, 2))
    assert list(few) == list(rd.plan([np.int8(24)], 2, 96, np.int8(2)))  # type: ignore[arg-type]
