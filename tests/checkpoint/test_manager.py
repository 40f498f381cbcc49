"""The manager: what is kept, what waits for what, and what a failure leaves."""

import gc
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
import weakref
from collections import Counter, OrderedDict
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager
from torch.optim.optimizer import register_optimizer_step_pre_hook

from rescale_data import checkpoint
from rescale_data.checkpoint import CheckpointManager, RunReader
from rescale_data.checkpoint.storage.store import DiskStore
from rescale_data.cli import inspect
from rescale_data.errors import DamagedCheckpointError
from tests.checkpoint.models import Training
from tests.checkpoint.steps import data, flip, loader_at
from tests.distributed.ranks import run_ranks

MODES = ["disabled", "thread"]
KINDS = (OrderedDict(a=1), [Counter("aab")], {1: 2.5})


def copy_once(monkeypatch):
    """Let DCP's stagers be as those of torch 2.10 and 2.11, which forget with their first copy how to make one."""
    stage, used = DefaultStager.stage, []

    def once(self, state):
        if self in used:
            raise KeyError(type)
        used.append(self)
        return stage(self, state)

    monkeypatch.setattr(DefaultStager, "stage", once)


@pytest.mark.parametrize("how", [*MODES, "stagers that copy once"])
def test_a_checkpoint_holds_the_step_that_was_saved(tmp_path, how, monkeypatch):
    if how not in MODES:
        copy_once(monkeypatch)
    mode = how if how in MODES else "thread"
    training, expected = Training(), {}
    with CheckpointManager(tmp_path / "run", keep_latest=None, async_mode=mode) as manager:
        manager.warm_up(training.state)
        assert manager.steps() == []
        for step in range(1, 6):
            training.step()
            expected[step] = training.numbers()
            saving = manager.save(step, training.state | {"kinds": KINDS})
            training.step()
            assert mode == "thread" or saving.committed.done()
        state = Training().state | {"kinds": None}
        assert manager.load_latest(state) == 5, "a load waits for the save that runs"
        assert repr(state["kinds"]) == repr(KINDS)
        saving = manager.save(6, training.state)
        saving.staged.result(60)
        saving.committed.result(60)
        assert manager.latest_step() == 6
    reader = RunReader(tmp_path / "run")
    for step, numbers in expected.items():
        reader.load(step, (other := Training(seed=1)).state)
        assert other.numbers() == numbers


def train_with_collectives(folder, how):
    training, seen = Training(how), []
    with CheckpointManager(f"{folder}/run", keep_latest=2) as manager:
        for step in range(1, 6):
            training.step()
            seen.append(training.numbers())
            manager.save(step, training.state)
            for _ in range(20):
                dist.all_reduce(torch.ones(64))
            checkpoint.save(f"{folder}/whole-{step}", training.state)
        assert manager.load_latest(Training(how).state) == 5
    return seen


@pytest.mark.parametrize("how", ["fsdp2", "fsdp1", "fsdp1-flat"])
def test_saves_while_training_runs_collectives_and_saves_by_itself(tmp_path, how):
    """On the default group they would hang; the manager has a gloo group of its own, and one save at a time on it."""
    seen = run_ranks(2, train_with_collectives, str(tmp_path), how)
    assert seen[0] == seen[1]
    saved = {f"run/step-{step}": step for step in (4, 5)} | {f"whole-{step}": step for step in range(1, 6)}
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.glob("run/step-*")} == {"run/step-4", "run/step-5"}
    for path, step in saved.items():
        checkpoint.load(tmp_path / path, (other := Training(seed=1)).state)
        assert other.numbers() == seen[0][step - 1]


