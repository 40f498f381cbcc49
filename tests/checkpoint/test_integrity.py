"""A checkpoint exists wholly or not at all, and one that was changed is not loaded."""

from __future__ import annotations

import datetime
import errno
import os
import pickle
import re
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import rescale_data as rd
from rescale_data import checkpoint
from rescale_data.checkpoint import CheckpointManager
from rescale_data.checkpoint.storage.claims import SINGLE_STEP
from rescale_data.checkpoint.storage.commit import Ownership
from rescale_data.checkpoint.storage.open import open_store
from rescale_data.checkpoint.storage.store import DiskStore
from rescale_data.checkpoint.storage.values import Memory
from rescale_data.errors import DamagedCheckpointError
from tests.checkpoint.files import data, manifest
from tests.checkpoint.processes import run
from tests.checkpoint.stand_in import StandInLoader
from tests.states import opened


def state(step: int = 0) -> dict[str, Any]:
    loader = StandInLoader()
    loader.advance(step)
    return {"weights": torch.full((300,), float(step)), "number": step, "loader": loader}


def flip(file: Path, at: int) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated": (lambda c: truncate(data(c) / "__0_0.distcp"), "__0_0.distcp has"),
    "missing": (lambda c: (data(c) / "__0_0.distcp").unlink(), "__0_0.distcp is missing"),
    "empty": (lambda c: (data(c) / "__0_0.distcp").write_bytes(b""), "__0_0.distcp has 0 bytes"),
    "a bit of the metadata": (lambda c: flip(data(c) / ".metadata", 40), ".metadata is not what was saved"),
    "no metadata": (lambda c: (data(c) / ".metadata").unlink(), ".metadata is missing"),
    "a bit of the manifest": (lambda c: flip(manifest(c), 60), ".json is damaged"),
    "no manifest": (lambda c: manifest(c).unlink(), "never finished"),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_damage_is_an_error_with_the_files_name(tmp_path: Path, how: str) -> None:
    damage, words = DAMAGE[how]
    checkpoint.save(tmp_path / "c", state(1))
    assert checkpoint.verify(tmp_path / "c") == []
    damage(tmp_path / "c")
    target = state()
    with pytest.raises(ValueError, match=words):
        checkpoint.load(tmp_path / "c", target)
    with pytest.raises(ValueError, match=words):
        checkpoint.read_data_state(tmp_path / "c")
    assert words in " ".join(checkpoint.verify(tmp_path / "c"))
    assert target["loader"].loaded is None
    assert target["weights"].sum() == 0


def test_hazard_every_flipped_bit_is_found(tmp_path: Path) -> None:
    """Stock DCP loads a flipped byte in a tensor or a pickled number without a word."""
    checkpoint.save(tmp_path / "c", {"weights": torch.zeros(40), "number": 1000})
    file = data(tmp_path / "c") / "__0_0.distcp"
    silent = 0
    for at in range(0, file.stat().st_size, 17):
        flip(file, at)
        assert checkpoint.verify(tmp_path / "c") != [], f"byte {at}"
        with pytest.raises(DamagedCheckpointError, match="The state is half loaded"):
            checkpoint.load(tmp_path / "c", {"weights": torch.ones(40), "number": 0})
        got = {"weights": torch.ones(40), "number": 0}
        try:
            dcp.load(got, checkpoint_id=tmp_path / "c")
            silent += bool(got["weights"].any()) or got["number"] != 1000
        except BaseException:
            pass
        flip(file, at)
    assert silent > 0, "the hazard is gone from torch: this test can be simpler"
    assert checkpoint.verify(tmp_path / "c") == []


def test_the_step_before_is_loaded_over_all_that_a_damaged_one_left(tmp_path: Path) -> None:
    for step in (1, 2):
        checkpoint.save(
            tmp_path / f"step-{step}", {"a": torch.full((300,), step), "z": torch.full((300,), step), "n": step}
        )
    flip(data(tmp_path / "step-2") / "__0_0.distcp", 7000)
    target = {"a": torch.zeros(300, dtype=torch.int64), "z": torch.zeros(300, dtype=torch.int64), "n": 0}
    with pytest.raises(DamagedCheckpointError, match="half loaded"):
        checkpoint.load(tmp_path / "step-2", target)
    assert sum(int(target[name].sum()) for name in "az") == 600, "one of two"
    with pytest.warns(RuntimeWarning, match="passed over"):
        assert checkpoint.RunReader(tmp_path).load_latest(target) == 1
    assert [int(target["a"].sum()), int(target["z"].sum()), target["n"]] == [300, 300, 1]
    flip(data(tmp_path / "step-1") / "__0_0.distcp", 7000)
    with pytest.raises(DamagedCheckpointError, match=r"steps \[1, 2\].*\n(.*\n)*The state is half loaded"):
        checkpoint.RunReader(tmp_path).load_latest(target)


