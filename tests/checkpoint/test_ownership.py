"""A manager removes what killed saves and deletions of ours left, and nothing else."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp

from rescale_data import checkpoint
from rescale_data.checkpoint import CheckpointManager
from rescale_data.checkpoint.storage.commit import hidden, hidden_of
from rescale_data.checkpoint.storage.open import open_store
from rescale_data.checkpoint.storage.store import LocalStore, ObjectStore, Store

STATE = {"a": torch.ones(3), "b": 1}
ID = "0123456789abcdef" * 2


@pytest.fixture(params=["local", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "local":
        yield str(tmp_path / "run")
        return
    yield f"memory://{tmp_path.name}/run"
    fsspec.filesystem("memory").store.clear()


def put(folder: str, *files: str) -> Store:
    store, path = open_store(folder)
    for file in files:
        store.mkdir(f"{path}/{file}".rpartition("/")[0])
        store.write(f"{path}/{file}", b"precious")
    return store


def listed(folder: str) -> dict[str, list[str]]:
    store, path = open_store(folder)
    return {name: store.names(f"{path}/{name}") for name in store.names(path) if not name.startswith(".writer")}


def old(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is in an object store is from long ago."""
    monkeypatch.setattr(ObjectStore, "modified", lambda *_: 0.0)


FOREIGN = {
    "a model": ["model.pt"],
    "notes": ["notes.txt"],
    "a save that another tool began": ["__0_0.distcp", "__1_0.distcp"],
    "metadata that nobody can read": [".metadata", "__0_0.distcp"],
    "a folder that is named as if": ["rescale_data-mine/notes.txt"],
}


@pytest.mark.parametrize("what", FOREIGN)
def test_a_folder_that_is_not_ours_stays(folder: str, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    old(monkeypatch)
    put(folder, *(f"step-7/{file}" for file in FOREIGN[what]))
    before = listed(folder)
    with CheckpointManager(folder, async_mode="disabled") as manager:
        assert manager.load_latest(dict(STATE)) is None
    assert listed(folder) == before
    with pytest.raises(ValueError, match=r"is no checkpoint|already holds"):
        checkpoint.save(f"{folder}/step-7", STATE)
    assert listed(folder) == before


def test_a_checkpoint_of_another_tool_stays(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    old(monkeypatch)
    dcp.save(dict(STATE), checkpoint_id=f"{folder}/step-7")
    before = listed(folder)
    CheckpointManager(folder).close()
    with pytest.raises(ValueError, match="already holds a checkpoint"):
        checkpoint.save(f"{folder}/step-7", STATE)
    assert listed(folder) == before


def test_an_empty_folder_and_files_beside_ours_stay(tmp_path: Path) -> None:
    for step in (1, 2):
        checkpoint.save(tmp_path / f"step-{step}", STATE)
        (tmp_path / f"step-{step}" / "rescale_data.json").unlink()
    (tmp_path / "step-2" / "notes.txt").write_text("mine")
    (tmp_path / "step-3").mkdir()
    (tmp_path / ".step-4.saving-plans").mkdir()
    (tmp_path / hidden("final", "saving", ID)).mkdir()
    CheckpointManager(tmp_path).close()
    kept = [".final.saving-" + ID, ".step-4.saving-plans", ".writer.lock", "step-2", "step-3"]
    assert sorted(os.listdir(tmp_path)) == kept, "what is being saved beside the run's steps is not the manager's"


def test_what_a_killed_deletion_left_is_removed(
    folder: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without its manifest the checkpoint is ours by its save id."""
    old(monkeypatch)
    caplog.set_level(logging.INFO, logger="rescale_data")
    checkpoint.save(f"{folder}/step-1", STATE)
    store, path = open_store(folder)
    store.rm_file(f"{path}/step-1/rescale_data.json")
    CheckpointManager(folder).close()
    assert not [name for name in listed(folder) if name.startswith("step")]
    assert "step-1, which a killed save or deletion left" in caplog.text


def test_a_deletion_takes_the_folder_away_before_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a kill leaves a name of ours, however far the deletion has come."""
    removed: list[str] = []
    monkeypatch.setattr(LocalStore, "remove_folder", lambda _, path: removed.append(os.path.basename(path)))
    with CheckpointManager(tmp_path, keep_latest=1, async_mode="disabled") as manager:
        manager.save(1, STATE)
        manager.save(2, STATE)
        manager._idle()
        assert manager.steps() == [2]
    [left] = [name for name in removed if hidden_of(name) == ("step-1", "deleted")]
    (tmp_path / left / ".metadata").unlink()
    monkeypatch.undo()
    CheckpointManager(tmp_path).close()
    assert sorted(os.listdir(tmp_path)) == [".pruned", ".writer.lock", "step-2"]


def test_what_a_killed_first_save_left_in_an_object_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = f"memory://{tmp_path.name}/killed"
    put(folder, f"step-1/rescale_data-{ID}/__0_0.distcp")
    CheckpointManager(folder).close()
    assert "step-1" in listed(folder), "younger than a day: another job may be saving it"
    old(monkeypatch)
    CheckpointManager(folder).close()
    assert "step-1" not in listed(folder)


@pytest.mark.parametrize(
    ("entry", "of"),
    [
        (f".step-1.saving-{ID}", ("step-1", "saving")),
        (f".a.b.deleted-{ID}", ("a.b", "deleted")),
        (f"step-1.saving-{ID}", None),
        (".step-1.saving-77", None),
        (f".step-1.moved-{ID}", None),
    ],
)
def test_names_of_ours(entry: str, of: Any) -> None:
    assert hidden_of(entry) == of
