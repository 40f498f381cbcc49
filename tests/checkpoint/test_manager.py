"""The manager: what is kept, what waits for what, and what a failure leaves."""

from __future__ import annotations

import errno
import gc
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.optim.optimizer import register_optimizer_step_pre_hook

from rescale_data import checkpoint
from rescale_data.checkpoint import CheckpointManager, RunReader
from rescale_data.checkpoint.retention import Retention
from rescale_data.checkpoint.storage.store import DiskStore
from rescale_data.cli import inspect
from tests.checkpoint.files import data
from tests.checkpoint.models import Plain, mesh, whole, wrap
from tests.checkpoint.processes import run
from tests.checkpoint.stand_in import StandInLoader

MODES = ["disabled", "thread"]


class Training:
    """A state in which every value says which step it is of."""

    def __init__(self, how: str = "none") -> None:
        torch.manual_seed(0)
        self.model = wrap(nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6)) if how == "none" else Plain(), how)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5, momentum=0.9)
        self.loader = StandInLoader(mesh=mesh())
        self.extra = {"tensor": torch.zeros(3), "list": [0]}

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "loader": self.loader, "extra": self.extra}

    def step(self) -> None:
        self.loader.advance()
        self.extra["tensor"] += 1
        self.extra["list"][0] += 1
        self.model(
            torch.full((4, 8 if isinstance(self.model, nn.Sequential) else 6), float(self.loader.step))
        ).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def numbers(self) -> dict[str, Any]:
        optimizer = get_optimizer_state_dict(self.model, self.optimizer)["state"]
        values = get_model_state_dict(self.model) | {
            f"{name}.{key}": v for name, s in optimizer.items() for key, v in s.items()
        }
        numbers = {name: whole(value).tolist() for name, value in values.items()}
        return numbers | {
            "loader": self.loader.step,
            "tensor": self.extra["tensor"].tolist(),
            "list": list(self.extra["list"]),
        }


@pytest.mark.parametrize("mode", MODES)
def test_a_checkpoint_holds_the_step_that_was_saved(tmp_path: Path, mode: Any) -> None:
    """However far training and the loader have gone on while it was written."""
    training, expected = Training(), {}
    with CheckpointManager(tmp_path / "run", keep_latest=None, async_mode=mode) as manager:
        for step in range(1, 6):
            training.step()
            expected[step] = training.numbers()
            manager.save(step, training.state)
            training.step()
        assert manager.load_latest(Training().state) == 5, "a load waits for the save that runs"
    with CheckpointManager(tmp_path / "run", async_mode="disabled") as manager:
        assert manager.steps() == [1, 2, 3, 4, 5]
        for step in manager.steps():
            other = Training()
            manager.load(step, other.state)
            assert other.numbers() == expected[step]


def train_with_collectives(folder: str, mode: Any, how: str) -> list[Any]:
    training, seen = Training(how), []
    with CheckpointManager(folder, keep_latest=2, async_mode=mode) as manager:
        for step in range(1, 6):
            training.step()
            seen.append(training.numbers())
            manager.save(step, training.state)
            for _ in range(20):
                dist.all_reduce(torch.ones(64))
        assert manager.load_latest(Training(how).state) == 5
    return seen


@pytest.mark.parametrize(("mode", "how"), [("thread", "fsdp2"), ("thread", "fsdp1"), ("thread", "fsdp1-flat")])
def test_hazard_async_saves_while_training_runs_collectives(tmp_path: Path, mode: str, how: str) -> None:
    """On the default group they hang; the manager has a gloo group of its own, and one save at a time on it."""
    seen = run(2, train_with_collectives, str(tmp_path / "run"), mode, how)
    assert seen[0] == seen[1]
    assert sorted(name for name in os.listdir(tmp_path / "run") if name.startswith("step")) == ["step-4", "step-5"]
    other = Training("unwrapped")
    checkpoint.load(tmp_path / "run" / "step-5", other.state)
    assert other.numbers() == seen[0][-1]


def save_both_ways(folder: str) -> list[Any]:
    training, seen = Training("fsdp2"), []
    with CheckpointManager(f"{folder}/run", keep_latest=None) as manager:
        for step in range(1, 5):
            training.step()
            seen.append(training.numbers())
            manager.save(step, training.state)
            checkpoint.save(f"{folder}/whole-{step}", training.state)
    return seen


