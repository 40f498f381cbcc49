"""What `rescale_data.checkpoint` needs to know of XLA tensors, by torch_xla's own planners.

XLAShardedTensor  [ piece | piece | piece | pad ]      one process a host, a piece a device
                      SHARD items, without padding ──►  the same entries that FSDP2 writes

"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, cast

import torch
import torch_xla
import torch_xla.runtime as xr
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner
from torch_xla.core import xla_model
from torch_xla.distributed.spmd import ShardingType, XLAShardedTensor, wrap_if_sharded
from torch_xla.experimental.distributed_checkpoint import SPMDLoadPlanner, SPMDSavePlanner, prime_optimizer


class XlaAdapter:
    """`rescale_data.checkpoint.devices.Adapter` for torch_xla in SPMD mode."""

    def is_sharded(self, tensor: torch.Tensor) -> bool:
        wrapped = wrap_if_sharded(tensor)
        return isinstance(wrapped, XLAShardedTensor) and wrapped.sharding_type in _CUT

    def unwrap(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.global_tensor if isinstance(tensor, XLAShardedTensor) else tensor

    def settle(self) -> None:
        require_spmd()
        torch_xla.sync()
        xla_model.wait_device_ops()

    def save_planner(self) -> SavePlanner:
        return SPMDSavePlanner()

    def load_planner(self) -> LoadPlanner:
        return SPMDLoadPlanner()

    def first_state(self, optimizer: torch.optim.Optimizer) -> Mapping[torch.Tensor, dict[str, Any]]:
        """By torch_xla's ``prime_optimizer``: a step with zero gradients, here with a learning rate of zero too.

        Only the step itself tells how the state of an optimizer is sharded. Without the learning rate it could change the
        parameters (weight decay), and what it leaves behind would stay when the load fails.
        """
        before, gradients = optimizer.state, [(p, p.grad) for p in _parameters(optimizer)]
        rates = [group.get("lr") for group in optimizer.param_groups]
        optimizer.state = defaultdict(dict)
        try:
            for group in optimizer.param_groups:
                if "lr" in group:
                    group["lr"] = _zero(group["lr"])
            prime_optimizer(optimizer)
            return cast(Mapping[torch.Tensor, dict[str, Any]], optimizer.state)
        finally:
            optimizer.state = before
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                if rate is not None:
                    group["lr"] = rate
            for parameter, gradient in gradients:
                parameter.grad = gradient


def require_spmd() -> None:
    """``ValueError`` where tensors live on single devices."""
    if not xr.is_spmd():
        raise ValueError(
            "torch_xla is not in SPMD mode, in which one process drives all devices of its host. Call "
            "torch_xla.runtime.use_spmd() at the beginning of the program, before any tensor is on an XLA device."
        )


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _zero(rate: Any) -> Any:
    return torch.zeros_like(rate) if isinstance(rate, torch.Tensor) else 0.0


_CUT = (ShardingType.TILED, ShardingType.PARTIAL)  # all others are whole on each device
adapter = XlaAdapter()
