"""What is wrong on one rank, or not the same on all, is one error on all; and values that are each rank's own."""

import math
from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import rescale_data as rd
from rescale_data import checkpoint
from rescale_data.checkpoint import CheckpointManager, PerRank
from tests.checkpoint.steps import data, flip, loader_at
from tests.distributed.ranks import fails, run_ranks
from tests.distributed.segments import Logged


class Point(NamedTuple):
    x: int
    y: int


@dataclass
class Progress:
    best: int


class Phase(Enum):
    WARM = "warm"
    HOT = "hot"


def of_all(rank):
    norm = nn.BatchNorm1d(2)
    norm.running_mean.fill_(rank)
    return {
        "w": torch.arange(5000.0),
        "epoch": 3,
        "lr": [0.1, 0.2],
        "norm": norm,
        "all classes": (Point(1, 2), Progress(3), Phase.HOT, frozenset("abc"), OrderedDict(a=1)),
        "part of a row": (torch.arange(2.0)[::2], "cpu"),
        f"stage-{rank}": torch.full((3,), rank),
    }


DIFFERENT = {
    "epoch": lambda rank: {"epoch": 3 + rank},
    "extra.seeds": lambda rank: {"extra": {"seeds": [1, rank]}},
    "numpy.state": lambda rank: {"numpy": {"state": np.random.RandomState(rank).get_state()}},
    "rng": lambda rank: {"rng": (torch.full((2,), rank), "cpu")},
    "seen": lambda rank: {"seen": ({"rows": {rank, 7}},)},
    "raw": lambda rank: {"raw": bytearray([rank])},
    "pair": lambda rank: {"pair": (OrderedDict(seen=rank),)},
    "point": lambda rank: {"point": Point(1, rank)},
    "progress": lambda rank: {"progress": Progress(rank)},
    "phase": lambda rank: {"phase": [*Phase][rank]},
}


def disagree(folder):
    rank = dist.get_rank()
    checkpoint.save(f"{folder}/same", of_all(rank))
    for name, of in DIFFERENT.items():
        fails(f"{name}, on ranks 0 and 1", checkpoint.save, f"{folder}/c", of_all(rank) | of(rank))
    loss, reverse = {"loss": 1.0, "accuracy": math.nan}, {"accuracy": math.nan, "loss": 1.0}
    with Logged() as said:
        for metrics in ((loss, reverse), ({"loss": 0.5}, {"loss": 1.5}), (loss, None)):
            checkpoint.save(f"{folder}/same", {"w": 1}, metrics=metrics[rank], overwrite=True)
    assert len(said) == (rank == 0), "a warning of the first rank"
    assert not said or "{'loss': 0.5} on the first and {'loss': 1.5}" in said[0]
    fails("of step 1. Give", checkpoint.save, f"{folder}/c", {"w": 1}, step=rank)
    fails("they name 2", checkpoint.save, f"{folder}/other-{rank}", {"w": 1})
    with CheckpointManager(f"{folder}/run") as manager:
        for step, seed, words in ((5 + rank, 0, "they name 2"), (7, rank, "seed, on ranks 0 and 1")):
            manager.save(step, {"w": torch.ones(2), "seed": seed})
            fails(words, manager.wait)
        manager.save(8, {"w": torch.ones(2), "seed": 0})
        manager.wait()
        assert manager.steps() == [8], "saves go on behind an error"
    fails("async_mode= differs", CheckpointManager, f"{folder}/run", async_mode=["thread", "disabled"][rank])
    fails("async_mode='x'", CheckpointManager, f"{folder}/run", async_mode=["thread", "x"][rank])
    fails("keep_latest", CheckpointManager, f"{folder}/run", keep_latest=[1, 0][rank])


def test_ranks_that_disagree_are_an_error_on_all(tmp_path):
    run_ranks(2, disagree, str(tmp_path))
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["run", "same"]


class FailsOnRankOne:
    def __init__(self, *, loads=False):
        self.loads = loads

    def state_dict(self):
        if dist.get_rank() == 1 and not self.loads:
            raise RuntimeError("no state on this rank")
        return {"a": 1}

    def load_state_dict(self, state_dict):
        if dist.get_rank() == 1:
            raise RuntimeError("no load on this rank")