class GatedStore(DiskStore):
    gate, waiting = threading.Event(), threading.Event()

    def open_write(self, path):
        if path.endswith(".distcp"):
            self.waiting.set()
            assert self.gate.wait(60)
        return super().open_write(path)


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_a_save_waits_for_the_copy_that_is_written(tmp_path, monkeypatch, is_interrupted):
    """Also after Ctrl-C in a wait for it. Else the first checkpoint would hold values of the second."""
    GatedStore.gate.clear()
    GatedStore.waiting.clear()
    monkeypatch.setattr("rescale_data.checkpoint.storage.open.DiskStore", GatedStore)
    weights = nn.Linear(4, 4, bias=False)
    with CheckpointManager(tmp_path / "run") as manager:
        nn.init.constant_(weights.weight, 1.0)
        committed = manager.save(1, {"model": weights}).committed
        manager.wait_for_staging()
        nn.init.constant_(weights.weight, 2.0)
        assert GatedStore.waiting.wait(60)
        assert manager.steps() == []
        if is_interrupted:
            with monkeypatch.context() as patch:
                patch.setattr(committed, "exception", Mock(side_effect=KeyboardInterrupt))
                with pytest.raises(KeyboardInterrupt):
                    manager.wait()
        exception = committed.exception
        monkeypatch.setattr(committed, "exception", lambda: (GatedStore.gate.set(), exception())[1])
        manager.save(2, {"model": weights})
        assert manager.num_waits == 1 + is_interrupted
        assert manager.wait_seconds > 0
        manager.wait_for_staging()
        GatedStore.gate.set()
    for step in (1, 2):
        loaded = nn.Linear(4, 4, bias=False)
        checkpoint.load(tmp_path / "run" / f"step-{step}", {"model": loaded})
        assert loaded.weight.unique().tolist() == [float(step)]


def test_the_next_optimizer_step_waits_for_the_copy(tmp_path, monkeypatch):
    order, in_background = [], set()
    copying, go_on = threading.Event(), threading.Event()

    def slow(_, state):
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
    checkpoint.load(tmp_path / "run" / "step-1", (other := Training(seed=1)).state)
    assert other.numbers() == expected


def test_optimizers_step_whatever_hooks_there_are(tmp_path):
    training, steps = Training(), []
    hooks = [register_optimizer_step_pre_hook(lambda *_: steps.append("before"))]
    with CheckpointManager(tmp_path / "a") as first, CheckpointManager(tmp_path / "b") as second:
        for step in (1, 2):
            training.step()
            first.save(step, training.state)
            second.save(step, training.state)
            hooks.append(register_optimizer_step_pre_hook(lambda *_: steps.append("later")))
    training.step()
    for hook in hooks:
        hook.remove()
    assert steps == ["before", "before", "later", "before", "later", "later"]


def test_a_manager_that_is_dropped_frees_its_copies_and_the_folder(tmp_path):
    training = Training()
    manager = CheckpointManager(tmp_path / "run")
    manager.save(1, training.state)
    manager.wait()
    manager._wait_until_idle()  # the thread that deletes old ones holds the manager until it has done so
    stager = weakref.ref(manager._stager)
    vars(manager)["itself"] = manager
    del manager
    with CheckpointManager(tmp_path / "run") as manager:
        assert manager.steps() == [1]
    gc.collect()
    assert stager() is None
    training.step()


@pytest.mark.parametrize("mode", MODES)
def test_close_ends_though_a_forked_child_lives(tmp_path, caplog, mode):
    """The child has a copy of all that is open here."""
    manager = CheckpointManager(tmp_path / "run", async_mode=mode)
    manager.save(1, {"a": torch.ones(3)})
    manager.wait()
    child = multiprocessing.get_context("fork").Process(target=signal.pause)
    child.start()
    closing = threading.Thread(target=manager.close, daemon=True)
    closing.start()
    closing.join(120)
    assert not closing.is_alive()
    CheckpointManager(tmp_path / "run").close()
    assert "Another process saves" not in caplog.text
    child.kill()
    child.join()


EXIT = """
import sys, torch
from rescale_data.checkpoint import CheckpointManager
manager = CheckpointManager(f"{sys.argv[1]}/run")
manager.save(1, {"a": torch.ones(1 << 22), "b": list(range(5))})
"""


