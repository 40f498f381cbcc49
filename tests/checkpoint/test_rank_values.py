"""What all ranks hold under one name is one value, or each rank's own where that is said."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from rescale_data import checkpoint
from rescale_data.checkpoint import CheckpointManager, PerRank
from rescale_data.checkpoint.rank_values import source_rank
from tests.checkpoint.processes import run
from tests.checkpoint.stand_in import StandInLoader


class Point(NamedTuple):
    x: int
    y: int


@dataclass
class Progress:
    best: int


class Phase(Enum):
    WARM = "warm"
    HOT = "hot"


def said(work: Any) -> str:
    try:
        work()
    except ValueError as error:
        return str(error)
    return "saved"


def disagree(folder: str) -> list[str]:
    rank = dist.get_rank()
    norm = nn.BatchNorm1d(2)
    norm.running_mean.fill_(rank)  # type: ignore[union-attr]
    same = {
        "w": torch.arange(5000.0),
        "epoch": 3,
        "lr": [0.1, 0.2],
        "norm": norm,
        "all classes": (Point(1, 2), Progress(3), Phase.HOT, frozenset("abc"), OrderedDict(a=1)),
        "part of a row": (torch.arange(2.0)[::2], "cpu"),
        f"stage-{rank}": torch.full((3,), rank),
    }
    states: dict[str, dict[str, Any]] = {
        "same": same,
        "number": same | {"epoch": 3 + rank},
        "nested": same | {"extra": {"seeds": [1, rank]}},
        "array": same | {"numpy": {"state": np.random.RandomState(rank).get_state()}},
        "tuple": same | {"rng": (torch.full((2,), rank), "cpu")},
        "set": same | {"seen": ({"rows": {rank, 7}},)},
        "bytes": same | {"raw": bytearray([rank])},
        "ordered": same | {"pair": (OrderedDict(seen=rank),)},
        "named": same | {"point": Point(1, rank)},
        "dataclass": same | {"progress": Progress(rank)},
        "enum": same | {"phase": [*Phase][rank]},
    }
    found = [said(lambda name=name: checkpoint.save(f"{folder}/{name}", states[name])) for name in states]
    found.append(said(lambda: checkpoint.save(f"{folder}/step", same, step=rank)))
    found.append(said(lambda: checkpoint.save(f"{folder}/other-{rank}", same)))
    with CheckpointManager(f"{folder}/run") as manager:
        manager.save(5 + rank, {"w": torch.ones(2)})
        found.append(said(manager.wait))
        manager.save(7, {"w": torch.ones(2), "seed": rank})
        found.append(said(manager.wait))
        manager.save(8, {"w": torch.ones(2)})
    return [*found, str(manager.steps())]


def test_ranks_that_disagree_are_an_error_on_all(tmp_path: Path) -> None:
    first, second = run(2, disagree, str(tmp_path))
    assert first == second
    words = [
        "saved",
        "epoch, on ranks 0 and 1",
        "extra.seeds, on",
        "numpy.state, on",
        "rng, on",
        "seen, on",
        "raw, on",
        "pair, on",
        "point, on",
        "progress, on",
        "phase, on",
        "step of step 1. Give",
        *["they name 2"] * 2,
        "seed, on",
    ]
    assert [word in text for word, text in zip(words, first[:-1], strict=True)] == [True] * 15, first
    assert first[-1] == "[8]"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["run", "same"]


def of_rank(rank: int) -> dict[str, Any]:
    loader = StandInLoader()
    loader.advance(rank + 1)
    return {
        "tensor": PerRank(torch.full((2,), float(rank))),
        "plain": PerRank(("rng", rank)),
        "loader": PerRank(loader),
        "w": 1,
    }


def save_own(folder: str) -> None:
    checkpoint.save(f"{folder}/c", of_rank(dist.get_rank()))


def load_own(folder: str) -> tuple[Any, ...]:
    state = of_rank(17)
    report = checkpoint.load(f"{folder}/c", state)
    assert report.not_asked == ()
    return state["tensor"].value.tolist(), state["plain"].value, state["loader"].value.step


def test_a_rank_gets_its_own_back_and_on_another_world_size_by_its_number(tmp_path: Path) -> None:
    run(2, save_own, str(tmp_path))
    expected = [([float(rank)] * 2, ("rng", rank), rank + 1) for rank in (0, 1, 0)]
    assert run(3, load_own, str(tmp_path)) == expected
    assert load_own(str(tmp_path)) == expected[0], "one process"


def test_a_rank_without_a_value_of_its_own_is_told(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "c", {"w": 1})
    with pytest.raises(ValueError, match=r"missing in the checkpoint: rng.rank-0"):
        checkpoint.load(tmp_path / "c", {"w": 1, "rng": PerRank(torch.zeros(2))})
    checkpoint.save(tmp_path / "all", {"w": 1, "rng": torch.zeros(2)})  # of all ranks
    with pytest.raises(ValueError, match=r"missing in the checkpoint: rng.rank-0"):
        checkpoint.load(tmp_path / "all", {"w": 1, "rng": PerRank(torch.zeros(2))})


def test_the_source_of_each_rank() -> None:
    assert [source_rank({"rank-0", "rank-1", "x"}, rank) for rank in range(5)] == [0, 1, 0, 1, 0]
    assert source_rank(set(), 3) == 3