def fail_on_rank_one(folder):
    """One rank refuses each call, in which the others meet in a collective of the loader: nobody waits there for it."""
    is_odd = dist.get_rank() == 1
    loader = rd.DataLoader(range(48), global_batch_size=12, micro_batch_size=6, num_logical_shards=24, timeout=10)
    unsavable, unloadable = {"value": FailsOnRankOne()}, {"value": FailsOnRankOne(loads=True)}
    step, metrics = "one" if is_odd else 1, {"loss": "low" if is_odd else 1}
    checkpoint.save(f"{folder}/whole", {**unloadable, "loader": loader})
    checkpoint.save(f"{folder}/ranks", {"rank": {f"{is_odd:d}": torch.full((100,), int(is_odd))}})

    def save(manager, *given, **more):
        manager.save(*given, **more)
        manager.wait()

    for mode in ("disabled", "thread"):
        manager = CheckpointManager(f"{folder}/{mode}", async_mode=mode)
        fails("step='one'", save, manager, step, {"loader": loader})
        fails("step=-1", save, manager, -1 if is_odd else 1, {"loader": loader})
        fails("'loss'", save, manager, 1, {"loader": loader}, metrics=metrics)
        fails("no state", save, manager, 1, {**unsavable, "loader": loader})
        manager.save(3, {"loader": loader})
        manager.close()
        assert manager.steps() == [3], "saves go on behind an error"
    path, ranks, own = f"{folder}/whole", f"{folder}/ranks", torch.zeros(100, dtype=torch.int64)
    fails("no state", checkpoint.save, f"{folder}/c", {**unsavable, "loader": loader})
    fails("keys are strings", checkpoint.save, f"{folder}/c", {1: 1} if is_odd else {"loader": loader})
    fails("'loss'", checkpoint.save, f"{folder}/c", {"loader": loader}, metrics=metrics)
    fails("no state", checkpoint.load, path, {**unsavable, "loader": loader})
    fails("no load", checkpoint.load, path, {**unloadable, "loader": loader})
    fails("a name of its own", checkpoint.load, path, {"value": [loader_at()] if is_odd else unloadable["value"]})
    words = r"missing in the checkpoint: rank.2, a int64 tensor of shape \[100\] in the state \(on rank 1\)"
    fails(words, checkpoint.load, ranks, {"rank": {f"{2 * is_odd}": own}})
    if is_odd:
        flip(data(Path(ranks)) / "__1_0.distcp", 700)
    dist.barrier()
    fails("__1_0.distcp is not what was saved", checkpoint.load, ranks, {"rank": {f"{is_odd:d}": own}})


def test_what_is_wrong_on_one_rank_is_an_error_on_all(tmp_path):
    run_ranks(2, fail_on_rank_one, str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disabled", "ranks", "thread", "whole"]


def own(rank):
    loader = loader_at(rank + 1)
    tensor = PerRank(torch.full((2,), float(rank)))
    return {"tensor": tensor, "plain": PerRank(("rng", rank)), "loader": PerRank(loader), "w": 1}


def save_own(folder):
    checkpoint.save(f"{folder}/c", own(dist.get_rank()))


def load_own(folder):
    state = own(17)
    report = checkpoint.load(f"{folder}/c", state)
    assert report.not_asked == ()
    return state["tensor"].value.tolist(), state["plain"].value, state["loader"].value.step


def test_a_rank_gets_its_own_back_and_on_another_world_size_by_its_number(tmp_path):
    run_ranks(2, save_own, str(tmp_path))
    expected = [([float(rank)] * 2, ("rng", rank), rank + 1) for rank in (0, 1, 0)]
    assert run_ranks(3, load_own, str(tmp_path)) == expected
    assert load_own(str(tmp_path)) == expected[0], "one process"


def test_a_rank_without_a_value_of_its_own_is_told(tmp_path):
    for name, saved in (("none", {"w": 1}), ("of all ranks", {"w": 1, "rng": torch.zeros(2)})):
        checkpoint.save(tmp_path / name, saved)
        with pytest.raises(ValueError, match=r"missing in the checkpoint: rng.rank-0"):
            checkpoint.load(tmp_path / name, {"w": 1, "rng": PerRank(torch.zeros(2))})
