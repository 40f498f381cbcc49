"""Devices with tensors that DCP's own planners cannot cut: each has an adapter, imported when a state holds such a tensor.

    device type ──► module with an ``adapter`` ──► planners of that device's library, for the tensors that it has sharded

Everything else of a checkpoint (CPU tensors, the loader, plain values, names) goes the usual way, so that a checkpoint does
not tell on which device it was made.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol, cast

import torch
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner

_ADAPTERS = {"xla": "rescale_data.xla.adapter"}


class Adapter(Protocol):
    """What the checkpoint needs to know of a device."""

    def is_sharded(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is spread over devices in pieces, so that no host holds it whole."""
        ...

    def unwrap(self, tensor: torch.Tensor) -> torch.Tensor:
        """A whole tensor as itself, where the device's library has wrapped it into what DCP takes for something else."""
        ...

    def settle(self) -> None:
        """Return when tensors hold the values that the program has given them so far."""
        ...

    def save_planner(self) -> SavePlanner:
        """A planner for sharded tensors by name: ``SHARD`` items, and CPU tensors without padding for them."""
        ...

    def load_planner(self) -> LoadPlanner:
        """A planner that loads sharded tensors by name in place."""
        ...

    def first_state(self, optimizer: torch.optim.Optimizer) -> Mapping[torch.Tensor, dict[str, Any]]:
        """The state that the optimizer will have after its first step, in its shardings; the optimizer is left as it is."""
        ...


def adapter_of(values: Iterable[Any]) -> Adapter | None:
    """The adapter of the first tensor that needs one."""
    for value in values:
        if _has_adapter(value):
            return cast(Adapter, importlib.import_module(_ADAPTERS[value.device.type]).adapter)
    return None


def divided(state: Mapping[str, Any], adapter: Adapter) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The sharded tensors of a flat state, and the whole ones of the same device, unwrapped."""
    mine = {name: value for name, value in state.items() if adapter_of([value]) is not None}
    sharded = {name: value for name, value in mine.items() if adapter.is_sharded(value)}
    return sharded, {name: adapter.unwrap(value) for name, value in mine.items() if name not in sharded}


def settle(state: Any) -> None:
    """Return when the tensors of a nested state hold the values that the program has given them so far."""
    adapter = adapter_of(_leaves(state))
    if adapter is not None:
        adapter.settle()


def refuse_pickled(values: list[tuple[tuple[str, ...], Any]]) -> None:
    """``TypeError`` where a tensor that has an adapter is in what DCP pickles: on another device nobody could read it."""
    for path, value in values:
        if isinstance(value, Mapping):
            refuse_pickled([((*path, str(key)), inner) for key, inner in cast(Mapping[Any, Any], value).items()])
        elif isinstance(value, list):
            refuse_pickled([((*path, str(number)), inner) for number, inner in enumerate(cast("list[Any]", value))])
        elif not isinstance(value, torch.Tensor) and (tensor := _on_device(value)) is not None:
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


def _on_device(value: Any) -> torch.Tensor | None:
    return next(filter(_has_adapter, _leaves(value)), None)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        value = list(cast(Mapping[Any, Any], value).values())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    if isinstance(value, list | tuple | set | frozenset):
        for inner in cast("list[Any]", value):
            yield from _leaves(inner)
    else:
        yield value