def test_synchronous_saves_while_one_of_a_manager_runs(tmp_path: Path) -> None:
    """One on the default group, one on the manager's; and both read the state that it was."""
    seen = run(2, save_both_ways, str(tmp_path))[0]
    for step, expected in enumerate(seen, 1):
        for path in (tmp_path / "run" / f"step-{step}", tmp_path / f"whole-{step}"):
            other = Training("unwrapped")
            checkpoint.load(path, other.state)
            assert other.numbers() == expected


class GatedStore(DiskStore):
    """A disk on which data files wait for a gate."""

    gate = threading.Event()
    waiting = threading.Event()

    def open_write(self, path: str) -> BinaryIO:
        if path.endswith(".distcp"):
            type(self).waiting.set()
            assert type(self).gate.wait(60)
        return super().open_write(path)


@pytest.fixture
def gated(monkeypatch: pytest.MonkeyPatch) -> type[GatedStore]:
    GatedStore.gate.clear()
    GatedStore.waiting.clear()
    monkeypatch.setattr("rescale_data.checkpoint.storage.open.DiskStore", GatedStore)
    return GatedStore


def test_hazard_a_stager_is_not_used_again_while_its_upload_runs(tmp_path: Path, gated: type[GatedStore]) -> None:
    """With DCP's alone the first checkpoint then holds the second's values."""
    weights = nn.Linear(4, 4, bias=False)
    with CheckpointManager(tmp_path / "run") as manager:
        nn.init.constant_(weights.weight, 1.0)
        manager.save(1, {"model": weights})
        manager.wait_for_staging()
        nn.init.constant_(weights.weight, 2.0)
        assert gated.waiting.wait(60)
        assert manager.steps() == []
        second = threading.Thread(target=manager.save, args=(2, {"model": weights}))
        second.start()
        while second.is_alive() and not manager.num_waits:
            second.join(0.01)
        assert second.is_alive(), "the second save waits"
        gated.gate.set()
        second.join()
        assert manager.num_waits == 1
        assert manager.wait_seconds > 0
    for step in (1, 2):
        loaded = nn.Linear(4, 4, bias=False)
        checkpoint.load(tmp_path / "run" / f"step-{step}", {"model": loaded})
        assert loaded.weight.unique().tolist() == [float(step)]