def test_a_state_that_is_half_loaded_is_told_though_the_step_before_does_not_fit(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "step-1", {"a": torch.ones(3)})
    checkpoint.save(tmp_path / "step-2", {"a": torch.ones(300)})
    flip(data(tmp_path / "step-2") / "__0_0.distcp", 100)
    with pytest.raises(ValueError, match="does not fit the state") as found:
        checkpoint.RunReader(tmp_path).load_latest({"a": torch.zeros(300)})
    (note,) = found.value.__notes__
    assert "step 2 was passed over" in note
    assert "The state is half loaded" in note


def test_a_state_of_which_one_value_refuses_what_was_loaded_is_half_loaded(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "c", {"weights": torch.ones(3), "loader": rd.DataLoader(range(8), global_batch_size=4)})
    target = {"weights": torch.zeros(3), "loader": rd.DataLoader(range(8), global_batch_size=4, seed=1)}
    with pytest.raises(rd.DataStateError, match="seed") as found:
        checkpoint.load(tmp_path / "c", target)
    assert "The state is half loaded" in found.value.__notes__[-1]


def test_hazard_a_file_of_another_step(tmp_path: Path) -> None:
    for step in (1, 2):
        checkpoint.save(tmp_path / str(step), state(step))
    shutil.copy(data(tmp_path / "1") / "__0_0.distcp", data(tmp_path / "2") / "__0_0.distcp")
    mixed = {"weights": torch.zeros(300), "number": 0}
    dcp.load(mixed, checkpoint_id=tmp_path / "2")
    assert mixed["number"] == 1, "the hazard: stock DCP takes it"
    with pytest.raises(ValueError, match="not what was saved"):
        checkpoint.load(tmp_path / "2", state())


def save_and_load_damaged(path: str) -> str:
    checkpoint.save(path, {"rank": {str(dist.get_rank()): torch.full((100,), dist.get_rank())}})
    if dist.get_rank() == 0:
        flip(data(Path(path)) / "__2_0.distcp", 700)
    dist.barrier()
    try:
        checkpoint.load(path, {"rank": {str(dist.get_rank()): torch.zeros(100, dtype=torch.int64)}})
    except ValueError as error:
        return str(error)
    return "loaded"


def test_all_ranks_raise_the_same_error(tmp_path: Path) -> None:
    texts = run(3, save_and_load_damaged, str(tmp_path / "c"))
    assert len(set(texts)) == 1
    assert "__2_0.distcp is not what was saved" in texts[0]


def test_sizes_are_checked_before_anything_is_read(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "c", state(1))
    flip(data(tmp_path / "c") / "__0_0.distcp", 3000)
    truncate(data(tmp_path / "c") / "__0_0.distcp")
    with pytest.raises(ValueError, match=r"were saved.*\n.*Nothing was loaded"):
        checkpoint.load(tmp_path / "c", state())


def test_a_stock_folder_with_a_short_file(tmp_path: Path) -> None:
    dcp.save({"weights": torch.ones(300)}, checkpoint_id=tmp_path / "c")
    assert checkpoint.verify(tmp_path / "c") == []
    file = tmp_path / "c" / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:900])
    assert "has 900 bytes" in checkpoint.verify(tmp_path / "c")[0]
    file.unlink()
    assert "is missing" in checkpoint.verify(tmp_path / "c")[0]


def test_nothing_there(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "none", tmp_path / "empty"):
        for call in (lambda p: checkpoint.load(p, state()), checkpoint.read_data_state, checkpoint.verify):
            with pytest.raises(FileNotFoundError, match="No checkpoint at"):
                call(path)
    checkpoint.save(tmp_path / "c", state(1))
    for file in (manifest(tmp_path / "c"), tmp_path / "c" / ".metadata"):
        file.unlink()
    with pytest.raises(FileNotFoundError, match=r"No checkpoint at .*: it holds \['1-\w+-1'\]\.$"):
        checkpoint.load(tmp_path / "c", state())
    with pytest.raises(TypeError, match="str or os"):
        checkpoint.load(3, state())  # type: ignore[arg-type]


