"""What a run's folder remembers of the checkpoints that were deleted, and what that never breaks."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from rescale_data.checkpoint import CheckpointManager
from rescale_data.checkpoint.storage.open import open_store
from rescale_data.checkpoint.storage.run_folder import PRUNED, pruned

STATE = {"weight": torch.ones(3)}


def save(folder: str, steps: list[int], keep_latest: int = 1) -> list[int]:
    with CheckpointManager(folder, keep_latest=keep_latest, async_mode="disabled") as manager:
        for step in steps:
            manager.save(step, STATE, metrics={"loss": 1 / (1 + step)})
        manager.wait()
    return manager.steps()


@pytest.mark.parametrize("where", ["{path}/run", "memory://pruned-{name}/run"])
def test_each_deleted_checkpoint_leaves_a_note(tmp_path: Path, where: str) -> None:
    folder, begun = where.format(path=tmp_path, name=tmp_path.name), time.time()
    assert save(folder, [1, 2, 10]) == [10]
    notes = pruned(*open_store(folder))
    assert [(note["step"], note["metrics"]["loss"]) for note in notes] == [
        (1, 1 / 2),
        (2, 1 / 3),
    ]
    assert all(begun <= note["created"] <= note["pruned"] <= time.time() for note in notes)
    assert all(note["bytes"] > 0 and note["world_size"] == 1 for note in notes)
    with CheckpointManager(folder) as manager:
        assert manager.delete(10)
        assert manager.steps() == []
    assert len(pruned(*open_store(folder))) == 3


def test_a_step_that_is_saved_and_deleted_again_has_one_note(tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    save(folder, [1, 2])
    (first,) = pruned(*open_store(folder))
    with CheckpointManager(folder, keep_latest=1, async_mode="disabled") as manager:
        assert manager.delete(2)
        manager.save(1, STATE)
        manager.save(3, STATE)
    again = {note["step"]: note for note in pruned(*open_store(folder))}
    assert sorted(again) == [1, 2]
    assert again[1]["created"] > first["created"]


def test_a_note_that_cannot_be_written_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / PRUNED).write_text("a file where the folder would be")
    assert save(str(tmp_path / "run"), [1, 2]) == [2]
    assert "without a note" in caplog.text
    assert pruned(*open_store(tmp_path / "run")) == []


def test_a_note_that_cannot_be_read_hides_no_other(tmp_path: Path) -> None:
    save(str(tmp_path / "run"), [1, 2, 3])
    (tmp_path / "run" / PRUNED / "step-1.json").write_bytes(b"{")
    (tmp_path / "run" / PRUNED / "step-7.json").mkdir()
    (tmp_path / "run" / PRUNED / "step-8.json").write_text("[1]")
    assert [note["step"] for note in pruned(*open_store(tmp_path / "run"))] == [2]
