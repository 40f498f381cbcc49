"""A manager removes what a claim of its own folder made and does not count, and nothing else."""

import logging
import os
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp

from rescale_data import checkpoint
from rescale_data.checkpoint import CheckpointManager, RunReader
from rescale_data.checkpoint.storage import claims, commit
from rescale_data.checkpoint.storage.claims import ONLY_STEP
from rescale_data.checkpoint.storage.commit import Ownership, SupersededError
from rescale_data.checkpoint.storage.manifest import METADATA, Manifest
from rescale_data.checkpoint.storage.open import open_store

STATE = {"a": torch.ones(3), "b": 1}


def save_steps(folder, *steps, keep_latest=None):
    with CheckpointManager(folder, keep_latest=keep_latest, async_mode="disabled") as manager:
        for step in steps:
            manager.save(step, {"n": step})


def load_latest(folder):
    target = {"n": 0}
    return RunReader(folder).load_latest(target), target["n"]


def listed(folder):
    store, path = open_store(folder)
    return {name: store.names(f"{path}/{name}") for name in store.names(path) if name.startswith("step-")}


FOREIGN = {
    "a model": ["model.pt"],
    "notes": ["notes.txt"],
    "a save that another tool began": ["__0_0.distcp", "__1_0.distcp"],
    "metadata that nobody can read": [".metadata", "__0_0.distcp"],
    "a folder that is named as if": ["rescale_data-mine/notes.txt"],
    "a copy that still runs": ["7-0123abcd-1/__0_0.distcp"],
    "a checkpoint of another tool": [],
}


@pytest.mark.parametrize("what", FOREIGN)
def test_a_folder_that_is_not_ours_stays(folder, what):
    store, path = open_store(f"{folder}/step-7")
    for file in FOREIGN[what]:
        store.mkdir(f"{path}/{file}".rpartition("/")[0])
        store.put(f"{path}/{file}", b"precious")
    if not FOREIGN[what]:
        dcp.save(dict(STATE), checkpoint_id=path)
    before = listed(folder)
    for _ in range(2):
        with CheckpointManager(folder, async_mode="disabled") as manager:
            assert manager.load_latest(dict(STATE)) is None
    assert listed(folder) == before
    if what == "a copy that still runs":
        return
    with pytest.raises(ValueError, match=r"is no checkpoint|already holds"):
        checkpoint.save(path, STATE)
    assert listed(folder) == before
    if ".metadata" in before["step-7"]:
        checkpoint.save(path, STATE, overwrite=True)
        assert checkpoint.verify(path) == []
        assert {*before["step-7"]} <= {*store.names(path)}, "what no claim made is nobody's to remove"


@pytest.mark.parametrize("left_out", ["manifest", "data"])
def test_a_copy_that_is_not_whole_stays(tmp_path, left_out, caplog):
    save_steps(tmp_path / "run", 4, 5)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    for path in (tmp_path / "copy" / "step-5").glob("rescale_data-*" if left_out == "manifest" else "*/*.distcp"):
        path.unlink()
    before = listed(tmp_path / "copy")
    with CheckpointManager(tmp_path / "copy") as manager:
        assert manager.load_latest({"n": 0}) == 4 if left_out == "manifest" else True
    assert listed(tmp_path / "copy") == before
    if left_out == "manifest":
        assert "newer steps were passed over: step 5: " in caplog.text
        dcp.load(stock := {"n": 0}, checkpoint_id=tmp_path / "copy" / "step-5")
        assert stock["n"] == 5


def test_steps_that_are_all_passed_over_are_named(tmp_path, caplog):
    """A run that would begin anew beside checkpoints of another tool is told."""
    dcp.save(dict(STATE), checkpoint_id=tmp_path / "run" / "step-5")
    assert RunReader(tmp_path / "run").load_latest(dict(STATE)) is None
    assert "step 5: No checkpoint at" in caplog.text
    assert RunReader(tmp_path / "none").load_latest(dict(STATE)) is None
    assert caplog.text.count("passed over") == 1


