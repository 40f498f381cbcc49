"""What may be in a state beside sharded parameters, what an optimizer is left with, and what the errors say."""

import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from rescale_data import checkpoint
from tests.xla import training
from tests.xla.processes import on_devices


@on_devices(4)
def test_every_kind_of_value_comes_back_as_it_was_and_is_saved_alike_in_every_mode(tmp_path: Path) -> None:
    import torch_xla.distributed.spmd as xs

    def state(scale: float) -> dict[str, Any]:
        mesh = xs.Mesh(list(range(4)), (2, 2))
        values = (torch.arange(24.0).reshape(6, 4) * scale).to("xla")

        def sharded(more: float = 0) -> Any:
            return xs.mark_sharding(values + more, mesh, (0, 1))

        return {
            "sharded": sharded(),
            "wrapped": xs.wrap_if_sharded(xs.mark_sharding(values.clone(), mesh, (0, None)).global_tensor),
            "replicated": xs.mark_sharding(values.clone(), mesh, (None, None)),
            "unwrapped": values.clone(),
            "scalar": torch.tensor(scale).to("xla"),
            "half": xs.mark_sharding(values.bfloat16(), mesh, ((0, 1), None)).global_tensor,
            "empty": torch.zeros(0, 3).to("xla"),
            "empty and sharded": xs.mark_sharding(torch.zeros(0, 4).to("xla"), mesh, (0, None)),
            "cpu": torch.arange(3) * int(scale),
            "subclass": nn.Parameter(torch.ones(2) * scale),
            "number": scale,
            "nested": {"list": [int(scale), {"text": str(scale), "deep": [[scale], None]}], "tuple": (1, int(scale))},
            "bytes": io.BytesIO(str(scale).encode()).getvalue(),
            "none": None,
            "l": [sharded(1).global_tensor, sharded(2).global_tensor],
            "mix": [sharded(3).global_tensor, int(scale), "a"],
            "d": {"in": [{"t": sharded(4).global_tensor}, values[0] + 1]},
        }

    checkpoint.save(tmp_path / "sync" / "step-1", state(3.0))
    expected = dcp.FileSystemReader(tmp_path / "sync" / "step-1").read_metadata()
    for mode in ("sync", "thread", "disabled"):
        loaded = state(1.0)
        if mode == "sync":
            checkpoint.load(tmp_path / mode / "step-1", loaded)
        else:
            with checkpoint.CheckpointManager(tmp_path / mode, async_mode=mode) as manager:
                manager.save(1, state(3.0))
                manager.load(1, loaded)
        _same(loaded, state(3.0))
        metadata = dcp.FileSystemReader(tmp_path / mode / "step-1").read_metadata()
        assert metadata.state_dict_metadata.keys() == expected.state_dict_metadata.keys()
        assert metadata.planner_data == expected.planner_data
    stock = {"sharded": torch.zeros(6, 4), "half": torch.zeros(6, 4, dtype=torch.bfloat16)}
    dcp.load(stock, checkpoint_id=tmp_path / "sync" / "step-1", no_dist=True)
    _same(stock, {name: state(3.0)[name].cpu() for name in stock})


@on_devices(4)
def test_tensors_that_would_be_pickled_with_their_device_are_named(tmp_path: Path) -> None:
    tensor = torch.ones(2).to("xla")
    given = {"pair": (1, tensor), "d": {"l": [(0, {"t": tensor})]}, "c": Config(tensor)}
    names = {"pair": r"pair is a tuple", "d": r"d\.l\.0 is a tuple", "c": "c is a Config"}
    with checkpoint.CheckpointManager(tmp_path / "m") as manager:
        for key, name in names.items():
            with pytest.raises(TypeError, match=rf"{name} with a tensor on xla:0.*list or a dict"):
                checkpoint.save(tmp_path / key, {key: given[key]})
            with pytest.raises(TypeError, match=name):
                manager.save(1, {key: given[key]})
        manager.save(2, {"pair": (1, "a"), "list": [tensor]})
    assert manager.steps() == [2]


@dataclass
class Config:
    tensor: torch.Tensor


def _same(got: Any, expected: Any) -> None:
    if isinstance(expected, torch.Tensor):
        assert got.device == expected.device
        assert torch.equal(got.cpu(), expected.cpu())
    elif isinstance(expected, dict):
        assert got.keys() == expected.keys()
        for key, value in expected.items():
            _same(got[key], value)
    elif isinstance(expected, list | tuple):
        assert type(got) is type(expected)
        for one, other in zip(got, expected, strict=True):
            _same(one, other)
    else:
        assert got == expected


