"""A checkpoint exists wholly or not at all, and one that was changed is not loaded."""

import errno
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch

import rescale_data as rd
from rescale_data import checkpoint
from rescale_data.checkpoint import CheckpointManager, RunReader
from rescale_data.checkpoint.storage.open import open_store
from rescale_data.checkpoint.storage.store import DiskStore
from rescale_data.checkpoint.storage.values import Memory
from rescale_data.errors import DamagedCheckpointError
from tests.checkpoint.stand_in import data, flip, manifest, state_at
from tests.states import opened


def truncate(file: Path) -> None:
    flip(file, 3000)
    file.write_bytes(file.read_bytes()[:-1])


def take_another_steps(file: Path) -> None:
    checkpoint.save(file.parents[2] / "other", state_at(2))
    shutil.copy(data(file.parents[2] / "other") / file.name, file)


NOTHING, HALF = r"were saved[\s\S]*Nothing was loaded", r"__0_0.distcp is not what was saved[\s\S]*half loaded"
DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
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
def test_damage_is_an_error_with_the_files_name(tmp_path: Path, how: str) -> None:
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
    assert target["loader"].loaded is None
    assert target["weights"].sum() == 0


def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "c", {"weights": torch.zeros(40), "number": 1000})
    file = data(tmp_path / "c") / "__0_0.distcp"
    for at in range(0, file.stat().st_size, 17):
        flip(file, at)
        assert checkpoint.verify(tmp_path / "c") != [], f"byte {at}"
        with pytest.raises(DamagedCheckpointError, match="The state is half loaded"):
            checkpoint.load(tmp_path / "c", {"weights": torch.ones(40), "number": 0})
        flip(file, at)
    assert checkpoint.verify(tmp_path / "c") == []


def test_a_state_of_which_one_value_refuses_what_was_loaded_is_half_loaded(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "c", {"weights": torch.ones(3), "loader": rd.DataLoader(range(8), global_batch_size=4)})
    target = {"weights": torch.zeros(3), "loader": rd.DataLoader(range(8), global_batch_size=4, seed=1)}
    with pytest.raises(rd.DataStateError, match="seed") as found:
        checkpoint.load(tmp_path / "c", target)
    assert "The state is half loaded" in found.value.__notes__[-1]


def load(path: Any, **_: Any) -> Any:
    return checkpoint.load(path, state_at())


def save(path: Any, **options: Any) -> None:
    checkpoint.save(path, state_at(2), **options)


NOT_THERE = "No checkpoint at"
WRONG: list[tuple[Callable[..., Any], Any, type[Exception], str]] = [
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


def test_a_wrong_path_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_files_are_whole_and_synced_before_the_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each by itself: ``os.sync`` would flush every disk of the machine."""
    synced: dict[str, int] = {}
    at_commit: list[dict[str, int]] = []
    fsync, replace = os.fsync, os.replace

    def watched_fsync(file: int) -> None:
        synced[os.path.basename(os.readlink(f"/proc/self/fd/{file}"))] = os.fstat(file).st_size
        fsync(file)

    def watched_replace(old: str, new: str) -> None:
        at_commit.extend([dict(synced)] if os.path.basename(new).startswith("rescale_data-") else [])
        replace(old, new)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(os, "replace", watched_replace)
    monkeypatch.setattr(os, "sync", lambda: pytest.fail("os.sync"))
    checkpoint.save(tmp_path / "c", state_at())
    (found,) = at_commit
    for file in data(tmp_path / "c").iterdir():
        assert found[".metadata.tmp" if file.name == ".metadata" else file.name] == file.stat().st_size


def test_pieces_are_read_into_memory_that_is_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [400 + number % 2 for number in range(50)] + [10_000, 3, 0, 10_001, 9_999]
    state = {f"w{number:02}": torch.randn(size) for number, size in enumerate(sizes)}
    checkpoint.save(tmp_path / "c", {**state, "tuple": (torch.ones(7), 1)})
    taken: list[int] = []
    empty = Memory.empty
    monkeypatch.setattr(Memory, "empty", lambda size: taken.append(size) or empty(size))
    target: dict[str, Any] = {**{name: torch.zeros_like(value) for name, value in state.items()}, "tuple": None}
    checkpoint.load(tmp_path / "c", target)
    assert len(taken) < 12
    assert target.pop("tuple")[0].tolist() == [1.0] * 7
    assert all(torch.equal(target[name], value) for name, value in state.items())


class FailingStream:
    """A file of which the second write fails: the first fills it to the end of the disk."""

    def __init__(self, raw: BinaryIO, error: OSError) -> None:
        self.raw, self.error, self.num_writes = raw, error, 0

    def write(self, data: Any) -> int:
        self.num_writes += 1
        if self.num_writes > 1:
            raise self.error
        return self.raw.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)


class FailingDisk(DiskStore):
    """A disk on which an operation ("open", "write" or "rename") fails for files of some name, as DCP's streams meet it."""

    fails, number = ("", ""), errno.ENOSPC

    def error_at(self, operation: str, path: str) -> OSError | None:
        is_here = operation == self.fails[0] and self.fails[1] in path
        return OSError(self.number, os.strerror(self.number)) if is_here else None

    def open_write(self, path: str) -> BinaryIO:
        if error := self.error_at("open", path):
            raise error
        stream, error = super().open_write(path), self.error_at("write", path)
        return FailingStream(stream, error) if error else stream  # type: ignore[return-value]

    def rename(self, path: str, new_path: str) -> None:
        if error := self.error_at("rename", new_path):
            raise error
        super().rename(path, new_path)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> type[FailingDisk]:
    monkeypatch.setattr("rescale_data.checkpoint.storage.open.DiskStore", FailingDisk)
    monkeypatch.setattr(FailingDisk, "fails", ("", ""))
    monkeypatch.setattr(FailingDisk, "number", errno.ENOSPC)
    return FailingDisk


@pytest.mark.parametrize(
    ("operation", "name"),
    [(operation, name) for name in (".metadata", "rescale_data-") for operation in ("open", "rename")]
    + [("open", ".distcp"), ("write", ".distcp")],
)
@pytest.mark.parametrize(("number", "words"), [(errno.ENOSPC, "disk is full"), (errno.EACCES, "No permission")])
def test_a_failing_disk_leaves_the_checkpoint_before(
    tmp_path: Path, disk: type[FailingDisk], operation: str, name: str, number: int, words: str
) -> None:
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


def test_a_value_that_cannot_be_pickled_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "c", state_at(1))
    for path in ("new", "c"):
        with pytest.raises(Exception, match="pickle"):
            checkpoint.save(tmp_path / path, state_at(2) | {"step": lambda: 1}, overwrite=True)
    checkpoint.load(tmp_path / "c", target := state_at())
    assert target["step"] == 1
    assert checkpoint.verify(tmp_path / "c") == []
    assert not list(tmp_path.glob("new/[!.]*"))


CALLS: dict[str, Callable[[CheckpointManager], Any]] = {
    "save": lambda manager: manager.save(3, state_at(3)),
    "wait": lambda manager: manager.wait(),
    "load_latest": lambda manager: manager.load_latest(state_at()),
    "delete": lambda manager: manager.delete(1),
    "close": lambda manager: manager.close(),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_failed_upload_is_raised_by_the_next_call(
    tmp_path: Path, disk: type[FailingDisk], call: str, caplog: pytest.LogCaptureFixture
) -> None:
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
