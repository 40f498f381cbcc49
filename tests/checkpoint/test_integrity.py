"""A checkpoint exists wholly or not at all, and one that was changed is not loaded."""

import errno
import os
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch

import rescale_data as rd
from rescale_data import checkpoint
from rescale_data.checkpoint import CheckpointManager, RunReader
from rescale_data.checkpoint.storage.open import open_store
from rescale_data.checkpoint.storage.store import DiskStore
from rescale_data.checkpoint.storage.values import Memory
from rescale_data.errors import DamagedCheckpointError
from tests.checkpoint.steps import data, flip, manifest, state_at
from tests.states import opened


def truncate(file):
    flip(file, 3000)
    file.write_bytes(file.read_bytes()[:-1])


def take_another_steps(file):
    checkpoint.save(file.parents[2] / "other", state_at(2))
    shutil.copy(data(file.parents[2] / "other") / file.name, file)


NOTHING, HALF = r"were saved[\s\S]*Nothing was loaded", r"__0_0.distcp is not what was saved[\s\S]*half loaded"
DAMAGE = {
    "truncated": (lambda c: truncate(data(c) / "__0_0.distcp"), f"__0_0.distcp has.*{NOTHING}"),
    "missing": (lambda c: (data(c) / "__0_0.distcp").unlink(), f"__0_0.distcp is missing.*{NOTHING}"),
    "empty": (lambda c: (data(c) / "__0_0.distcp").write_bytes(b""), f"__0_0.distcp has 0 bytes.*{NOTHING}"),
    "of another step": (lambda c: take_another_steps(data(c) / "__0_0.distcp"), HALF),
    "a bit of the metadata": (lambda c: flip(data(c) / ".metadata", 40), ".metadata is not what was saved"),
    "no metadata": (lambda c: (data(c) / ".metadata").unlink(), f".metadata is missing.*{NOTHING}"),
    "a bit of the manifest": (lambda c: flip(manifest(c), 60), ".json is damaged"),
    "no manifest": (lambda c: manifest(c).unlink(), "never finished"),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_damage_is_an_error_with_the_files_name(tmp_path, how):
    damage, words = DAMAGE[how]
    checkpoint.save(tmp_path / "c", state_at(1))
    assert checkpoint.verify(tmp_path / "c") == []
    damage(tmp_path / "c")
    target = state_at()
    with pytest.raises(ValueError, match=words):
        checkpoint.load(tmp_path / "c", target)
    words = words.partition("[\\s")[0].partition(".*")[0]
    with pytest.raises(ValueError, match=words):
        checkpoint.read_data_state(tmp_path / "c")
    assert words in " ".join(checkpoint.verify(tmp_path / "c"))
    assert target["loader"].step == 0
    assert target["weights"].sum() == 0


def test_every_flipped_bit_is_found(tmp_path):
    checkpoint.save(tmp_path / "c", {"weights": torch.zeros(40), "number": 1000})
    file = data(tmp_path / "c") / "__0_0.distcp"
    for at in range(0, file.stat().st_size, 17):
        flip(file, at)
        assert checkpoint.verify(tmp_path / "c") != [], f"byte {at}"
        with pytest.raises(DamagedCheckpointError, match="The state is half loaded"):
            checkpoint.load(tmp_path / "c", {"weights": torch.ones(40), "number": 0})
        flip(file, at)
    assert checkpoint.verify(tmp_path / "c") == []


def test_a_state_of_which_one_value_refuses_what_was_loaded_is_half_loaded(tmp_path):
    checkpoint.save(tmp_path / "c", {"weights": torch.ones(3), "loader": rd.DataLoader(range(8), global_batch_size=4)})
    target = {"weights": torch.zeros(3), "loader": rd.DataLoader(range(8), global_batch_size=4, seed=1)}
    with pytest.raises(rd.DataStateError, match="seed") as found:
        checkpoint.load(tmp_path / "c", target)
    assert "The state is half loaded" in found.value.__notes__[-1]


def load(path, **_):
    return checkpoint.load(path, state_at())


def save(path, **options):
    checkpoint.save(path, state_at(2), **options)


NOT_THERE = "No checkpoint at"
WRONG = [
    *[(call, path, FileNotFoundError, NOT_THERE) for call in (load, checkpoint.verify) for path in ("none", "empty")],
    *[(checkpoint.read_data_state, path, FileNotFoundError, NOT_THERE) for path in ("none", "empty")],
    (load, "half", FileNotFoundError, r"No checkpoint at .*: it holds \['1-\w+-1'\]\.$"),
    (load, 3, TypeError, "str or os"),
    (load, "memory://bucket/file.pt", ValueError, "Copy it to a local disk first"),
    (save, "c", ValueError, "overwrite=True"),
    (save, "file", ValueError, "is a file"),
    (partial(save, overwrite=True), "mine", ValueError, "is no checkpoint; it is not replaced"),
    (save, "file/c", NotADirectoryError, "part of the path is a file"),
    (save, Path("memory://run/x"), ValueError, "Give a URL as a str"),
    (save, "nope://bucket/c", ValueError, "or give a local path"),
    (lambda path: RunReader(path, storage_options={"use_listings_cache": True}), "s3://a/b", ValueError, "would hide"),
]


def test_a_wrong_path_is_an_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("c", "half"):
        checkpoint.save(name, state_at(1))
    for file in (manifest(tmp_path / "half"), tmp_path / "half" / ".metadata"):
        file.unlink()
    for name in ("empty", "mine"):
        (tmp_path / name).mkdir()
    for name in ("file", "mine/thesis.tex"):
        (tmp_path / name).write_text("x")
    open_store("memory://bucket/file.pt")[0].put("memory://bucket/file.pt", b"x")
    before = sorted(tmp_path.rglob("*"))
    for call, path, error, words in WRONG:
        with pytest.raises(error, match=words):
            call(path)
    assert sorted(tmp_path.rglob("*")) == before
    checkpoint.save("c", state_at(3), overwrite=True)
    assert opened(checkpoint.read_data_state("c"))["step"] == 3


def test_files_are_whole_and_synced_before_the_commit(tmp_path, monkeypatch):
    """Each by itself: ``os.sync`` would flush every disk of the machine."""
    synced = {}
    at_commit = []
    fsync, replace = os.fsync, os.replace

    def watched_fsync(file):
        synced[os.path.basename(os.readlink(f"/proc/self/fd/{file}"))] = os.fstat(file).st_size
        fsync(file)

    def watched_replace(old, new):
        at_commit.extend([dict(synced)] if os.path.basename(new).startswith("rescale_data-") else [])
        replace(old, new)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(os, "replace", watched_replace)
    monkeypatch.setattr(os, "sync", lambda: pytest.fail("os.sync"))
    checkpoint.save(tmp_path / "c", state_at())
    (found,) = at_commit
    for file in data(tmp_path / "c").iterdir():
        assert found[".metadata.tmp" if file.name == ".metadata" else file.name] == file.stat().st_size


def test_pieces_are_read_into_memory_that_is_used_again(tmp_path, monkeypatch):
    sizes = [400 + number % 2 for number in range(50)] + [10_000, 3, 0, 10_001, 9_999]
    state = {f"w{number:02}": torch.randn(size) for number, size in enumerate(sizes)}
    checkpoint.save(tmp_path / "c", {**state, "tuple": (torch.ones(7), 1)})
    taken = []
    empty = Memory.empty
    monkeypatch.setattr(Memory, "empty", lambda size: taken.append(size) or empty(size))
    target = {**{name: torch.zeros_like(value) for name, value in state.items()}, "tuple": None}
    checkpoint.load(tmp_path / "c", target)
    assert len(taken) < 12
    assert target.pop("tuple")[0].tolist() == [1.0] * 7
    assert all(torch.equal(target[name], value) for name, value in state.items())


class FailingDisk(DiskStore):
    """A disk on which an operation ("open" or "rename") fails for files of some name, or that is full as they are written."""

    fails, number = ("", ""), errno.ENOSPC

    def is_here(self, operation, path):
        return operation == self.fails[0] and self.fails[1] in path

    def open_write(self, path):
        if self.is_here("open", path):
            raise OSError(self.number, os.strerror(self.number))
        stream = super().open_write(path)
        if self.is_here("write", path):
            with open("/dev/full", "wb") as full:
                os.dup2(full.fileno(), stream.fileno())
        return stream

    def rename(self, path, new_path):
        if self.is_here("rename", new_path):
            raise OSError(self.number, os.strerror(self.number))
        super().rename(path, new_path)


@pytest.fixture
def disk(monkeypatch):
    monkeypatch.setattr("rescale_data.checkpoint.storage.open.DiskStore", FailingDisk)
    monkeypatch.setattr(FailingDisk, "fails", ("", ""))
    monkeypatch.setattr(FailingDisk, "number", errno.ENOSPC)
    return FailingDisk


FULL, DENIED = (errno.ENOSPC, "disk is full"), (errno.EACCES, "No permission")
OPERATIONS = [("open", ".metadata"), ("rename", ".metadata"), ("open", "rescale_data-"), ("rename", "rescale_data-")]
FAULTS = [(*of, *why) for of in (*OPERATIONS, ("open", ".distcp")) for why in (FULL, DENIED)]


@pytest.mark.parametrize(("operation", "name", "number", "words"), [*FAULTS, ("write", ".distcp", *FULL)])
def test_a_failing_disk_leaves_the_checkpoint_before(tmp_path, disk, operation, name, number, words):
    checkpoint.save(tmp_path / "c", state_at(1))
    disk.fails, disk.number = (operation, name), number
    for path in ("new", "c"):
        with pytest.raises(OSError, match=f"{tmp_path}/{path}.*{words}") as caught:
            checkpoint.save(tmp_path / path, state_at(2), overwrite=True)
        assert caught.value.errno == number
    disk.fails = ("", "")
    checkpoint.load(tmp_path / "c", target := state_at())
    assert target["step"] == 1
    assert not list(tmp_path.glob("new/[!.]*")) or name == "rescale_data-", "a manifest may have been written"
    assert not list(tmp_path.glob("new/rescale_data-*"))
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_value_that_cannot_be_pickled_leaves_the_checkpoint_before(tmp_path):
    checkpoint.save(tmp_path / "c", state_at(1))
    for path in ("new", "c"):
        with pytest.raises(Exception, match="pickle"):
            checkpoint.save(tmp_path / path, state_at(2) | {"step": lambda: 1}, overwrite=True)
    checkpoint.load(tmp_path / "c", target := state_at())
    assert target["step"] == 1
    assert checkpoint.verify(tmp_path / "c") == []
    assert not list(tmp_path.glob("new/[!.]*"))


CALLS = {
    "save": lambda manager: manager.save(3, state_at(3)),
    "wait": lambda manager: manager.wait(),
    "load_latest": lambda manager: manager.load_latest(state_at()),
    "delete": lambda manager: manager.delete(1),
    "close": lambda manager: manager.close(),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_failed_upload_is_raised_by_the_next_call(tmp_path, disk, call, caplog):
    manager = CheckpointManager(tmp_path)
    manager.save(1, state_at(1))
    manager.wait()
    disk.fails = ("write", ".distcp")
    manager.save(2, {f"w{i}": torch.ones(1 << 18) for i in range(12)})
    with pytest.raises(OSError, match=rf"{tmp_path}/step-2 failed: No space left.*The disk is full") as caught:
        CALLS[call](manager)
    assert caught.value.errno == errno.ENOSPC
    assert "disk is full" in caplog.text
    disk.fails = ("", "")
    if call == "close":
        with pytest.raises(ValueError, match="closed"):
            manager.save(2, {"a": 1})
    else:
        assert manager.steps() == [1]
        manager.save(4, state_at(4))
    manager.close()
    assert sorted(os.listdir(tmp_path)) == [".claims", ".leases", "step-1", *["step-4"] * (call != "close")]
