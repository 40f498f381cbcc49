"""Devices with tensors that DCP's own planners cannot cut: each has an adapter, imported when a state holds such a tensor.

    device type ──► module with an ``adapter`` ──► ``Pieces``, which DCP can cut

    settle()                 returns when tensors hold the values that the program has given them so far
    to_save(tensor)          live ``Pieces`` of it, or the tensor itself where each host holds it whole
    to_load(tensor)          the same, with pieces on the CPU that go to the device when all of them are read
    first_state(optimizer)   the state after its first step, by parameter, sharded as it will be; the optimizer stays as it is

Everything else of a checkpoint (CPU tensors, the loader, plain values, names) goes the usual way, so that a checkpoint does
not tell on which device it was made.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, cast

import torch
from torch.distributed.tensor import DTensor

from rescale_data.checkpoint.storage.dcp import Pieces
from rescale_data.checkpoint.tree import leaves, mapped

_ADAPTERS = {"xla": "rescale_data.xla.adapter"}


def adapter_of(values: Iterable[Any]) -> Any:
    """Return the adapter of the first tensor that needs one, or None."""
    for value in values:
        if _has_adapter(value):
            return importlib.import_module(_ADAPTERS[value.device.type]).adapter
    return None


def copied(live: torch.Tensor) -> torch.Tensor:
    """A copy that nothing changes any more, of what DCP would save; on the host where the device has an adapter."""
    if not isinstance(live, Pieces):
        return live.detach().cpu() if _has_adapter(live) else live.detach().clone()
    return live.copied()


def cut(state: dict[str, Any], way: Literal["to_save", "to_load"]) -> dict[str, Any]:
    """A nested state with what DCP saves, or loads into, in place of each tensor of a device that has an adapter."""
    adapter = settle(state)
    if adapter is None:
        return state
    return mapped(state, lambda _, value: getattr(adapter, way)(value) if _has_adapter(value) else value)


def address(tensor: Any) -> int:
    """Return the address of the memory of this process's part of a tensor; 0 where that is not known."""
    if _has_adapter(tensor):
        return 0
    with torch.no_grad():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.data_ptr() if type(local) in (torch.Tensor, torch.nn.Parameter) else 0


def settle(state: Any) -> Any:
    """Return when the tensors of a nested state hold what the program has given them so far; their adapter, or None."""
    adapter = adapter_of(leaf for _, leaf in leaves(state))
    if adapter is not None:
        adapter.settle()
    return adapter


def refuse_pickled(state: Any) -> None:
    """``TypeError`` where a tensor that has an adapter is in what DCP pickles: on another device nobody could read it."""
    for path, value in leaves(state):
        if (
            not isinstance(value, torch.Tensor)
            and (tensor := next(filter(_has_adapter, inside(value)), None)) is not None
        ):
            raise TypeError(
                f"{'.'.join(path)} is a {type(value).__name__} with a tensor on {tensor.device}: DCP would pickle it whole, "
                f"and only the same device could load it. Put the tensors into a list or a dict."
            )


def first_state(
    optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor]
) -> Mapping[torch.Tensor, dict[str, Any]]:
    """State to load into, where parameters have none and their device alone knows how it is sharded; else nothing."""
    adapter = adapter_of(parameter for parameter in parameters if not optimizer.state.get(parameter))
    return {} if adapter is None else adapter.first_state(optimizer)


def _has_adapter(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type in _ADAPTERS


def inside(value: Any) -> Iterator[Any]:
    """Yield the values in a pickled value, as far as they can be seen."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = vars(value)
    if isinstance(value, Mapping):
        value = list(cast(Mapping[Any, Any], value).values())
    if isinstance(value, list | tuple | set | frozenset):
        for inner in cast("list[Any]", value):
            yield from inside(inner)
    else:
        yield value