def test_a_step_that_somebody_copied_counts(tmp_path):
    save_steps(tmp_path / "a", 100)
    save_steps(tmp_path / "b", 50)
    with CheckpointManager(tmp_path / "b", keep_latest=None, async_mode="disabled") as manager:
        shutil.copytree(tmp_path / "a" / "step-100", tmp_path / "b" / "step-100")
        assert load_latest(tmp_path / "b") == (100, 100)
        manager.save(100, {"n": 101})
        assert load_latest(tmp_path / "b") == (100, 101)
        manager.save(200, STATE)
        assert manager.delete(100)
        assert manager.steps() == [50, 200]
    assert not (tmp_path / "b" / "step-100").exists()


@pytest.mark.parametrize("ended", ["closed", "killed"])
def test_a_step_that_was_taken_away_and_put_back_stays(tmp_path, ended, elsewhere):
    run, away = tmp_path / "run", tmp_path / "away"
    first = CheckpointManager(run, async_mode="disabled")
    for step in (100, 150):
        first.save(step, {"n": step})
    if ended == "closed":
        first.close()
    else:
        elsewhere()
    shutil.move(run / "step-100", away)
    save_steps(run, 200)
    shutil.move(away, run / "step-100")
    before = sorted(run.glob("step-100/**/*"))
    for step in (300, 400):
        save_steps(run, step, keep_latest=1)
    assert RunReader(run).steps() == [400]
    assert sorted(run.glob("step-100/**/*")) == before
    with pytest.raises(ValueError, match="copy it to another folder"):
        checkpoint.load(run / "step-100", {"n": 0})
    shutil.copytree(run / "step-100", tmp_path / "other" / "step-100")
    assert load_latest(tmp_path / "other") == (100, 100)


def test_a_copy_of_a_folder_that_is_open_is_another_run(tmp_path, caplog):
    with CheckpointManager(tmp_path / "run", async_mode="disabled") as manager:
        manager.save(1, {"n": 1})
        shutil.copytree(tmp_path / "run", tmp_path / "copy")
        with CheckpointManager(tmp_path / "copy", async_mode="disabled") as other:
            assert f"as {tmp_path / 'run'}, which did not close it" in caplog.text
            other.save(2, {"n": 20})
        manager.save(2, {"n": 2})
    assert [load_latest(tmp_path / name) for name in ("run", "copy")] == [(2, 2), (2, 20)]


def test_a_checkpoint_is_no_folder_for_a_run(folder):
    """Claims of a run in there would say that the checkpoint does not count."""
    checkpoint.save(folder, STATE)
    with pytest.raises(ValueError, match="is a checkpoint itself; give the folder of the run"):
        CheckpointManager(folder)
    assert checkpoint.verify(folder) == []


def test_a_step_of_a_manager_is_its_own(folder):
    """Another save would stand below it, and count when the next owner has opened the run."""
    save_steps(folder, 1)
    before = listed(folder)
    with pytest.raises(ValueError, match="step that the manager of its run has saved"):
        checkpoint.save(f"{folder}/step-1", {"n": 2}, overwrite=True)
    assert listed(folder) == before
    CheckpointManager(folder).close()
    checkpoint.save(f"{folder}/step-1", {"n": 3}, overwrite=True)  # that has not saved it
    assert load_latest(folder) == (1, 3)


def test_nothing_of_a_deleted_step_stays(folder, monkeypatch):
    """The deleting owner and the one after it were killed before they removed it."""
    with monkeypatch.context() as patched:
        patched.setattr(Ownership, "remove_obsolete", lambda _: None)
        with CheckpointManager(folder, async_mode="disabled") as manager:
            manager.save(1, STATE)
            manager.save(2, STATE)
            assert manager.delete(1)
        CheckpointManager(folder).close()
    assert ".metadata" in listed(folder)["step-1"]
    CheckpointManager(folder).close()
    assert list(listed(folder)) == ["step-2"]


def test_metrics_are_read_once_and_only_for_a_rule(folder, monkeypatch):
    with CheckpointManager(folder, keep_latest=None, async_mode="disabled") as manager:
        for step in range(4):
            manager.save(step, STATE, metrics={"loss": step} if step % 2 else None)
        manager.wait()
    read, metrics_of = [], commit.metrics_of
    monkeypatch.setattr(commit, "metrics_of", lambda *given: read.append(given[1]) or metrics_of(*given))
    owner = Ownership(*open_store(folder))
    for _ in range(3):
        assert owner.steps(range(5)) == [0, 1, 2, 3]
        assert owner.metrics(range(4)) == {0: {}, 1: {"loss": 1}, 2: {}, 3: {"loss": 3}}
    assert len(read) == 4
    owner.close()
    save_steps(folder, 4, keep_latest=2)
    assert listed(folder).keys() == {"step-3", "step-4"}
    assert len(read) == 4