def test_an_exit_without_close_waits_for_the_save(tmp_path):
    done = subprocess.run([sys.executable, "-c", EXIT, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Error" not in done.stderr
    target = {"a": torch.zeros(1 << 22), "b": []}
    checkpoint.load(tmp_path / "run" / "step-1", target)
    assert target["a"].all()
    assert target["b"] == list(range(5))


LOSSES = [5.0, 9.0, float("nan"), 1.0, 4.0, 4.0, 1.5, 8.0, 7.0, 6.0]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("rules", "kept"),
    [
        ({}, [7, 8, 9]),
        ({"keep_latest": None}, list(range(10))),
        ({"keep_latest": 1, "keep_every": 4}, [0, 4, 8, 9]),
        ({"keep_latest": 1, "keep_best": ("loss", "min", 2)}, [3, 6, 9]),
        ({"keep_latest": 1, "keep_best": ("loss", "max", 1)}, [1, 9]),
        ({"keep_latest": 2, "keep_best": ("other", "max", 1)}, [8, 9]),
        ({"keep_latest": 2, "keep_every": 5, "keep_best": ("loss", "min", 1)}, [0, 3, 5, 8, 9]),
    ],
)
def test_what_no_rule_keeps_is_deleted_over_restarts(tmp_path, mode, rules, kept):
    for steps in (range(4), range(4, 10)):
        with CheckpointManager(tmp_path / "run", **rules, async_mode=mode) as manager:
            for step in steps:
                manager.save(step, {"a": step}, metrics={"loss": LOSSES[step]})
    assert RunReader(tmp_path / "run").steps() == kept


def test_what_was_saved_last_stays_though_later_steps_are_there(tmp_path, caplog):
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


def test_a_metric_that_no_checkpoint_has_is_said_once(tmp_path, caplog):
    rules = {"keep_latest": 1, "keep_best": ("val_los", "min", 2), "async_mode": "disabled"}
    with CheckpointManager(tmp_path / "run", **rules) as manager:
        manager.save(0, {"a": 0})
        manager._wait_until_idle()
        assert "val_los" not in caplog.text, "nothing is deleted yet"
        for step in (1, 2, 3):
            manager.save(step, {"a": step}, metrics={"val_loss": step})
    assert caplog.text.count("no checkpoint has the metric 'val_los' of keep_best") == 1
    assert "they have ['val_loss']" in caplog.text


READS = {
    "load": lambda path, _: checkpoint.load(path, {"a": torch.zeros(3)}),
    "read_data_state": lambda path, _: checkpoint.read_data_state(path),
    "verify": lambda path, _: checkpoint.verify(path),
    "to_torch_save": lambda path, target: checkpoint.to_torch_save(path, target / "f.pt"),
    "to_safetensors": lambda path, target: checkpoint.to_safetensors(path, target / "st"),
    "summarize": lambda path, _: inspect.summarize(path),
}


@pytest.mark.parametrize("how", READS)
def test_whatever_reads_a_checkpoint_keeps_it_from_retention(tmp_path, monkeypatch, how):
    """Each file is read while step 1 has a lease, and a manager that wants to delete it leaves it."""
    path, opened, leases = tmp_path / "run" / "step-1", [], tmp_path / "run" / ".leases"
    with CheckpointManager(tmp_path / "run", keep_latest=1, async_mode="disabled") as manager:
        manager.save(1, {"a": torch.ones(3), "loader": loader_at()})
        manager._wait_until_idle()
        open_read = DiskStore.open_read

        def noted(store, name):
            if "step-1/" in name:
                assert len(os.listdir(leases)) > 1, "the owner's and the reader's"
                opened.append(name)
                if len(opened) == 1:
                    manager.save(2, {"a": torch.ones(3)})
                    manager._wait_until_idle()
            return open_read(store, name)

        monkeypatch.setattr(DiskStore, "open_read", noted)
        READS[how](path, tmp_path)
        assert opened
        assert manager.steps() == [1, 2]
        assert len(os.listdir(leases)) == 1, "the owner's own"
        manager.save(3, {"a": torch.ones(3)})
        manager._wait_until_idle()
        assert manager.steps() == [3]


def state(step, size=300):
    return {"a": torch.full((size,), step), "z": torch.full((size,), step), "n": step}


def loaded(target):
    return [int(target["a"].sum()), int(target["z"].sum()), target["n"]]


def test_load_latest_passes_over_damaged_steps(tmp_path, caplog):
    """And loads the one before over all that they have left in the state."""
    with CheckpointManager(tmp_path, keep_latest=None, async_mode="disabled") as manager:
        target = state(0)
        assert manager.load_latest(target) is None
        for step in (1, 2, 3, 4):
            manager.save(step, state(step))
        flip(data(tmp_path / "step-2") / "__0_0.distcp", 7000)
        (data(tmp_path / "step-3") / ".metadata").unlink()
        (data(tmp_path / "step-4") / "__0_0.distcp").write_bytes(b"x")
        with pytest.raises(DamagedCheckpointError, match="half loaded"):
            manager.load(2, target)
        assert sum(loaded(target)) == 600, "one of two"
        with pytest.warns(RuntimeWarning, match=r"passed over: step 4: .*__0_0.distcp") as warned:
            assert manager.load_latest(target) == 1
        assert len(warned) == 1
        assert "/.metadata is missing" in caplog.text
        assert loaded(target) == [300, 300, 1]
        manager.save(3, state(33))
        with pytest.warns(RuntimeWarning, match="passed over"):
            assert manager.load_latest(target) == 3, "a damaged step is saved again"
        for step in (1, 3):
            (data(tmp_path / f"step-{step}") / "__0_0.distcp").unlink()
        words = r"All checkpoints .* damaged: steps \[1, 2, 3, 4\].*\n(.*\n)*The state is half loaded"
        with pytest.raises(DamagedCheckpointError, match=words):
            manager.load_latest(target)


def test_the_newest_whole_step_that_does_not_fit_is_an_error(tmp_path):
    """Which tells that the state is half loaded, where a damaged step was tried before."""
    for step, size in ((1, 300), (2, 3), (3, 300)):
        checkpoint.save(tmp_path / f"step-{step}", state(step, size))
    flip(data(tmp_path / "step-3") / "__0_0.distcp", 7000)
    with pytest.raises(ValueError, match="does not fit the state") as found:
        RunReader(tmp_path).load_latest(state(0))
    (note,) = found.value.__notes__
    assert "step 3 was passed over" in note
    assert "The state is half loaded" in note


def test_a_damaged_checkpoint_that_is_deleted_meanwhile_is_told(tmp_path):
    """It was read in part: a load that finds no other one does not end as if nothing was there."""
    checkpoint.save(tmp_path / "step-1", {"a": 1})
    (data(tmp_path / "step-1") / "__0_0.distcp").write_bytes(b"x")
    reader = RunReader(tmp_path)
    named, looks = reader._folder.steps_with_folder, []

    def late():
        if looks:
            shutil.rmtree(tmp_path / "step-1", ignore_errors=True)
        looks.append(1)
        return named()

    reader._folder.steps_with_folder = late
    with pytest.raises(ValueError, match=r"damaged: steps \[1\]"):
        reader.load_latest({"a": 0})


def test_what_load_latest_did_not_load_is_in_the_log(tmp_path, caplog):
    with CheckpointManager(tmp_path / "run", async_mode="disabled") as manager:
        manager.save(1, {"a": torch.zeros(2), "head": {"old": 1, "same": torch.zeros(2)}})
        assert manager.load_latest({"a": torch.zeros(2)}, strict=False) == 1
        assert "in part" not in caplog.text, "what is not asked for by its top name is left out on purpose"
        state = {"a": torch.zeros(2), "head": {"new": 1, "same": torch.zeros(3)}}
        assert manager.load_latest(state, strict=False) == 1
    words = "Missing in the checkpoint: ['head.new']. Not asked for: ['head.old']. Different: ['head.same']"
    assert words in caplog.text


WRONG = [
    *[{"keep_latest": 0}, {"keep_every": 0}, {"async_mode": "fork"}],
    *[{"keep_best": ("loss", "least", 1)}, {"keep_best": ("loss", "min", 0)}, {"keep_best": ("loss", "min", "2")}],
    *[{"keep_best": ("loss", "min", 1.5)}, {"keep_best": (None, "min", 1)}, {"keep_best": ("loss", "min")}],
    *[{"keep_best": "loss"}, {"keep_best": 3}],
]


@pytest.mark.parametrize("rules", WRONG)
def test_rules_that_make_no_sense(tmp_path, rules):
    with pytest.raises(ValueError, match=f"{next(iter(rules))}="):
        CheckpointManager(tmp_path, **rules)


def test_steps_and_metrics_are_numbers(tmp_path):
    with CheckpointManager(tmp_path, async_mode="disabled") as manager:
        for step in (1.0, "1", True):
            with pytest.raises(TypeError, match=f"step={step!r} .* give an int"):
                manager.save(step, {})
        with pytest.raises(ValueError, match="integer of at least 0"):
            manager.save(-1, {})
        with pytest.raises(TypeError, match=r"metrics\['loss'\]"):
            manager.save(1, {"a": 1}, metrics={"loss": "low"})
        manager.save(1, {"a": 1}, metrics={"loss": torch.tensor(2.0)})
