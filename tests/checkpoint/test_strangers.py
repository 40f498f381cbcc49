"""What others do to a run's folder: a second writer, links, odd leases, files that lead outside, metadata of old torch."""

from __future__ import annotations

import contextlib
import enum
import json
import os
import pathlib
import pickle
import signal
import subprocess
import zlib
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp

from rescale_data import checkpoint
from rescale_data.checkpoint import CheckpointManager, RunReader
from rescale_data.checkpoint.storage import readers
from rescale_data.checkpoint.storage.store import DiskStore
from tests.checkpoint.files import data, manifest
from tests.checkpoint.processes import context

STATE = {"w": torch.ones(3)}


def hold(folder: Path, pid: Connection) -> None:
    """Have a manager on the folder, until this process is killed."""
    with CheckpointManager(folder):
        pid.send(os.getpid())
        signal.pause()


@contextlib.contextmanager
def another_process(folder: Path) -> Iterator[int]:
    """Yield the number of another process that has a manager on the folder; it is killed in the end."""
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=hold, args=(folder, theirs))
    process.start()
    try:
        yield ours.recv()
    finally:
        process.kill()
        process.join()


def test_a_second_manager_is_told_who_holds_the_folder(tmp_path: Path) -> None:
    run = tmp_path.resolve() / "run"
    with another_process(run) as pid:
        with pytest.raises(ValueError, match=rf"held by process {pid} on {os.uname().nodename}"):
            CheckpointManager(run)
        assert RunReader(run).steps() == []
    with CheckpointManager(run) as manager:
        assert manager.steps() == [], "a killed one holds nothing"


@pytest.mark.parametrize("folder", ["local", "memory"])
def test_a_second_manager_in_one_process(tmp_path: Path, folder: str) -> None:
    """Two would delete by two rules, each what the other keeps."""
    run = str(tmp_path / "run") if folder == "local" else f"memory://{tmp_path.name}/run"
    manager = CheckpointManager(run, keep_latest=1, async_mode="disabled")
    manager.save(1, STATE)
    with pytest.raises(ValueError, match=r"held by this process, which saves to it.*by\s+close\(\)"):
        CheckpointManager(f"{run}/", keep_latest=None)
    assert RunReader(run).steps() == [1]
    manager.save(2, STATE)
    manager.close()
    again = CheckpointManager(run)
    assert not again.delete(1), "and nothing is done in the background any more"
    vars(again)["itself"] = again
    del again  # and not closed
    with CheckpointManager(run) as manager:
        assert manager.steps() == [2]
    fsspec.filesystem("memory").store.clear()


def test_a_save_whose_files_something_removes_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename = DiskStore.rename

    def tidy(store: DiskStore, path: Any, new_path: Any) -> None:
        rename(store, path, new_path)
        for file in (tmp_path / "c").glob("*/__0_0.distcp"):
            file.unlink()

    monkeypatch.setattr(DiskStore, "rename", tidy)
    with pytest.raises(ValueError, match=r"__0_0\.distcp is missing"):
        checkpoint.save(tmp_path / "c", STATE)


@pytest.fixture
def forked(tmp_path: Path) -> tuple[Path, Path]:
    """A run that was forked with ``ln -s``."""
    checkpoint.save(tmp_path / "old" / "step-100", STATE)
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "step-100").symlink_to(tmp_path / "old" / "step-100")
    return tmp_path / "old" / "step-100", tmp_path / "new"


@pytest.mark.parametrize("how", ["retention", "delete", "overwrite", "dangling"])
def test_a_link_is_never_entered(forked: tuple[Path, Path], how: str) -> None:
    foreign, new = forked
    if how == "dangling":
        (new / "step-99").symlink_to(new / "nowhere")
    with CheckpointManager(new, keep_latest=1, async_mode="disabled") as manager:
        target = {"w": torch.zeros(3)}
        assert manager.load_latest(target) == 100
        assert target["w"].all()
        if how == "delete":
            assert manager.delete(100)
            assert not manager.delete(100)
        elif how == "overwrite":
            manager.save(100, {"w": torch.zeros(3)})
            assert not (new / "step-100").is_symlink()
        elif how == "dangling":
            manager.save(99, {"w": torch.zeros(3)})
        else:
            manager.save(101, STATE)
            manager._wait_until_idle()
            assert manager.steps() == [101]
    assert checkpoint.verify(foreign) == []
    assert sorted(os.listdir(data(foreign))) == [".metadata", "__0_0.distcp"]


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname", "a/../../outside"])
def test_a_manifest_that_names_a_file_outside(tmp_path: Path, name: str) -> None:
    checkpoint.save(tmp_path / "c", STATE)
    file = manifest(tmp_path / "c")
    content = json.loads(file.read_text())
    del content["crc32"]
    files, outside = content["files"], "outside of the folder"
    for changed, text in (
        ({"files": {**files, name: {"size": 0, "crc32s": ""}}}, outside),
        ({"save_id": name}, outside),
        ({"save_id": "other"}, "lacks its file 'other/.metadata'"),
    ):
        told = content | changed
        told["crc32"] = zlib.crc32(json.dumps(told, sort_keys=True).encode())
        file.write_text(json.dumps(told))
        assert text in checkpoint.verify(tmp_path / "c")[0]
        with pytest.raises(ValueError, match=text):
            checkpoint.load(tmp_path / "c", dict(STATE))


