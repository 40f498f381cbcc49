"""The real loader in a manager's checkpoints, over real ranks: the rows are those of the step that was saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import rescale_data as rd
from rescale_data import checkpoint
from tests.checkpoint.processes import run
from tests.states import opened


def make_loader() -> rd.DataLoader:
    size = dist.get_world_size() if dist.is_initialized() else 1
    given: dict[str, Any] = {"global_batch_size": 12, "num_logical_shards": 24, "seed": 3, "repeat": True}
    return rd.DataLoader(range(480), micro_batch_size=12 // size, **given)


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
    assert opened(checkpoint.read_data_state(tmp_path / "run" / "step-5"))["samples"] == 60
    checkpoint.check_checkpoint(tmp_path / "run" / "step-5", make_loader())