def test_what_a_killed_save_left_is_removed_by_the_next_owner(folder, caplog):
    caplog.set_level(logging.INFO, logger="rescale_data")
    store, path = open_store(folder)
    killed = Ownership(store, path)
    killed.close.detach()
    save = killed.begin_save("step-1")
    store.put(f"{path}/step-1/{save.folder}/__0_0.distcp", b"half")
    with pytest.raises(ValueError, match="is held by this process"):
        CheckpointManager(folder)
    killed._claim["holder"]["start"] = "0"  # as of a process that has ended
    killed._put_claim()
    caplog.clear()
    CheckpointManager(folder).close()
    assert listed(folder) == {}
    assert "step-1 what was deleted, replaced or never finished" in caplog.text
    assert "did not close it" not in caplog.text, "it is known to be dead"


def test_an_owner_that_may_live_elsewhere_is_superseded_with_a_warning(folder, caplog, elsewhere):
    with CheckpointManager(folder, async_mode="disabled") as zombie:
        zombie.save(100, {"n": 100})
        elsewhere()
        with CheckpointManager(folder, async_mode="disabled") as successor:
            assert f"process {os.getpid()} on" in caplog.text
            assert "If it still runs, its saves here fail from now on" in caplog.text
            with pytest.raises(ValueError, match="may not save there any more"):
                zombie.save(110, {"n": 110})
            assert list(listed(folder)) == ["step-100"], "its data are not written"
            assert load_latest(folder) == (100, 100), "its step never stands above a history that goes on from 100"
            successor.save(105, {"n": 105})
        assert load_latest(folder) == (105, 105)


def test_a_save_whose_files_its_successor_removes_names_the_successor(folder, monkeypatch, elsewhere):
    store = type(open_store(folder)[0])
    open_write = store.open_write

    def superseded(self, path):
        if path.endswith(f"{METADATA}.tmp"):
            elsewhere()
            CheckpointManager(folder).close()
        return open_write(self, path)

    with CheckpointManager(folder, async_mode="disabled") as zombie:
        monkeypatch.setattr(store, "open_write", superseded)
        with pytest.raises(SupersededError, match=f"opened for writing by process {os.getpid()}"):
            zombie.save(100, STATE)
    assert RunReader(folder).steps() == []


def test_pruning_leaves_a_run_that_saves_to_its_manager(folder, elsewhere):
    with CheckpointManager(folder, async_mode="disabled") as manager:
        elsewhere()
        with pytest.raises(ValueError, match="Try again with --wait"):
            Ownership(*open_store(folder), wait=False)
        manager.save(1, STATE)
    Ownership(*open_store(folder), wait=False).close()


def test_who_was_superseded_stays_so_though_the_newer_save_fails(folder, elsewhere):
    first = Ownership(*open_store(f"{folder}/c", to_write=True), has_one_checkpoint=True)
    save = first.begin_save(ONLY_STEP)
    elsewhere()
    second = Ownership(first.store, first.path, has_one_checkpoint=True)
    failing = second.begin_save(ONLY_STEP)
    with pytest.raises(SupersededError):
        first.commit(ONLY_STEP, save, Manifest(save_id=save.folder))
    second.discard_save(ONLY_STEP, failing)
    with pytest.raises(SupersededError):
        first.check_not_superseded()
    assert claims.find_save(first.store, first.path) is None


@pytest.mark.parametrize("lose", ["rescale_data-", ".metadata"])
def test_an_answer_that_is_lost(folder, lose, monkeypatch):
    """The store did what it was asked for, and says that it did not."""
    store, lost = type(open_store(folder)[0]), []
    put = store.put

    def losing(self, path, content):
        put(self, path, content)
        if path.rpartition("/")[2].startswith(lose) and not lost:
            lost.append(path)
            raise ConnectionError("the answer is lost")

    checkpoint.save(f"{folder}/c", {"n": 1})
    monkeypatch.setattr(store, "put", losing)
    checkpoint.save(f"{folder}/c", {"n": 2}, overwrite=True)
    assert lost
    checkpoint.load(f"{folder}/c", target := {"n": 0})
    assert target == {"n": 2}