def test_hazard_a_save_after_an_interrupted_wait_waits_for_the_copy_that_is_written(
    tmp_path: Path, gated: type[GatedStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while a save is waited for, and a last save: the first would be written with the values of the last."""
    weights = nn.Linear(4, 4, bias=False)
    with CheckpointManager(tmp_path / "run") as manager:
        nn.init.constant_(weights.weight, 1.0)
        committed = manager.save(1, {"model": weights}).committed
        manager.wait_for_staging()
        nn.init.constant_(weights.weight, 2.0)
        assert gated.waiting.wait(60)
        with monkeypatch.context() as patch:
            patch.setattr(committed, "exception", Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                manager.wait()
        exception = committed.exception
        monkeypatch.setattr(committed, "exception", lambda: (gated.gate.set(), exception())[1])
        manager.save(2, {"model": weights})
        manager.wait_for_staging()
        gated.gate.set()
    for step in (1, 2):
        loaded = nn.Linear(4, 4, bias=False)
        checkpoint.load(tmp_path / "run" / f"step-{step}", {"model": loaded})
        assert loaded.weight.unique().tolist() == [float(step)]


def test_the_next_optimizer_step_waits_for_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    in_background: set[int] = set()
    copying, go_on = threading.Event(), threading.Event()
    from torch.distributed.checkpoint.staging import DefaultStager

    def slow(_: DefaultStager, state: Any) -> Any:
        in_background.update(tensor.data_ptr() for tensor in state.values())
        copying.set()
        assert go_on.wait(60)
        order.append("copied")
        return {key: value.clone() for key, value in state.items()}

    monkeypatch.setattr(DefaultStager, "stage", slow)
    training = Training()
    training.step()
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, training.state)
        assert copying.wait(60)
        order.append("saved")
        threading.Timer(0.1, go_on.set).start()
        expected = training.numbers()
        training.optimizer.step()
        order.append("stepped")
    assert order == ["saved", "copied", "stepped"]
    assert {parameter.data_ptr() for parameter in training.model.parameters()} <= in_background
    other = Training()
    checkpoint.load(tmp_path / "run" / "step-1", other.state)
    assert other.numbers() == expected


def test_optimizers_step_whatever_hooks_there_are(tmp_path: Path) -> None:
    """Several managers that stage at once, and hooks of others, registered before and after."""
    training, steps = Training(), []
    hooks = [register_optimizer_step_pre_hook(lambda *_: steps.append("before"))]
    with CheckpointManager(tmp_path / "a") as first, CheckpointManager(tmp_path / "b") as second:
        hooks.append(register_optimizer_step_pre_hook(lambda *_: steps.append("after")))
        for step in (1, 2):
            training.step()
            first.save(step, training.state)
            second.save(step, training.state)
            hooks.append(register_optimizer_step_pre_hook(lambda *_: steps.append("later")))
    training.step()
    for hook in hooks:
        hook.remove()
    assert steps == ["before", "after", "before", "after", "later", "before", "after", "later", "later"]


def test_a_manager_that_is_dropped_frees_its_copies(tmp_path: Path) -> None:
    training = Training()
    manager = CheckpointManager(tmp_path / "run")
    manager.save(1, training.state)
    manager.wait()
    manager._wait_until_idle()  # the thread that deletes old ones holds the manager until it has done so
    stager = weakref.ref(manager._stager)
    del manager
    gc.collect()
    assert stager() is None
    training.step()


def test_hazard_staging_without_an_accelerator(tmp_path: Path) -> None:
    """``StagingOptions()`` with its defaults fails where there is none; the manager asks what there is."""
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    if not torch.accelerator.is_available():
        with pytest.raises(AssertionError):
            DefaultStager(StagingOptions())
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save(0, {"model": nn.Linear(1, 1)})


def test_a_stager_that_copies_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of torch 2.10 and 2.11, which forget with their first copy how to make one."""
    from torch.distributed.checkpoint.staging import DefaultStager

    stage, used = DefaultStager.stage, list[DefaultStager]()

    def once(self: DefaultStager, state: Any) -> Any:
        if self in used:
            raise KeyError(type)
        used.append(self)
        return stage(self, state)

    monkeypatch.setattr(DefaultStager, "stage", once)
    training = Training()
    with CheckpointManager(tmp_path / "run") as manager:
        for step in (1, 2, 3):
            training.step()
            expected = training.numbers()
            manager.save(step, training.state)
    assert len(used) == 3
    other = Training()
    checkpoint.load(tmp_path / "run" / "step-3", other.state)
    assert other.numbers() == expected


class FailingStore(DiskStore):
    fail = False

    def open_write(self, path: str) -> BinaryIO:
        if self.fail and path.endswith(".distcp"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        return super().open_write(path)


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> type[FailingStore]:
    monkeypatch.setattr("rescale_data.checkpoint.storage.open.DiskStore", FailingStore)
    monkeypatch.setattr(FailingStore, "fail", False)
    return FailingStore


def test_a_failed_upload_is_raised_by_the_next_call(
    tmp_path: Path, failing: type[FailingStore], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    training = Training()
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, training.state)
        manager.wait()
        monkeypatch.setattr(failing, "fail", True)
        manager.save(2, training.state)
        with pytest.raises(OSError, match="disk is full") as caught:
            manager.save(3, training.state)
        assert caught.value.errno == errno.ENOSPC
        assert "disk is full" in caplog.text, "logged when it happened, too"
        monkeypatch.setattr(failing, "fail", False)
        assert manager.steps() == [1]
        manager.save(4, training.state)
    assert sorted(os.listdir(tmp_path / "run")) == [".claims", ".leases", "step-1", "step-4"]


def test_a_failed_upload_is_raised_by_close(
    tmp_path: Path, failing: type[FailingStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = CheckpointManager(tmp_path / "run")
    monkeypatch.setattr(failing, "fail", True)
    manager.save(1, {"a": torch.ones(1)})
    with pytest.raises(OSError, match="disk is full"):
        manager.close()
    manager.close()
    with pytest.raises(ValueError, match="closed"):
        manager.save(2, {"a": 1})


class UnsavableOnRankOne:
    def state_dict(self) -> dict[str, Any]:
        if dist.get_rank() == 1:
            raise RuntimeError("no state on this rank")
        return {"a": 1}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


def fail_on_rank_one(folder: str) -> list[str]:
    """What each call says that cannot work on rank 1 alone, and what is loaded afterwards."""
    odd = dist.get_rank() == 1
    loss = {"loss": "low" if odd else 1.0}
    manager = CheckpointManager(f"{folder}/run", async_mode="disabled")
    background = CheckpointManager(f"{folder}/background")
    calls: list[Callable[[], Any]] = [
        lambda: checkpoint.save(f"{folder}/c", {"value": UnsavableOnRankOne()}),
        lambda: checkpoint.save(f"{folder}/c", {1: 1} if odd else {"a": 1}),
        lambda: checkpoint.save(f"{folder}/c", {"a": 1}, metrics=loss),  # type: ignore[arg-type]
        lambda: manager.save(1, {"value": UnsavableOnRankOne()}),
        lambda: manager.save(-1 if odd else 1, {"a": 1}),
        lambda: (background.save(1, {"a": 1}, metrics=loss), background.wait()),  # type: ignore[arg-type]
        lambda: (background.save(2, {"value": UnsavableOnRankOne()}), background.wait()),
        lambda: checkpoint.load(f"{folder}/whole", {"a": [StandInLoader()] if odd else 0}),
    ]
    checkpoint.save(f"{folder}/whole", {"a": 1})
    said = []
    for call in calls:
        with pytest.raises((RuntimeError, TypeError, ValueError)) as caught:
            call()
        said.append(str(caught.value))
    background.save(3, {"a": 1})
    manager.close()
    background.close()
    assert background.steps() == [3], "saves go on behind an error"
    return said


def test_what_is_wrong_on_one_rank_is_an_error_on_all(tmp_path: Path) -> None:
    first, second = run(2, fail_on_rank_one, str(tmp_path))
    assert first == second
    for text, words in zip(
        first,
        ("no state", "keys are strings", "'loss'", "no state", "step=-1", "'loss'", "no state", "a name of its own"),
        strict=True,
    ):
        assert words in text
    assert sorted(name for name in os.listdir(tmp_path)) == ["background", "run", "whole"]


@pytest.fixture
def forked() -> Iterator[Callable[[], None]]:
    """Starts a child that has a copy of all that is open here, and lives until the test ends."""
    children: list[Any] = []

    def fork() -> None:
        child = multiprocessing.get_context("fork").Process(target=signal.pause)
        child.start()
        children.append(child)

    yield fork
    for child in children:
        child.kill()
        child.join()


@pytest.mark.parametrize("mode", MODES)
def test_close_ends_though_a_forked_child_lives(
    tmp_path: Path, forked: Callable[[], None], caplog: pytest.LogCaptureFixture, mode: Any
) -> None:
    manager = CheckpointManager(tmp_path / "run", async_mode=mode)
    manager.save(1, {"a": torch.ones(3)})
    manager.wait()
    forked()
    closing = threading.Thread(target=manager.close, daemon=True)
    closing.start()
    closing.join(120)
    assert not closing.is_alive()
    CheckpointManager(tmp_path / "run").close()
    assert "Another process saves" not in caplog.text


EXIT = """
import sys, torch
from rescale_data.checkpoint import CheckpointManager
from rescale_data.cli import inspect
manager = CheckpointManager(f"{sys.argv[1]}/run")
manager.save(1, {"a": torch.ones(1 << 22), "b": list(range(5))})
"""


def test_an_exit_without_close_waits_for_the_save(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", EXIT, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Error" not in done.stderr
    target = {"a": torch.zeros(1 << 22), "b": []}
    checkpoint.load(tmp_path / "run" / "step-1", target)
    assert target["a"].all()
    assert target["b"] == list(range(5))


@pytest.mark.parametrize(
    ("rules", "kept"),
    [
        ({}, [7, 8, 9]),
        ({"keep_latest": None}, list(range(10))),
        ({"keep_latest": 1, "keep_every": 4}, [0, 4, 8, 9]),
        ({"keep_latest": 1, "keep_best": ("loss", "min", 2)}, [3, 6, 9]),
        ({"keep_latest": 1, "keep_best": ("loss", "max", 1)}, [1, 9]),
        ({"keep_latest": 2, "keep_best": ("other", "max", 1)}, [8, 9]),
    ],
)
def test_retention_is_a_pure_function(rules: dict[str, Any], kept: list[int]) -> None:
    loss = [5.0, 9.0, float("nan"), 1.0, 4.0, 4.0, 1.5, 8.0, 7.0, 6.0]
    metrics = {step: {"loss": loss[step]} for step in range(10)}
    deleted = Retention(**rules).select_steps_to_delete(metrics)
    assert sorted(set(metrics) - set(deleted)) == kept


@pytest.mark.parametrize(
    "rules",
    [
        {"keep_latest": 0},
        {"keep_every": 0},
        {"keep_best": ("loss", "least", 1)},
        {"keep_best": ("loss", "min", 0)},
        {"keep_best": ("loss", "min", "2")},
        {"keep_best": ("loss", "min", 1.5)},
        {"keep_best": (None, "min", 1)},
        {"keep_best": ("loss", "min")},
        {"keep_best": "loss"},
        {"keep_best": 3},
        {"async_mode": "fork"},
    ],
)
def test_rules_that_make_no_sense(tmp_path: Path, rules: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(rules))}="):
        CheckpointManager(tmp_path, **rules)


def test_a_metric_that_no_checkpoint_has_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rules: dict[str, Any] = {"keep_latest": 1, "keep_best": ("val_los", "min", 2), "async_mode": "disabled"}
    with CheckpointManager(tmp_path / "run", **rules) as manager:
        manager.save(0, {"a": 0})
        manager._wait_until_idle()
        assert "val_los" not in caplog.text, "nothing is deleted yet"
        for step in (1, 2, 3):
            manager.save(step, {"a": step}, metrics={"val_loss": step})
    assert caplog.text.count("no checkpoint has the metric 'val_los' of keep_best") == 1
    assert "they have ['val_loss']" in caplog.text


@pytest.mark.parametrize("mode", ["disabled", "thread"])
def test_retention_survives_a_restart(tmp_path: Path, mode: Any) -> None:
    rules = {"keep_latest": 2, "keep_every": 5, "keep_best": ("loss", "min", 1), "async_mode": mode}
    for start in (0, 4, 8):
        with CheckpointManager(tmp_path / "run", **rules) as manager:
            for step in range(start, start + 4):
                manager.save(step, {"a": step}, metrics={"loss": abs(step - 3)})
    with CheckpointManager(tmp_path / "run") as manager:
        assert manager.steps() == [0, 3, 5, 10, 11]


READS: dict[str, Callable[[Path, Path], Any]] = {
    "load": lambda path, _: checkpoint.load(path, {"a": torch.zeros(3)}),
    "read_data_state": lambda path, _: checkpoint.read_data_state(path),
    "verify": lambda path, _: checkpoint.verify(path),
    "to_torch_save": lambda path, target: checkpoint.to_torch_save(path, target / "f.pt"),
    "to_safetensors": lambda path, target: checkpoint.to_safetensors(path, target / "st"),
    "summarize": lambda path, _: inspect.summarize(path),
}


@pytest.mark.parametrize("how", READS)
def test_whatever_reads_a_checkpoint_keeps_it_from_retention(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Each file that is read is read while step 1 has a lease, and a manager that wants to delete it leaves it."""
    path, opened = tmp_path / "run" / "step-1", []
    with CheckpointManager(tmp_path / "run", keep_latest=1, async_mode="disabled") as manager:
        manager.save(1, {"a": torch.ones(3), "loader": StandInLoader()})
        manager._wait_until_idle()
        open_read = DiskStore.open_read

        def noted(store: DiskStore, name: str) -> BinaryIO:
            if "step-1/" in name and not opened:
                opened.append(name)
                manager.save(2, {"a": torch.ones(3)})
                manager._wait_until_idle()
            return open_read(store, name)

        monkeypatch.setattr(DiskStore, "open_read", noted)
        READS[how](path, tmp_path)
        assert opened
        assert manager.steps() == [1, 2]
        assert len(os.listdir(tmp_path / "run" / ".leases")) == 1, "the owner's own"
        manager.save(3, {"a": torch.ones(3)})
        manager._wait_until_idle()
        assert manager.steps() == [3]


def test_what_was_saved_last_stays_though_later_steps_are_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A run that went back to step 5."""
    with CheckpointManager(tmp_path / "run", keep_latest=2, async_mode="disabled") as manager:
        for step in (5, 8, 9):
            manager.save(step, {"a": step})
        manager._wait_until_idle()
        assert "later steps" not in caplog.text
        for step in (6, 7):
            manager.save(step, {"a": step})
        manager._wait_until_idle()
        assert manager.steps() == [7, 8, 9]
    assert "holds the later steps [8, 9]: load_latest loads the last of them" in caplog.text


def test_load_latest_falls_back_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with CheckpointManager(tmp_path / "run", async_mode="disabled") as manager:
        assert manager.load_latest({"a": 0}) is None
        for step in (1, 2, 3):
            manager.save(step, {"a": step})
        (data(tmp_path / "run" / "step-3") / "__0_0.distcp").write_bytes(b"x")
        (data(tmp_path / "run" / "step-2") / ".metadata").unlink()
        target = {"a": 0}
        with pytest.warns(RuntimeWarning, match="__0_0.distcp") as warned:
            assert manager.load_latest(target) == 1
        assert len(warned) == 1
        assert "step 3: " in caplog.text
        assert "/.metadata is missing" in caplog.text
        assert target["a"] == 1
        with pytest.raises(ValueError, match="damaged"):
            manager.load(3, target)
        manager.save(2, {"a": 22})
        assert manager.load_latest(target) == 2, "a damaged step is saved again"
        for step in manager.steps():
            (data(tmp_path / "run" / f"step-{step}") / "__0_0.distcp").unlink()
        with pytest.raises(ValueError, match="All checkpoints"):
            manager.load_latest(target)


def test_a_damaged_checkpoint_that_is_deleted_meanwhile_is_told(tmp_path: Path) -> None:
    """It was read in part: a load that finds no other one does not end as if nothing was there."""
    checkpoint.save(tmp_path / "step-1", {"a": 1})
    (data(tmp_path / "step-1") / "__0_0.distcp").write_bytes(b"x")
    reader = RunReader(tmp_path)
    named, looks = reader._folder.steps_with_folder, list[int]()

    def late() -> list[int]:
        if looks:
            shutil.rmtree(tmp_path / "step-1", ignore_errors=True)
        looks.append(1)
        return named()

    reader._folder.steps_with_folder = late  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=r"damaged: steps \[1\]"):
        reader.load_latest({"a": 0})


def test_another_state_is_no_damage(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "run", async_mode="disabled") as manager:
        manager.save(1, {"a": torch.zeros(2)})
        manager.save(2, {"a": torch.zeros(3)})
        with pytest.raises(ValueError, match="does not fit"):
            manager.load_latest({"a": torch.zeros(2)})


def test_what_load_latest_did_not_load_is_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with CheckpointManager(tmp_path / "run", async_mode="disabled") as manager:
        manager.save(1, {"a": torch.zeros(2), "head": {"old": 1, "same": torch.zeros(2)}})
        assert manager.load_latest({"a": torch.zeros(2)}, strict=False) == 1
        assert "in part" not in caplog.text, "what is not asked for by its top name is left out on purpose"
        state = {"a": torch.zeros(2), "head": {"new": 1, "same": torch.zeros(3)}}
        assert manager.load_latest(state, strict=False) == 1
    assert (
        "Missing in the checkpoint: ['head.new']. Not asked for: ['head.old']. Different: ['head.same']" in caplog.text
    )


@pytest.mark.parametrize("step", [-1, 1.0, "1", True])
def test_a_step_is_a_number(tmp_path: Path, step: Any) -> None:
    error, words = (ValueError, "integer of at least 0") if step == -1 else (TypeError, f"step={step!r} .* give an int")
    with CheckpointManager(tmp_path) as manager, pytest.raises(error, match=words):
        manager.save(step, {})


def test_a_metric_is_a_number(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, async_mode="disabled") as manager:
        with pytest.raises(TypeError, match=r"metrics\['loss'\]"):
            manager.save(1, {"a": 1}, metrics={"loss": "low"})  # type: ignore[dict-item]
        manager.save(1, {"a": 1}, metrics={"loss": torch.tensor(2.0)})  # type: ignore[dict-item]
