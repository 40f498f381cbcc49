"""Adapters for devices whose tensors DCP's own planners cannot split, imported when a state holds such a tensor.

    device type ──► module with an ``adapter`` ──► ``TensorPieces``, which DCP can cut

    synchronize()            returns when tensors hold the values that the program has given them so far
    to_save(tensor)          live ``TensorPieces`` of it, or the tensor itself where each host holds it whole
    to_load(tensor)          the same, with pieces on the CPU that go to the device when all of them are read
    first_state(optimizer)   the state after its first step, by parameter, sharded as it will be; the optimizer stays as it is

Everything else of a checkpoint (CPU tensors, the loader, plain values, names) goes the usual way, so that a checkpoint does
not tell on which device it was made.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, TypeGuard, cast

import torch
from torch.distributed.tensor import DTensor

from rescale_data.checkpoint.storage.dcp import TensorPieces
from rescale_data.checkpoint.tree import iterate_leaves, map_leaves

_ADAPTERS = {"xla": "rescale_data.xla.adapter"}


def adapter_of(values: Iterable[Any]) -> Any:
    """Return the device adapter for the first tensor that needs one, or None."""
    for value in values:
        if _has_adapter(value):
            return importlib.import_module(_ADAPTERS[value.device.type]).adapter
    return None


def detached_copy(live_tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor to save: in host memory if its device has an adapter, else on the same device."""
    if not isinstance(live_tensor, TensorPieces):
        return live_tensor.detach().cpu() if _has_adapter(live_tensor) else live_tensor.detach().clone()
    return live_tensor.detached_copy()


def adapt_tensors(state: dict[str, Any], direction: Literal["to_save", "to_load"]) -> dict[str, Any]:
    """Return a state in which the device adapter has replaced its tensors by ones that DCP can save or load into."""
    adapter = wait_for_device(state)
    if adapter is None:
        return state
    return map_leaves(state, lambda _, value: getattr(adapter, direction)(value) if _has_adapter(value) else value)


def memory_address(tensor: Any) -> int:
    """Return the memory address of this process's part of a tensor; 0 if it is not known."""
    if _has_adapter(tensor):
        return 0
    with torch.no_grad():
        local_tensor = tensor.to_local() if is_dtensor(tensor) else tensor
    return local_tensor.data_ptr() if type(local_tensor) in (torch.Tensor, torch.nn.Parameter) else 0


def wait_for_device(state: Any) -> Any:
    """Wait until a device with an adapter has computed the tensors of a state; return the adapter, or None without one."""
    adapter = adapter_of(leaf for _, leaf in iterate_leaves(state))
    if adapter is not None:
        adapter.synchronize()
    return adapter


def refuse_pickled(state: Any) -> None:
    """Raise ``TypeError`` if a value that DCP pickles holds a tensor that other devices or ranks could not load."""
    for path, value in iterate_leaves(state):
        tensors = (item for item in nested_values(value) if is_dtensor(item) or _has_adapter(item))
        if not isinstance(value, torch.Tensor) and (tensor := next(tensors, None)) is not None:
            location = tensor.device_mesh if is_dtensor(tensor) else tensor.device
            raise TypeError(
                f"{'.'.join(path)} is a {type(value).__name__} with a tensor on {location}: DCP would pickle one rank's part "
                f"of it, and only the same device and mesh could load that. Put the tensors into a list or a dict."
            )


def state_after_first_step(
    optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor]
) -> Mapping[torch.Tensor, dict[str, Any]]:
    """Return by parameter the state that a device adapter makes for an optimizer before its first step; ``{}`` without one."""
    adapter = adapter_of(parameter for parameter in parameters if not optimizer.state.get(parameter))
    return {} if adapter is None else adapter.first_state(optimizer)


def is_dtensor(value: Any) -> TypeGuard[DTensor]:
    """True if a value is a DTensor with a mesh and placements (not a device's own kind, such as a sharded tensor of XLA)."""
    return isinstance(value, DTensor) and not _has_adapter(value)


def _has_adapter(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type in _ADAPTERS


def nested_values(value: Any) -> Iterator[Any]:
    """Yield the values in nested dataclasses, mappings, lists, tuples and sets, which DCP would pickle whole."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = vars(value)
    if isinstance(value, Mapping):
        value = list(cast(Mapping[Any, Any], value).values())
    if isinstance(value, list | tuple | set | frozenset):
        for item in cast("list[Any]", value):
            yield from nested_values(item)
    else:
        yield value
