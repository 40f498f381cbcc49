"""A small training in every wrapping, and what it has learnt as comparable numbers."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests.checkpoint.steps import loader_at

CPU = torch.device("cpu")
FLAT: list[nn.Module] = []
"""Until the process ends: torch 2.9 frees flat parameters that Python still refers to ("Deallocating Tensor that still has live
PyObject references") when the garbage collector finds their model."""


class Plain(nn.Module):
    """Two linear layers, for tensor parallelism, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 12)
        self.down = nn.Linear(12, 6)
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.down(torch.relu(self.up(x))))


def mesh() -> DeviceMesh | None:
    return init_device_mesh("cpu", (dist.get_world_size(),)) if dist.is_initialized() else None


def wrap(model: nn.Module, how: str) -> nn.Module:
    if how == "ddp":
        return DistributedDataParallel(model)
    if how == "fsdp1":
        return FullyShardedDataParallel(model, use_orig_params=True, device_id=CPU)
    if how == "fsdp1-flat":
        policy = ModuleWrapPolicy({nn.Linear})
        FLAT.append(FullyShardedDataParallel(model, auto_wrap_policy=policy, device_mesh=mesh(), device_id=CPU))
        return FLAT[-1]
    if how == "fsdp2":
        for child in (module for name, module in model.named_children() if name in ("up", "down")):
            fully_shard(child, mesh=mesh())
        return fully_shard(model, mesh=mesh())
    if how == "tp":
        return parallelize_module(model, mesh(), {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def whole(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value.full_tensor()
    if not hasattr(value, "local_shards"):
        return value
    shards: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(shards, [(shard.metadata.shard_offsets, shard.tensor) for shard in value.local_shards()])
    full = torch.empty(value.size(), dtype=value.dtype)
    for offsets, shard in (pair for of_rank in shards for pair in of_rank):
        full[tuple(slice(start, start + size) for start, size in zip(offsets, shard.shape, strict=True))] = shard
    return full


class Training:
    """A state in which every value says which step it is of; with another seed all values are others."""

    def __init__(self, how: str = "none", seed: int = 0, loader: Any = None) -> None:
        torch.manual_seed(seed)
        self.model = wrap(Plain(), how)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2 * (seed + 1))
        self.loader = loader or loader_at()
        self.extra = {"tensor": torch.zeros(3), "list": [0], "note": f"seed {seed}"}

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "loader": self.loader, "extra": self.extra}

    @property
    def stock_state(self) -> dict[str, Any]:
        optimizer = get_optimizer_state_dict(self.model, self.optimizer)
        return {**self.state, "model": get_model_state_dict(self.model), "optimizer": optimizer}

    def step(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.loader.skip(4)
            self.learn()

    def learn(self) -> None:
        self.extra["tensor"] += 1
        self.extra["list"][0] += 1
        torch.manual_seed(self.extra["list"][0])
        self.model(torch.randn(8, 6)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def numbers(self) -> dict[str, Any]:
        optimizer = get_optimizer_state_dict(self.model, self.optimizer)
        moments = {f"{name}.{key}": v for name, s in optimizer["state"].items() for key, v in s.items()}
        values = {
            name: whole(value).tolist() for name, value in {**get_model_state_dict(self.model), **moments}.items()
        }
        group = {key: optimizer["param_groups"][0][key] for key in ("lr", "weight_decay")}
        extra = {"tensor": self.extra["tensor"].tolist(), "list": [*self.extra["list"]], "note": self.extra["note"]}
        return values | group | extra | {"loader": self.loader.step}