class Scaled(torch.optim.SGD):
    """An optimizer with an attribute of its own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9, weight_decay=0.1)
        self.scale = 2.0

    def step(self, closure: Any = None) -> None:
        assert self.scale == 2.0
        super().step(closure)


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "own": Scaled,  # first: where torch has patched SGD.step, too, hooks run twice
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "groups": lambda p: torch.optim.AdamW([{"params": p[:1], "lr": 0.1}, {"params": p[1:]}], lr=0.01),
    "zero eps": lambda p: torch.optim.AdamW(p, lr=0.1, eps=0.0),
}


@on_devices(4)
def test_optimizers_of_every_kind_are_given_what_they_lack_without_a_step(tmp_path: Path) -> None:
    """To make their state runs no hook and changes no parameter, also where the load then fails."""
    for name, make in OPTIMIZERS.items():
        source, target = training.xla_run("(2,2)"), training.xla_run("(4,)", seed=1)
        for segment in (source, target):
            next(iter(segment.model.parameters())).requires_grad_(False)  # frozen: it never has state
            segment.optimizer = make(list(segment.model.parameters()))
        source.train(2)
        checkpoint.save(tmp_path / name, source.state)
        before, called = training.tensors(target), list[str]()
        target.optimizer.register_step_pre_hook(lambda *_: called.append("before"))  # noqa: B023
        target.optimizer.register_step_post_hook(lambda *_: called.append("after"))  # noqa: B023
        torch.optim.lr_scheduler.LambdaLR(target.optimizer, lambda step: 1.0)
        with pytest.raises(ValueError, match=r"missing in the checkpoint: more"):
            checkpoint.load(tmp_path / name, {**target.state, "more": torch.ones(2).to("xla")})
        training.assert_equal(training.tensors(target), before)
        assert all(parameter.grad is None for parameter in target.model.parameters())
        checkpoint.load(tmp_path / name, target.state)
        training.assert_equal(training.tensors(target), training.tensors(source))
        assert len(target.optimizer.param_groups) == len(source.optimizer.param_groups)
        assert not called
        if name != "zero eps":
            torch.testing.assert_close(target.train(2), source.train(2), rtol=1e-5, atol=0.0)
            assert called == ["before", "after"] * 2


@on_devices(4)
def test_an_optimizer_that_cannot_step_by_itself_is_named_with_the_cure(tmp_path: Path) -> None:
    class NeedsLoss(torch.optim.SGD):
        def step(self, closure: Any) -> Any:
            return super().step(closure)

    source, target = training.xla_run("(2,2)"), training.xla_run("(2,2)", seed=1)
    source.optimizer = torch.optim.SGD(source.model.parameters(), lr=0.1, momentum=0.9)
    target.optimizer = NeedsLoss(target.model.parameters(), lr=0.1, momentum=0.9)
    source.train(1)
    checkpoint.save(tmp_path / "c", source.state)
    with pytest.raises(TypeError, match=r"NeedsLoss\.step\(\) cannot be called by itself.*Run one step of your own"):
        checkpoint.load(tmp_path / "c", target.state)
    for parameter in target.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    target.optimizer.step(lambda: torch.zeros(()))
    checkpoint.load(tmp_path / "c", target.state)
    training.assert_equal(training.tensors(target), training.tensors(source))


@on_devices(4)
def test_the_fsdp_of_torch_xla_loads_by_plain_names_from_its_module(tmp_path: Path) -> None:
    import torch_xla.distributed.spmd as xs
    from torch_xla.experimental.spmd_fully_sharded_data_parallel import SpmdFullyShardedDataParallel

    xs.set_global_mesh(xs.Mesh(list(range(4)), (4, 1), ("fsdp", "model")))
    wrapped = SpmdFullyShardedDataParallel(training.model(seed=0).to("xla"))
    optimizer = training.adamw(wrapped)
    wrapped(torch.ones(4, training.WIDTH).to("xla")).sum().backward()
    optimizer.step()
    plain = training.model(seed=1)
    checkpoint.save(tmp_path / "wrapped", {"model": wrapped, "optimizer": optimizer})
    with pytest.raises(ValueError, match=r"model\._orig_module\.0\.weight"):
        checkpoint.load(tmp_path / "wrapped", {"model": plain})
    checkpoint.save(tmp_path / "c", {"model": wrapped.module, "optimizer": optimizer})
    checkpoint.load(tmp_path / "c", {"model": plain, "optimizer": training.adamw(plain)})
    for one, other in zip(plain.parameters(), wrapped.parameters(), strict=True):
        assert torch.equal(one, other.cpu())
    with pytest.raises(ValueError, match=r"model\._orig_module\.0\.weight"):
        checkpoint.load(tmp_path / "c", {"model": wrapped})


@on_devices(1, spmd=False)
def test_without_spmd_the_cure_is_named(tmp_path: Path) -> None:
    from rescale_data.xla import host_mesh

    with pytest.raises(ValueError, match=r"torch_xla\.runtime\.use_spmd\(\) at the beginning"):
        checkpoint.save(tmp_path / "c", {"model": nn.Linear(2, 2).to("xla")})
    assert not (tmp_path / "c").exists()
    checkpoint.save(tmp_path / "c", {"model": nn.Linear(2, 2)})
    with pytest.raises(ValueError, match=r"use_spmd"):
        checkpoint.load(tmp_path / "c", {"model": nn.Linear(2, 2).to("xla")})
    with pytest.raises(ValueError, match=r"use_spmd"):
        host_mesh()


@on_devices(4)
def test_async_saves_hold_the_step_that_was_saved(tmp_path: Path) -> None:
    for mode in ("thread", "disabled"):
        source = training.xla_run("(2,2)")
        expected = {}
        with checkpoint.CheckpointManager(tmp_path / mode, async_mode=mode, keep_latest=None) as manager:
            for step in range(6):
                source.train(1)
                if step in (1, 2, 4):
                    expected[step] = training.tensors(source)
                    manager.save(step, source.state)
        losses = source.train(2)
        target = training.xla_run("(2,2)", seed=1)
        with checkpoint.CheckpointManager(tmp_path / mode, keep_latest=None) as manager:
            for step, values in expected.items():
                manager.load(step, target.state)
                training.assert_equal(training.tensors(target), values)
                assert target.loader.step == step + 1
        target.batches = None
        assert target.train(3)[1:] == losses
