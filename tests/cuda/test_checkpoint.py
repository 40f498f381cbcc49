"""Checkpoints of what lies on a GPU, where a value is ready only when the device has come to it."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from rescale_data import checkpoint
from rescale_data.checkpoint import CheckpointManager
from tests.checkpoint.steps import loader_at

WIDTH = 1024
BUSY = 200_000_000  # cycles that the device is behind: 0.1 s


class Training:
    """Parameters, moments and a buffer whose every value says which step it is of."""

    def __init__(self, device: str = "cuda", how: str = "none") -> None:
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 3))
        self.model: nn.Module = layers.to(device)
        if how == "fsdp2":
            fully_shard(self.model, mesh=init_device_mesh(device, (dist.get_world_size(),)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.loader = loader_at()
        self.extra = {"tensor": torch.zeros(3, device=device)}
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "loader": self.loader, "extra": self.extra}

    def values(self) -> dict[str, torch.Tensor]:
        moments = get_optimizer_state_dict(self.model, self.optimizer)["state"]
        found = get_model_state_dict(self.model) | {
            f"{name}.{key}": value for name, state in moments.items() for key, value in state.items()
        }
        found["extra"] = self.extra["tensor"]
        whole = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in found.items()}
        return {key: value for key, value in whole.items() if not key.endswith(("step", "num_batches_tracked"))}

    def fill(self, value: float) -> None:
        """Everything has this value, when the device has come to it."""
        torch.cuda._sleep(BUSY)
        moments = (tensor for state in self.optimizer.state.values() for tensor in state.values())
        with torch.no_grad():
            for tensor in (*self.model.parameters(), *self.model.buffers(), self.extra["tensor"], *moments):
                (tensor.to_local() if isinstance(tensor, DTensor) else tensor).fill_(value)

    def step(self) -> None:
        self.loader.skip(4)
        self.model(torch.randn(8, WIDTH, device="cuda")).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.extra["tensor"] += 1


@pytest.fixture(scope="module", params=["none", "fsdp2"])
def how(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if request.param == "none":
        yield "none"
        return
    store = tmp_path_factory.mktemp("store") / "file"
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{store}", rank=0, world_size=1)
    yield request.param
    dist.destroy_process_group()


@pytest.mark.parametrize("stream", ["the default stream", "a stream of the trainer's"])
@pytest.mark.parametrize("mode", ["thread", "disabled"])
def test_a_save_waits_for_what_the_device_has_still_to_do(tmp_path: Path, how: str, mode: Any, stream: str) -> None:
    """And not for what it is given afterwards."""
    training = Training(how=how)
    where = contextlib.nullcontext() if stream == "the default stream" else torch.cuda.stream(torch.cuda.Stream())
    with where, CheckpointManager(tmp_path / "run", keep_latest=None, async_mode=mode) as manager:
        manager.warm_up(training.state)
        for step in range(1, 5):
            training.fill(step)
            manager.save(step, training.state)
            manager.wait_for_staging()
            training.fill(-1)
        other = Training(how=how)
        for step in range(1, 5):
            manager.load(step, other.state)
            for name, value in other.values().items():
                assert (value == step).all(), (name, step, value.unique()[:5])


@pytest.mark.parametrize("mode", ["thread", "disabled"])
def test_the_optimizers_step_waits_for_the_copy(tmp_path: Path, how: str, mode: Any) -> None:
    training, expected = Training(how=how), {}
    with CheckpointManager(tmp_path / "run", keep_latest=None, async_mode=mode) as manager:
        for step in range(1, 9):
            training.step()
            expected[step] = {name: value.clone() for name, value in training.values().items()}
            manager.save(step, training.state)
        training.step()
        for step, values in expected.items():
            other = Training(how=how)
            manager.load(step, other.state)
            for name, value in other.values().items():
                assert torch.equal(value, values[name]), (name, step)
            assert other.loader.step == step


def test_what_was_saved_on_a_gpu_is_loaded_on_the_cpu_and_back(tmp_path: Path) -> None:
    training = Training()
    training.step()
    checkpoint.save(tmp_path / "gpu", training.state)
    host = Training("cpu")
    checkpoint.load(tmp_path / "gpu", host.state)
    for name, value in host.values().items():
        assert value.device.type == "cpu"
        assert torch.equal(value, training.values()[name].cpu()), name
    checkpoint.save(tmp_path / "cpu", host.state)
    back = Training()
    checkpoint.load(tmp_path / "cpu", back.state)
    for name, value in back.values().items():
        assert value.device.type == "cuda"
        assert torch.equal(value, training.values()[name]), name


def test_an_optimizers_full_state_goes_over_the_host(tmp_path: Path, how: str) -> None:
    training = Training(how=how)
    training.step()
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    gathered = {
        "model": get_model_state_dict(training.model, options=whole),
        "optimizer": get_optimizer_state_dict(training.model, training.optimizer, options=whole),
    }
    torch.save(gathered, tmp_path / "whole.pt")
    other = Training(how=how)
    checkpoint.load(tmp_path / "whole.pt", {"model": other.model, "optimizer": other.optimizer})
    for name, value in get_optimizer_state_dict(other.model, other.optimizer)["state"].items():
        for key, tensor in value.items():
            want = get_optimizer_state_dict(training.model, training.optimizer)["state"][name][key]
            assert torch.equal(*(t.full_tensor() if isinstance(t, DTensor) else t for t in (tensor, want))), (name, key)
