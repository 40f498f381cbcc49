"""Adapter with which `rescale_data.checkpoint` saves and loads XLA tensors, through torch_xla's own planners.

XLAShardedTensor  [ piece | piece | piece | pad ]      one process a host, a piece a device
                      SHARD items, without padding ──►  the same entries that FSDP2 writes

"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
import torch_xla
import torch_xla.runtime as xr
from torch_xla.core import xla_model
from torch_xla.distributed.spmd import ShardingType, XLAShardedTensor, wrap_if_sharded
from torch_xla.experimental.distributed_checkpoint import SPMDLoadPlanner, SPMDSavePlanner, prime_optimizer

from rescale_data.checkpoint.optimizer.named import parameters_of
from rescale_data.checkpoint.storage.dcp import Metadata, TensorPieces


class XlaAdapter:
    """The adapter of `rescale_data.checkpoint.devices` for torch_xla in SPMD mode."""

    def synchronize(self) -> None:
        require_spmd()
        torch_xla.sync()
        xla_model.wait_device_ops()

    def to_save(self, tensor: torch.Tensor) -> torch.Tensor:
        if not _is_sharded(tensor):
            return _xla_tensor(tensor)
        planner: Any = SPMDSavePlanner()
        planner.set_up_planner({"": tensor}, is_coordinator=False)
        tensor_pieces = TensorPieces.from_items(tensor, planner.create_local_plan().items)
        items_by_offset = tensor_pieces.unique_write_items
        tensor_pieces.find_piece = lambda index: planner.resolve_data(items_by_offset[index.offset])
        return tensor_pieces

    def to_load(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor_pieces = self.to_save(tensor)
        if isinstance(tensor_pieces, TensorPieces):
            planner: Any = SPMDLoadPlanner()
            planner.set_up_planner({"": tensor}, Metadata({}), is_coordinator=False)
            remove_name = functools.partial(dataclasses.replace, fqn="")
            tensor_pieces.find_piece = lambda index: planner.lookup_tensor(remove_name(index))
            tensor_pieces.commit_piece = lambda item, read: planner.commit_tensor(
                dataclasses.replace(item, dest_index=remove_name(item.dest_index)), read
            )
        return tensor_pieces

    def first_state(self, optimizer: torch.optim.Optimizer) -> Mapping[torch.Tensor, dict[str, Any]]:
        """Make an optimizer's first state by a step with zero gradients: only a step shards the state.

        A copy of the optimizer without its hooks takes the step, on copies of the parameters: it may change them, by its weight
        decay or 0 / 0.
        """
        parameter_copies = {parameter: _copy_parameter(parameter) for parameter in parameters_of(optimizer)}
        optimizer_copy = _without_hooks(optimizer)
        optimizer_copy.state = defaultdict(dict)
        optimizer_copy.param_groups = [
            {**group, "params": [parameter_copies[parameter] for parameter in group["params"]]}
            for group in optimizer.param_groups
        ]
        try:
            prime_optimizer(optimizer_copy)
        except TypeError as error:
            class_name = type(optimizer).__name__
            raise TypeError(
                f"{class_name}.step() cannot be called by itself to make the state that a checkpoint is loaded into: {error}. "
                f"Run one step of your own before the load, and load the model together with it."
            ) from error
        return {parameter: optimizer_copy.state[copied] for parameter, copied in parameter_copies.items()}


def _is_sharded(tensor: torch.Tensor) -> bool:
    wrapped = wrap_if_sharded(tensor)  # torch_xla's planners leave out what has no elements
    return tensor.numel() > 0 and isinstance(wrapped, XLAShardedTensor) and wrapped.sharding_type in _SHARDED_TYPES


def _xla_tensor(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.global_tensor if isinstance(tensor, XLAShardedTensor) else tensor


def _copy_parameter(parameter: torch.Tensor) -> torch.Tensor:
    """Return a copy of a parameter; XLA shards the copy as it has sharded the parameter."""
    return _xla_tensor(parameter).detach().clone().requires_grad_(parameter.requires_grad)


def _without_hooks(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return a shallow copy of an optimizer without hooks, with the attributes that torch's own copy leaves out."""
    copied = copy.copy(optimizer)
    for name, value in vars(optimizer).items():
        if name != "step":  # a scheduler's, that steps the optimizer itself
            vars(copied).setdefault(name, value)
    return copied


def require_spmd() -> None:
    """Raise ``ValueError`` if torch_xla is not in SPMD mode."""
    if not xr.is_spmd():
        raise ValueError(
            "torch_xla is not in SPMD mode, in which one process drives all devices of its host. Call "
            "torch_xla.runtime.use_spmd() at the beginning of the program, before any tensor is on an XLA device."
        )


_SHARDED_TYPES = (ShardingType.TILED, ShardingType.PARTIAL)  # all others are whole on each device
adapter = XlaAdapter()