def test_a_device_in_place_of_a_file_is_not_read_for_ever(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "c", STATE)
    file = data(tmp_path / "c") / "__0_0.distcp"
    file.unlink()
    file.symlink_to("/dev/zero")
    assert checkpoint.verify(tmp_path / "c") != []


def test_a_device_or_a_pipe_in_place_of_the_manifest_is_not_read(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "c", STATE)
    file = manifest(tmp_path / "c")
    file.unlink()
    file.symlink_to("/dev/zero")
    for work in (checkpoint.verify, lambda path: checkpoint.load(path, dict(STATE))):
        with pytest.raises(OSError, match=r"neither a file nor a folder.*rescale_data-"):
            work(tmp_path / "c")
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(OSError, match="neither a file nor a folder"):
        checkpoint.verify(tmp_path / "c")


def test_a_manifest_of_a_newer_version_is_not_called_damaged(tmp_path: Path) -> None:
    for step in (1, 2):
        checkpoint.save(tmp_path / f"step-{step}", STATE)
    file = manifest(tmp_path / "step-2")
    file.write_text(file.read_text().replace('"version": 1', '"version": 2'))
    reads: list[Callable[[], object]] = [
        lambda: checkpoint.verify(tmp_path / "step-2"),
        lambda: checkpoint.load(tmp_path / "step-2", dict(STATE)),
        lambda: RunReader(tmp_path).load_latest(dict(STATE)),
    ]
    for read in reads:
        with pytest.raises(ValueError, match=r"was written by a newer rescale_data: version 2.*Install") as caught:
            read()
        assert "damaged" not in str(caught.value)


ATTACKS: dict[str, Callable[[bytes], bytes]] = {
    "an attribute of Path": lambda m: b"\x80\x02cpathlib\nPath\nN}(X\x06\x00\x00\x00existsctorch\nSize\nu\x86b0" + m,
    "an attribute of Metadata": lambda m: (
        b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\nN}(X\x06\x00\x00\x00existsK\x01u\x86b0" + m
    ),
    "an attribute of a dtype": lambda m: b"\x80\x02ctorch\nfloat32\nN}(X\x06\x00\x00\x00existsK\x01u\x86b0" + m,
}


@pytest.mark.parametrize("how", ATTACKS)
def test_metadata_sets_nothing_that_others_see(tmp_path: Path, how: str) -> None:
    dcp.save(dict(STATE), checkpoint_id=tmp_path / "c")
    file = tmp_path / "c" / ".metadata"
    file.write_bytes(ATTACKS[how](pickle.dumps(pickle.loads(file.read_bytes()), protocol=2)[2:]))
    exists = pathlib.Path.exists
    with pytest.raises(ValueError, match="cannot be read"):
        checkpoint.load(tmp_path / "c", dict(STATE))
    assert pathlib.Path.exists is exists
    assert not hasattr(dcp.metadata.Metadata, "exists")


def test_metadata_of_torch_2_1(tmp_path: Path) -> None:
    """As torch's own test_compatibility.py makes it."""
    from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as Old

    with patch("torch.distributed.checkpoint.metadata.TensorProperties", Old):
        dcp.save({"w": torch.ones(4, 4, dtype=torch.bfloat16)}, checkpoint_id=tmp_path / "c")
    target = {"w": torch.zeros(4, 4, dtype=torch.bfloat16)}
    checkpoint.load(tmp_path / "c", target)
    assert target["w"].all()
    assert checkpoint.verify(tmp_path / "c") == []


class Extra:
    """What another tool puts into its metadata."""


def test_metadata_with_a_class_that_is_unknown_is_not_damaged(tmp_path: Path) -> None:
    dcp.save(dict(STATE), checkpoint_id=tmp_path / "c")
    file = tmp_path / "c" / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    metadata.storage_meta.modules = [Extra()]
    file.write_bytes(pickle.dumps(metadata))
    target = {"w": torch.zeros(3)}
    with pytest.raises(ValueError, match=r"test_strangers.Extra.*add_safe_globals") as caught:
        checkpoint.load(tmp_path / "c", target)
    assert "damaged" not in str(caught.value)
    with torch.serialization.safe_globals([Extra]):
        checkpoint.load(tmp_path / "c", target)
    assert target["w"].all()


class Level(enum.Enum):
    LOW = 1

    def __reduce_ex__(self, protocol: Any) -> Any:
        return of_python_3_11_0(self, protocol)


def of_python_3_11_0(member: enum.Enum, _: Any) -> Any:
    """Return what Python 3.11.0 to 3.11.3 write of a member of an enum."""
    return getattr, (type(member), member.name)


