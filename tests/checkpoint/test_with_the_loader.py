"""The real loader in a manager's checkpoints: the rows are those of the step that was saved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch.distributed as dist

import rescale_data as rd
from rescale_data import checkpoint
from tests.checkpoint.processes import run
from tests.states import opened


class Squares:
    def __len__(self) -> int:
        return 480

    def __getitem__(self, index: int) -> int:
        return index * index


def make_loader(num_logical_shards: int = 24, **options: Any) -> rd.DataLoader:
    distributed = dist.is_initialized()
    rank, size = (dist.get_rank(), dist.get_world_size()) if distributed else (0, 1)
    where: dict[str, Any] = {} if distributed else {"dp_rank": rank, "dp_world_size": size}
    return rd.DataLoader(
        Squares(),
        global_batch_size=12,
        micro_batch_size=12 // size,
        num_logical_shards=num_logical_shards,
        seed=3,
        repeat=True,
        **where,
        **options,
    )


def batches(loader: rd.DataLoader, steps: int) -> list[list[int]]:
    """Global batches in rank order."""
    found, iterator = [], iter(loader)
    for _ in range(steps):
        batch = next(iterator).tolist()
        parts: list[Any] = [batch]
        if dist.is_initialized():
            parts = [None] * dist.get_world_size()
            dist.all_gather_object(parts, batch)
        found.append([value for part in parts for value in part])
    return found


def save_and_read_on(folder: str, mode: Any) -> list[list[int]]:
    loader = make_loader()
    with checkpoint.CheckpointManager(folder, async_mode=mode) as manager:
        batches(loader, 5)
        manager.save(5, {"loader": loader})
        return batches(loader, 6)


def resume(folder: str) -> list[list[int]]:
    loader = make_loader()
    with checkpoint.CheckpointManager(folder) as manager:
        assert manager.load_latest({"loader": loader}) == 5
    assert loader.step == 5
    return batches(loader, 6)


@pytest.mark.parametrize("mode", ["thread", "disabled"])
def test_saved_on_two_ranks_and_resumed_on_three_and_one(tmp_path: Path, mode: str) -> None:
    expected = run(2, save_and_read_on, str(tmp_path / "run"), mode)[0]
    assert run(3, resume, str(tmp_path / "run"))[0] == expected
    assert resume(str(tmp_path / "run")) == expected
    path = tmp_path / "run" / "step-5"
    assert opened(checkpoint.read_data_state(path))["samples"] == 60
    loader = make_loader()
    rd.checkpoint.check_checkpoint(path, loader)
    checkpoint.load(path, {"loader": loader})
    assert batches(loader, 6) == expected


def mixed(num_logical_shards: int) -> rd.DataLoader:
    def pipeline(shard: rd.Shard) -> rd.WeightedSampler:
        return rd.WeightedSampler({name: rd.Reader(range(99), shard) for name in "ab"}, {"a": 1, "b": 1})

    return rd.DataLoader(pipeline, global_batch_size=12, num_logical_shards=num_logical_shards, repeat=True)


@pytest.mark.parametrize("make", [make_loader, mixed], ids=["rows", "mixture"])
def test_another_number_of_shards_is_one_error(tmp_path: Path, make: Callable[[int], rd.DataLoader]) -> None:
    checkpoint.save(tmp_path / "c", {"loader": make(24)})
    shape = r"different: loader\.table, a int64 tensor of shape \[24, \d+\] in the checkpoint"
    with pytest.raises(ValueError, match=shape + r"[\s\S]*num_logical_shards is fixed for a whole run"):
        checkpoint.load(tmp_path / "c", {"loader": make(48)})


class FailsOnRankOne:
    def state_dict(self) -> dict[str, Any]:
        if dist.get_rank() == 1:
            raise RuntimeError("no state on this rank")
        return {"a": 1}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if dist.get_rank() == 1:
            raise RuntimeError("no load on this rank")


class FailsToLoad(FailsOnRankOne):
    def state_dict(self) -> dict[str, Any]:
        return {"a": 1}


def fail_beside_the_loader(folder: str) -> list[str]:
    """What each call says that one rank refuses, in which the others meet in a collective of the loader."""
    is_odd = dist.get_rank() == 1
    loader = make_loader(timeout=10)
    whole = {"value": FailsToLoad(), "loader": loader}
    unsavable = {"value": FailsOnRankOne(), "loader": loader}
    manager = checkpoint.CheckpointManager(f"{folder}/run")
    step, metrics = cast(Any, "one" if is_odd else 1), {"loss": cast(Any, "low" if is_odd else 1)}
    checkpoint.save(f"{folder}/whole", whole)
    calls: list[Callable[[], Any]] = [
        lambda: (manager.save(step, {"loader": loader}), manager.wait()),
        lambda: (manager.save(1, {"loader": loader}, metrics=metrics), manager.wait()),
        lambda: (manager.save(1, unsavable), manager.wait()),
        lambda: checkpoint.save(f"{folder}/c", unsavable),
        lambda: checkpoint.load(f"{folder}/whole", unsavable),
        lambda: checkpoint.load(f"{folder}/whole", whole),
    ]
    said: list[str] = []
    for call in calls:
        with pytest.raises((RuntimeError, TypeError, ValueError)) as caught:
            call()
        said.append(str(caught.value))
    manager.save(3, {"loader": loader})
    manager.close()
    assert manager.steps() == [3]
    return said


def test_nobody_waits_in_the_loaders_collective_for_a_rank_that_refuses(tmp_path: Path) -> None:
    first, second = run(2, fail_beside_the_loader, str(tmp_path))
    assert first == second
    for text, words in zip(first, ("step='one'", "'loss'", *["no state"] * 3, "no load"), strict=True):
        assert words in text
