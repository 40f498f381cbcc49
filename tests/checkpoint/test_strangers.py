"""What others do to a run's folder: a second writer, links, files that lead outside, code in pickles, odd metadata."""

import datetime
import enum
import json
import multiprocessing
import os
import pickle
import re
import signal
import zlib
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from rescale_data import checkpoint
from rescale_data.checkpoint import CheckpointManager, RunReader
from rescale_data.checkpoint.storage import readers
from rescale_data.checkpoint.storage.store import DiskStore
from tests.checkpoint.steps import data, manifest

STATE = {"w": torch.ones(3)}


def hold(folder, pid):
    with CheckpointManager(folder):
        pid.send(os.getpid())
        signal.pause()


def test_a_second_manager_is_told_which_process_holds_the_folder(tmp_path):
    run, context = tmp_path.resolve() / "run", multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=hold, args=(run, theirs))
    process.start()
    pid = ours.recv()
    with pytest.raises(ValueError, match=rf"held by process {pid} on {os.uname().nodename}"):
        CheckpointManager(run)
    assert RunReader(run).steps() == []
    process.kill()
    process.join()
    with CheckpointManager(run) as manager:
        assert manager.steps() == [], "a killed one holds nothing"


def test_a_save_whose_files_something_removes_is_an_error(tmp_path, monkeypatch):
    rename = DiskStore.rename

    def tidy(store, path, new_path):
        rename(store, path, new_path)
        for file in (tmp_path / "c").glob("*/__0_0.distcp"):
            file.unlink()

    monkeypatch.setattr(DiskStore, "rename", tidy)
    with pytest.raises(ValueError, match=r"__0_0\.distcp is missing"):
        checkpoint.save(tmp_path / "c", STATE)


@pytest.mark.parametrize("how", ["retention", "delete", "overwrite", "save", "dangling"])
def test_a_link_is_read_and_never_entered(tmp_path, how):
    foreign, new = tmp_path / "old" / "step-100", tmp_path / "new"
    checkpoint.save(foreign, STATE)
    new.mkdir()
    (new / "step-100").symlink_to(foreign)
    if how == "dangling":
        (new / "step-99").symlink_to(new / "nowhere")
    elif how == "save":
        with pytest.raises(ValueError, match="overwrite=True"):
            checkpoint.save(new / "step-100", STATE)
        checkpoint.save(new / "step-100", STATE, overwrite=True)
        assert not (new / "step-100").is_symlink()
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
        elif how == "retention":
            manager.save(101, STATE)
            manager._wait_until_idle()
            assert manager.steps() == [101]
    assert checkpoint.verify(foreign) == []
    assert sorted(os.listdir(data(foreign))) == [".metadata", "__0_0.distcp"]


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname", "a/../../outside"])
def test_a_manifest_or_metadata_that_names_a_file_outside(tmp_path, name):
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

    def lead_outside(metadata):
        for place in metadata.storage_data.values():
            place.relative_path = name

    change_metadata(tmp_path / "stock", lead_outside)
    with pytest.raises(ValueError, match=outside):
        checkpoint.load(tmp_path / "stock", dict(STATE))


def test_devices_and_pipes_in_place_of_files_are_not_read(tmp_path):
    checkpoint.save(tmp_path / "c", STATE)
    of_data, of_manifest = data(tmp_path / "c") / "__0_0.distcp", manifest(tmp_path / "c")
    of_data.unlink()
    of_data.symlink_to("/dev/zero")
    assert checkpoint.verify(tmp_path / "c") != []
    of_manifest.unlink()
    of_manifest.symlink_to("/dev/zero")
    for work in (checkpoint.verify, lambda path: checkpoint.load(path, dict(STATE))):
        with pytest.raises(OSError, match=r"neither a file nor a folder.*rescale_data-"):
            work(tmp_path / "c")
    of_manifest.unlink()
    os.mkfifo(of_manifest)
    with pytest.raises(OSError, match="neither a file nor a folder"):
        checkpoint.verify(tmp_path / "c")


def test_a_manifest_of_a_newer_version_is_not_called_damaged(tmp_path):
    for step in (1, 2):
        checkpoint.save(tmp_path / f"step-{step}", STATE)
    file = manifest(tmp_path / "step-2")
    file.write_text(file.read_text().replace('"version": 1', '"version": 2'))
    reads = [
        lambda: checkpoint.verify(tmp_path / "step-2"),
        lambda: checkpoint.load(tmp_path / "step-2", dict(STATE)),
        lambda: RunReader(tmp_path).load_latest(dict(STATE)),
    ]
    for read in reads:
        with pytest.raises(ValueError, match=r"was written by a newer rescale_data: version 2.*Install") as caught:
            read()
        assert "damaged" not in str(caught.value)