def test_enums_as_python_3_11_0_writes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DCP's metadata holds members of enums, for each tensor; values may, where the user has allowed the class."""
    encoding: Any = torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING
    monkeypatch.setattr(encoding, "__reduce_ex__", of_python_3_11_0)
    with torch.serialization.safe_globals([Level]):
        checkpoint.save(tmp_path / "c", {**STATE, "level": Level.LOW})
        assert any(b"getattr" in path.read_bytes() for path in (tmp_path / "c").rglob("*metadata*"))
        loaded: dict[str, Any] = {"w": torch.zeros(3), "level": None}
        checkpoint.load(tmp_path / "c", loaded)
    assert (loaded["w"].tolist(), loaded["level"]) == ([1, 1, 1], Level.LOW)
    with pytest.raises(ValueError, match=r"Level, which could run code.*add_safe_globals"):
        checkpoint.load(tmp_path / "c", loaded)


class Method:
    """Something that a pickle reaches by an attribute."""

    def __reduce__(self) -> Any:
        return getattr, (dict, "fromkeys")


def test_attributes_of_anything_else_are_refused(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "c", {"w": Method()})
    with pytest.raises(ValueError, match="could run code"):
        checkpoint.load(tmp_path / "c", {"w": None})


def test_a_run_that_may_only_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with CheckpointManager(tmp_path / "run", async_mode="disabled", keep_latest=None) as manager:
        for step, loss in ((1, 0.5), (2, 0.1), (3, float("nan"))):
            manager.save(step, {"w": torch.full((3,), float(step))}, metrics={"loss": loss})
        assert (manager.latest_step(), manager.best_step("loss", "min")) == (3, 2)
        assert manager.delete(3)

    def refuse(*_: Any) -> None:
        raise PermissionError(13, "read-only")

    for name in ("open_write", "mkdir", "rename", "rm_file", "remove_folder"):
        monkeypatch.setattr(DiskStore, name, refuse)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    reader, target = RunReader(tmp_path / "run"), {"w": torch.zeros(3)}
    assert (reader.steps(), reader.latest_step()) == ([1, 2], 2)
    assert (reader.best_step("loss", "min"), reader.best_step("loss", "max"), reader.best_step("x", "max")) == (
        2,
        1,
        None,
    )
    assert reader.load_latest(target) == 2
    reader.load(1, target)
    assert target["w"].tolist() == [1.0] * 3
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")} == before
    assert RunReader(tmp_path / "none").load_latest(target) is None


@pytest.mark.parametrize("may_write", [True, False])
def test_a_checkpoint_that_is_replaced_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, may_write: bool
) -> None:
    """At each file that is opened: what is loaded is the old one or the new one, and nothing is called damaged."""
    open_read, at = DiskStore.open_read, 0

    def no_lease(*_: Any) -> Any:
        raise PermissionError("read only")

    if not may_write:
        monkeypatch.setattr(readers, "Lease", no_lease)
    while True:
        opened: list[str] = []
        checkpoint.save(tmp_path / "c", {"w": torch.full((100,), 1.0), "n": 1}, overwrite=True)

        def replaced(store: DiskStore, path: str, at: int = at, opened: list[str] = opened) -> Any:
            opened.append(path)
            if len(opened) == at + 1:
                monkeypatch.setattr(DiskStore, "open_read", open_read)
                checkpoint.save(tmp_path / "c", {"w": torch.full((100,), 2.0), "n": 2}, overwrite=True)
                monkeypatch.setattr(DiskStore, "open_read", replaced)
            return open_read(store, path)

        monkeypatch.setattr(DiskStore, "open_read", replaced)
        target = {"w": torch.zeros(100), "n": 0}
        checkpoint.load(tmp_path / "c", target)
        monkeypatch.setattr(DiskStore, "open_read", open_read)
        if len(opened) <= at:
            break
        assert (target["w"] == target["n"]).all()
        at += 1
    assert at > 3


def save_and_wait(manager: CheckpointManager, step: int, state: dict[str, Any]) -> None:
    manager.save(step, state)
    manager.wait()


@pytest.mark.parametrize("mode", ["disabled", "thread"])
def test_a_disk_that_fills_up_inside_a_tensor(tmp_path: Path, mode: Any) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(disk)], check=False, capture_output=True
    )
    if mounted.returncode:
        pytest.skip("this user may not mount a tmpfs")
    try:
        with CheckpointManager(disk, async_mode=mode) as manager:
            manager.save(1, STATE)
            manager.wait()
            with pytest.raises(OSError, match=r"step-2 failed: No space left.*The disk is full") as caught:
                save_and_wait(manager, 2, {f"w{i}": torch.ones(1 << 18) for i in range(12)})
            assert str(disk) in str(caught.value)
            manager.save(3, STATE)
            manager.wait()
            assert manager.steps() == [1, 3]
            assert checkpoint.verify(disk / "step-3") == []
        assert not [name for name in os.listdir(disk) if "saving" in name]
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_the_futures_of_a_save(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 3)
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    with CheckpointManager(tmp_path) as manager:
        manager.warm_up(state)
        assert manager.steps() == []
        saving = manager.save(1, state)
        saving.staged.result(60)
        saving.committed.result(60)
        assert manager.latest_step() == 1
    with CheckpointManager(tmp_path, async_mode="disabled") as manager:
        assert manager.save(2, state).committed.done()