def test_a_taken_path(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "c", state(1))
    with pytest.raises(ValueError, match="overwrite=True"):
        checkpoint.save(tmp_path / "c", state(2))
    checkpoint.save(tmp_path / "c", state(3), overwrite=True)
    assert opened(checkpoint.read_data_state(tmp_path / "c"))["step"] == 3
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match="is a file"):
        checkpoint.save(tmp_path / "file", state())
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    with pytest.raises(ValueError, match="is no checkpoint; it is not replaced"):
        checkpoint.save(tmp_path / "mine", state(), overwrite=True)
    with pytest.raises(NotADirectoryError, match="part of the path is a file"):
        checkpoint.save(tmp_path / "file" / "c", state())
    assert sorted(os.listdir(tmp_path)) == ["c", "file", "mine"]


def test_files_are_whole_and_synced_before_the_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    checkpoint.save(tmp_path / "c", state())
    (found,) = at_commit
    for file in data(tmp_path / "c").iterdir():
        assert found[".metadata.tmp" if file.name == ".metadata" else file.name] == file.stat().st_size


def test_pieces_are_read_into_memory_that_is_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [400 + number % 2 for number in range(50)] + [10_000, 3, 0, 10_001, 9_999]
    state = {f"w{number:02}": torch.randn(size) for number, size in enumerate(sizes)} | {"tuple": (torch.ones(7), 1)}
    checkpoint.save(tmp_path / "c", state)
    taken: list[int] = []
    empty = Memory.empty
    monkeypatch.setattr(Memory, "empty", lambda size: taken.append(size) or empty(size))
    target: dict[str, Any] = {name: torch.zeros_like(state[name]) for name in state if name[0] == "w"} | {"tuple": None}
    checkpoint.load(tmp_path / "c", target)
    assert len(taken) < 12
    for name, value in state.items():
        assert (
            torch.equal(torch.as_tensor(target[name][0]), value[0])
            if name == "tuple"
            else torch.equal(target[name], value)
        )


class BrokenStore(DiskStore):
    """A disk that fails at one of its writes, as DCP's streams meet it."""

    number = errno.ENOSPC

    def open_write(self, path: str) -> BinaryIO:
        if self.at in path:
            raise OSError(self.number, os.strerror(self.number), path)
        return super().open_write(path)

    at = ".distcp"


@pytest.mark.parametrize("at", [".distcp", ".metadata.tmp", "rescale_data-"])
@pytest.mark.parametrize(("number", "words"), [(errno.ENOSPC, "disk is full"), (errno.EACCES, "No permission")])
def test_a_failing_disk_leaves_the_checkpoint_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str, number: int, words: str
) -> None:
    checkpoint.save(tmp_path / "c", state(1))
    with monkeypatch.context() as patch:
        patch.setattr("rescale_data.checkpoint.storage.open.DiskStore", BrokenStore)
        patch.setattr(BrokenStore, "at", at)
        patch.setattr(BrokenStore, "number", number)
        with pytest.raises(OSError, match=words) as caught:
            checkpoint.save(tmp_path / "c", state(2), overwrite=True)
    assert caught.value.errno == number
    target = state()
    checkpoint.load(tmp_path / "c", target)
    assert target["number"] == 1


def test_a_put_that_fails_at_its_rename_leaves_no_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(store: DiskStore, path: str, new_path: str) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    monkeypatch.setattr(DiskStore, "rename", fail)
    with pytest.raises(OSError, match="Input/output"):
        DiskStore().put(f"{tmp_path}/file", b"content")
    assert list(tmp_path.iterdir()) == []


def test_hazard_a_killed_save_into_an_old_folder_is_not_a_mix(tmp_path: Path) -> None:
    """Stock DCP overwrites file by file: killed after the first, it loads values of two steps."""
    for step in (1, 2):
        dcp.save({"a": torch.full((5,), step), "b": step}, checkpoint_id=tmp_path / f"stock-{step}")
    shutil.copy(tmp_path / "stock-2" / "__0_0.distcp", tmp_path / "stock-1")
    got = {"a": torch.zeros(5, dtype=torch.int64), "b": 0}
    dcp.load(got, checkpoint_id=tmp_path / "stock-1")
    assert got["b"] == 2, "the hazard: files of step 2 under the metadata of step 1"
    checkpoint.save(tmp_path / "c", state(1))
    owner = Ownership(DiskStore(), str(tmp_path / "c"), is_single=True)
    draft = tmp_path / "c" / owner.begin(SINGLE_STEP).folder
    shutil.copy(tmp_path / "stock-2" / "__0_0.distcp", draft)
    with pytest.raises(ValueError, match="is held by this process"):
        checkpoint.save(tmp_path / "c", state(3), overwrite=True)
    del owner  # a kill does
    assert opened(checkpoint.read_data_state(tmp_path / "c"))["step"] == 1, "what is written aside is not seen"
    checkpoint.save(tmp_path / "c", state(3), overwrite=True)
    assert not draft.exists(), "the killed save's files are gone"