def change_metadata(path, change):
    dcp.save(dict(STATE), checkpoint_id=path)
    metadata = pickle.loads((path / ".metadata").read_bytes())
    change(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


class Extra:
    """What another tool puts into its metadata."""


class Payload:
    def __init__(self, function=os.mkdir, *args):
        self.reduced = (function, args or ("payload",))

    def __reduce__(self):
        return self.reduced


CODE = [Payload(), Payload(getattr, dict, "fromkeys"), np.array([Payload()]), Extra()]


@pytest.mark.parametrize("path", ["metadata", "value"])
@pytest.mark.parametrize(
    "value", CODE, ids=["a call", "an attribute", "an array of objects", "a class of another tool"]
)
def test_a_checkpoint_runs_no_code(tmp_path, monkeypatch, path, value):
    monkeypatch.chdir(tmp_path)
    if path == "metadata":
        change_metadata(tmp_path / "c", lambda metadata: setattr(metadata.storage_meta, "modules", [value]))
    else:
        dcp.save({"odd": value, **STATE}, checkpoint_id=tmp_path / "c")
    target = {"w": torch.zeros(3)} | ({"odd": None} if path == "value" else {})
    with pytest.raises(ValueError, match=r"(?s)could run code.*add_safe_globals") as caught:
        checkpoint.load(tmp_path / "c", target)
    assert "damaged" not in str(caught.value)
    if path == "metadata":
        with pytest.raises(ValueError, match="could run code"):
            checkpoint.read_data_state(tmp_path / "c")
    assert not (tmp_path / "payload").exists()
    target.pop("odd", None)
    with torch.serialization.safe_globals([Extra] if isinstance(value, Extra) else []):
        if path == "value" or isinstance(value, Extra):
            checkpoint.load(tmp_path / "c", target)
            assert target["w"].all()


def test_metadata_of_torch_2_1(tmp_path):
    """As torch's own test_compatibility.py makes it."""
    from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as Old

    with patch("torch.distributed.checkpoint.metadata.TensorProperties", Old):
        dcp.save({"w": torch.ones(4, 4, dtype=torch.bfloat16)}, checkpoint_id=tmp_path / "c")
    target = {"w": torch.zeros(4, 4, dtype=torch.bfloat16)}
    checkpoint.load(tmp_path / "c", target)
    assert target["w"].all()
    assert checkpoint.verify(tmp_path / "c") == []


class Level(enum.Enum):
    LOW = 1

    def __reduce_ex__(self, protocol):
        return of_python_3_11_0(self, protocol)


def of_python_3_11_0(member, _):
    return getattr, (type(member), member.name)


def test_enums_as_python_3_11_0_writes_them(tmp_path, monkeypatch):
    """DCP's metadata holds members of enums, for each tensor; values may, where the user has allowed the class."""
    encoding = torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING
    monkeypatch.setattr(encoding, "__reduce_ex__", of_python_3_11_0)
    with torch.serialization.safe_globals([Level]):
        checkpoint.save(tmp_path / "c", {**STATE, "level": Level.LOW})
        assert any(b"getattr" in path.read_bytes() for path in (tmp_path / "c").rglob("*metadata*"))
        loaded = {"w": torch.zeros(3), "level": None}
        checkpoint.load(tmp_path / "c", loaded)
    assert (loaded["w"].tolist(), loaded["level"]) == ([1, 1, 1], Level.LOW)
    with pytest.raises(ValueError, match=r"Level, which could run code.*add_safe_globals"):
        checkpoint.load(tmp_path / "c", loaded)


def test_a_value_that_a_load_would_refuse_is_named_when_it_is_saved(tmp_path, caplog):
    """The run that saves it would learn so when it is started again."""
    best, hidden = {"when": datetime.datetime(2026, 1, 1)}, np.array([Extra()])
    state = {"best": best, "hidden": hidden, "betas": ((0.9, 0.99), None)}
    for step in (1, 2):
        with CheckpointManager(tmp_path / "run", async_mode="disabled") as manager:
            manager.save(step, state)
    named = re.findall(r"(\S+) is a (\S+), which no load takes", caplog.text)
    assert named == [("best.when", "datetime"), ("hidden", "ndarray")]
    for name in ("best", "hidden"):
        with pytest.raises(ValueError, match="is refused: "):
            checkpoint.load(tmp_path / "run" / "step-1", {name: state[name]})


def test_a_run_that_may_only_be_read(tmp_path, monkeypatch):
    with CheckpointManager(tmp_path / "run", async_mode="disabled", keep_latest=None) as manager:
        for step, loss in ((1, 0.5), (2, 0.1), (3, float("nan"))):
            manager.save(step, {"w": torch.full((3,), float(step))}, metrics={"loss": loss})
        assert (manager.latest_step(), manager.best_step("loss", "min")) == (3, 2)
        assert manager.delete(3)

    for name in ("open_write", "mkdir", "rename", "rm_file", "remove_folder"):
        monkeypatch.setattr(DiskStore, name, Mock(side_effect=PermissionError(13, "read-only")))
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    reader, target = RunReader(tmp_path / "run"), {"w": torch.zeros(3)}
    assert (reader.steps(), reader.latest_step()) == ([1, 2], 2)
    best = [reader.best_step(*of) for of in (("loss", "min"), ("loss", "max"), ("x", "max"))]
    assert best == [2, 1, None]
    assert reader.load_latest(target) == 2
    reader.load(1, target)
    assert target["w"].tolist() == [1.0] * 3
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")} == before
    assert RunReader(tmp_path / "none").load_latest(target) is None


@pytest.mark.parametrize("may_write", [True, False])
def test_a_checkpoint_that_is_replaced_while_it_is_read(tmp_path, monkeypatch, may_write):
    """At each file that is opened: what is loaded is the old one or the new one, and nothing is called damaged."""
    open_read, opened, at = DiskStore.open_read, [], 0

    def save(number):
        checkpoint.save(tmp_path / "c", {"w": torch.full((100,), float(number)), "n": number}, overwrite=True)

    def replaced(store, path):
        opened.append(path)
        if len(opened) == at + 1:
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(DiskStore, "open_read", open_read)
                save(2)
        return open_read(store, path)

    if not may_write:
        monkeypatch.setattr(readers, "Lease", Mock(side_effect=PermissionError("read only")))
    while len(opened) == 0 or len(opened) > at:
        save(1)
        at += bool(opened)
        opened.clear()
        target = {"w": torch.zeros(100), "n": 0}
        with monkeypatch.context() as patched:
            patched.setattr(DiskStore, "open_read", replaced)
            checkpoint.load(tmp_path / "c", target)
        assert (target["w"] == target["n"]).all()
    assert at > 3
