"""Small models in every wrapping, and what they have learnt as comparable numbers."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

FLAT: list[nn.Module] = []
"""Until the process ends: torch 2.9 frees flat parameters that Python still refers to ("Deallocating Tensor that still has live
PyObject references") when the garbage collector finds their model."""


class Net(nn.Module):
    """Uneven sizes, a buffer, a frozen, an unused and a tied parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.up = nn.Linear(6, 10)
        self.norm = nn.BatchNorm1d(10)
        self.down = nn.Linear(10, 6)
        self.frozen = nn.Linear(6, 6)
        self.unused = nn.Linear(5, 3)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.frozen.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.frozen(self.down(self.norm(torch.relu(self.up(self.embed(tokens)))))))


class Plain(nn.Module):
    """Two linear layers, for tensor parallelism."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 12)
        self.down = nn.Linear(12, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def mesh() -> DeviceMesh | None:
    return init_device_mesh("cpu", (dist.get_world_size(),)) if dist.is_initialized() else None


def wrap(model: nn.Module, how: str) -> nn.Module:
    if how == "ddp":
        return DistributedDataParallel(
            model, find_unused_parameters=any(name.startswith("unused") for name, _ in model.named_parameters())
        )
    if how == "fsdp1":
        return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    if how == "fsdp1-flat":
        policy = ModuleWrapPolicy({nn.Linear}) if isinstance(model, Plain) else None
        flat = FullyShardedDataParallel(
            model, auto_wrap_policy=policy, device_mesh=mesh(), device_id=torch.device("cpu")
        )
        FLAT.append(flat)
        return flat
    if how == "fsdp2":
        for child in (module for name, module in model.named_children() if name in ("up", "down")):
            fully_shard(child, mesh=mesh())
        return fully_shard(model, mesh=mesh())
    if how == "tp":
        return parallelize_module(model, mesh(), {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def whole(value: Any) -> Any:
    """The whole of a sharded tensor, on every rank."""
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
