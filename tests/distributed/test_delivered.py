"""`load_state_dict(state, delivered=n)` and `skip` on real ranks, where only reading tells where an epoch ends."""

import pickle
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

import rescale_data as rd
from tests.distributed.ranks import run_ranks
from tests.simulate import same_state

GLOBAL_BATCH_SIZE, B, TAKEN = 24, 3, 40
ROWS = rd.DatasetSource([{"tokens": np.arange(i, i + 2 + i % 9)} for i in range(400)], "rows")
PAIRS = [(3, 16), (5, 30), (27, 30), (29, 31), (6, 33), (30, 37), (0, TAKEN)]
"""Micro batches, two a step, after which a state is kept, and up to which the ranks of then delivered. 29 are in an epoch."""


def is_long(row: Any) -> bool:
    return len(row["tokens"]) > 2


def filtered(shard: rd.Shard) -> rd.Node[Any]:
    return rd.Map(rd.Filter(rd.Reader(ROWS, shard), is_long, version=1), lambda row: row["tokens"][:1])


def packed(shard: rd.Shard) -> rd.Node[Any]:
    packer = rd.TokenPacker(rd.Reader(ROWS, shard), column="tokens", seq_len=6, eos_id=None)
    return rd.Map(packer, lambda sample: sample["tokens"])


def taken(loader: rd.DataLoader, num: int) -> list[Any]:
    batches, found = iter(loader), list[Any]()
    while len(found) < num:
        batch = next(batches, None)
        if batch is None:
            batches = iter(loader)
        else:
            found.append(batch.tolist())
    return found


def play(num_logical_shards: int) -> int:
    """Compare the state after what four ranks delivered with the state that they had; return how many pairs were compared."""
    three: Any = dist.new_group([0, 1, 2])
    sizes: dict[str, Any] = {
        "global_batch_size": GLOBAL_BATCH_SIZE,
        "num_logical_shards": num_logical_shards,
        "seed": 1,
    }
    count = 0
    for pipeline in (filtered, packed):
        served = rd.DataLoader(pipeline, micro_batch_size=B, verify=True, **sizes)
        states = [served.state_dict()]
        for _ in range(TAKEN):
            taken(served, 1)
            states.append(served.state_dict())
        for first, stop in PAIRS:
            served.load_state_dict(states[first])
            served.skip((stop - first) * 4 * B)
            assert same_state(served.state_dict(), states[stop]), ("skip", pipeline, first, stop)
        if dist.get_rank() == 3:
            continue
        here, there = (rd.DataLoader(pipeline, mesh=three, micro_batch_size=4, verify=True, **sizes) for _ in range(2))
        for first, stop in PAIRS:
            here.load_state_dict(states[first], delivered=(stop - first) * 4 * B)
            there.load_state_dict(states[stop])
            assert same_state(here.state_dict(), there.state_dict()), (pipeline, first, stop)
            assert taken(here, 5) == taken(there, 5)
            count += 1
    return count


@pytest.mark.parametrize("num_logical_shards", [96, 50], ids=["aligned", "not aligned"])
def test_three_ranks_go_on_behind_what_four_delivered(tmp_path: Path, num_logical_shards: int) -> None:
    found = run_ranks(4, tmp_path, play, num_logical_shards)
    assert found == [2 * len(PAIRS)] * 3 + [0]


def breaks(row: Any) -> bool:
    if FAULT and not next(FAULT[0], None):
        raise OSError("the disk is gone")
    return is_long(row)


FAULT: list[Any] = []


def fragile(shard: rd.Shard) -> rd.Node[Any]:
    return rd.Map(rd.Filter(rd.Reader(ROWS, shard), breaks, version=1), lambda row: row["tokens"][:1])


def error_of(call: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(Exception) as error:
        call(*args, **kwargs)
    return f"{type(error.value).__name__}: {error.value}"


def make_trouble() -> dict[str, Any]:
    me, found = dist.get_rank(), dict[str, Any]()

    def make(pipeline: Any = ROWS, **given: Any) -> rd.DataLoader:
        sizes = {"global_batch_size": 4, "micro_batch_size": 2, "num_logical_shards": 8}
        return rd.DataLoader(pipeline, **sizes, seed=1, collate_fn=list, **given)

    loader = make()
    state = loader.state_dict()
    found["another number"] = error_of(loader.load_state_dict, state, delivered=8 * (me + 1))
    if me:
        error_of(loader.load_state_dict, {})
    loader.load_state_dict(state, delivered=8)
    found["after a load that failed on one rank"] = loader.step
    for repeat in (False, True):
        for num_rows in (0, 20, 60):
            loader, FAULT[:] = make(fragile, repeat=repeat), []
            state = loader.state_dict()
            for call in (loader.skip, lambda n, to=loader, of=state: to.load_state_dict(of, delivered=n)):
                FAULT[:] = [] if me else [iter([True] * num_rows)]
                found[f"a read that fails, {repeat}, {num_rows}, {call}"] = error_of(call, 160)
                FAULT.clear()
    loader = make()
    for skips in (me == 0, me == 1):
        loader.skip(4) if skips else next(iter(loader))
    found["left out on one rank"] = error_of(pickle.dumps, loader.state_dict())
    loader, began = make(timeout=200.0), time.monotonic()
    dist.barrier()
    if me == 0:
        signal.signal(signal.SIGALRM, stop_it)
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        found["a signal while it waits"] = error_of(loader.state_dict)
        found["in time"] = time.monotonic() - began < 120
    dist.barrier()
    return found


def stop_it(*_: Any) -> None:
    raise InterruptedError("preempted")


def test_trouble_on_one_rank_is_an_error_on_all_at_once(tmp_path: Path) -> None:
    one, other = run_ranks(2, tmp_path, make_trouble)
    assert one.pop("a signal while it waits").endswith("preempted")
    assert one.pop("in time")
    for found in (one, other):
        assert found.pop("after a load that failed on one rank") == 2
        assert "different delivered" in found.pop("another number")
        assert "not left out the same" in found.pop("left out on one rank")
    assert len(one) == len(other) == 12
    assert all("the disk is gone" in text for text in one.values())
    assert all("Another dp rank" in text for text in other.values())