class Payload:
    def __reduce__(self) -> Any:
        return (os.system, ("touch /tmp/rescale_data_was_here",))


def test_untrusted_metadata_runs_no_code(tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(2)}, checkpoint_id=tmp_path / "c")
    metadata = pickle.loads((tmp_path / "c" / ".metadata").read_bytes())
    metadata.planner_data = {"a": Payload()}
    (tmp_path / "c" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match=r"posix.system.*could run code"):
        checkpoint.load(tmp_path / "c", {"a": torch.ones(2)})
    with pytest.raises(ValueError, match=r"posix.system"):
        checkpoint.read_data_state(tmp_path / "c")
    assert not os.path.exists("/tmp/rescale_data_was_here")


def test_untrusted_values_run_no_code(tmp_path: Path) -> None:
    dcp.save({"a": Payload(), "b": {"c": 3}}, checkpoint_id=tmp_path / "c")
    os.path.exists("/tmp/rescale_data_was_here") and os.unlink("/tmp/rescale_data_was_here")
    with pytest.raises(ValueError, match=r"a is refused: .*could run code"):
        checkpoint.load(tmp_path / "c", {"a": None, "b": {"c": 0}})
    assert not os.path.exists("/tmp/rescale_data_was_here")
    target: dict[str, Any] = {"b": {"c": 0}}
    checkpoint.load(tmp_path / "c", target)
    assert target["b"]["c"] == 3


def test_metadata_that_points_outside_of_the_folder(tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(2)}, checkpoint_id=tmp_path / "c")
    metadata = pickle.loads((tmp_path / "c" / ".metadata").read_bytes())
    for place in metadata.storage_data.values():
        place.relative_path = "../other/__0_0.distcp"
    (tmp_path / "c" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match="outside of the folder"):
        checkpoint.load(tmp_path / "c", {"a": torch.ones(2)})


def test_a_link_to_a_checkpoint_is_read_and_never_written_through(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "old" / "step-1", {"a": 1})
    (tmp_path / "latest").symlink_to("old/step-1")
    target = {"a": 0}
    checkpoint.load(tmp_path / "latest", target)
    assert target == {"a": 1}
    with pytest.raises(ValueError, match="overwrite=True"):
        checkpoint.save(tmp_path / "latest", {"a": 2})
    checkpoint.save(tmp_path / "latest", {"a": 2}, overwrite=True)
    assert not (tmp_path / "latest").is_symlink()
    checkpoint.load(tmp_path / "old" / "step-1", target)
    assert target == {"a": 1}, "the checkpoint that the link pointed to"
    checkpoint.load(tmp_path / "latest", target)
    assert target == {"a": 2}
    assert sorted(os.listdir(tmp_path)) == ["latest", "old"]


def test_a_url_is_a_str(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="Give a URL as a str"):
        checkpoint.save(Path("memory://run/x"), {"a": 1})
    assert not list(tmp_path.iterdir())


def test_a_file_in_an_object_store_is_not_taken_for_missing() -> None:
    url = f"memory://{uuid.uuid4().hex}/a.pt"
    open_store(url)[0].put(url, b"x")
    with pytest.raises(ValueError, match="Copy it to a local disk first"):
        checkpoint.load(url, {"a": 1})


def test_a_value_that_a_load_would_refuse_is_named_when_it_is_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The run that saves it would learn so when it is started again."""
    state = {
        "best": {"when": datetime.datetime(2026, 1, 1)},
        "hidden": np.array([Payload()]),
        "betas": ((0.9, 0.99), None),
    }
    for step in (1, 2):
        with CheckpointManager(tmp_path / "run", async_mode="disabled") as manager:
            manager.save(step, state)
    assert re.findall(r"(\S+) is a (\S+), which no load takes", caplog.text) == [
        ("best.when", "datetime"),
        ("hidden", "ndarray"),
    ]
    for name in ("best", "hidden"):
        with pytest.raises(ValueError, match="is refused: "):
            checkpoint.load(tmp_path / "run" / "step-1", {name: state[name]})
    assert not os.path.exists("/tmp/rescale_data_was_here")
