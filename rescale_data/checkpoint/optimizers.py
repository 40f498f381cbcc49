"""An optimizer's state by parameter name, as DCP saves it, and the way back into any sharding.

Names and FSDP1's flat parameters are the business of ``torch.distributed.checkpoint.state_dict``. What it would do to an
optimizer without state, a step with zero gradients that leaves ``step`` at 1, is prevented here: placeholders follow what the
checkpoint holds, so that parameters without state (unused, frozen, never stepped) load as they were saved.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias, cast

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from rescale_data.checkpoint.devices import first_state

Layout: TypeAlias = dict[str, Any]
"""``{"state": {parameter: {entry: metadata}}, "param_groups": [{key: metadata}]}``."""


def owner(name: str, optimizer: torch.optim.Optimizer, modules: list[tuple[tuple[str, ...], nn.Module]]) -> nn.Module:
    """The module of the state that has all of the optimizer's parameters, or those that have them together."""
    wanted = {id(parameter) for parameter in parameters_of(optimizer)}
    owned = [(path, module, wanted & {id(p) for p in module.parameters()}) for path, module in modules]
    for _, module, found in owned:
        if found == wanted:
            return module
    if wanted <= {parameter for _, _, found in owned for parameter in found}:
        return nn.ModuleDict({"/".join(path): module for path, module, found in owned if found})
    raise ValueError(
        f"The parameters of the optimizer {name!r} are not those of a module in the state "
        f"({[p for p, _ in modules] or 'there is none'}), so they have no names. "
        f'Put its model into the state too: {{"model": model, "{name}": optimizer}}.'
    )


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def named_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """``{"state": {name: {entry: value}}, "param_groups": [{"params": [name, ...], ...}]}`` with live tensors."""
    with _no_first_step(optimizer):
        state = cast(dict[str, Any], get_optimizer_state_dict(model, optimizer))
    state["state"] = {name: entries for name, entries in state["state"].items() if entries}
    return state


def saved_layout(metadata: Metadata, path: tuple[str, ...]) -> Layout:
    """What a checkpoint holds of the optimizer that was saved under ``path``."""
    layout: Layout = {"state": {}, "param_groups": {}}
    for key, saved in metadata.state_dict_metadata.items():
        where = tuple((metadata.planner_data or {}).get(key, ()))
        if where[: len(path)] != path or len(where) < len(path) + 3 or where[len(path)] not in layout:
            continue
        part, owned_by, *entry = where[len(path) :]
        layout[part].setdefault(owned_by, {})[tuple(entry)] = saved
    return layout


def placeholder(model: nn.Module, optimizer: torch.optim.Optimizer, saved: Layout, name: str) -> dict[str, Any]:
    """What DCP loads into: state for exactly the parameters that have some in the checkpoint.

    Raises:
        ValueError: another number of parameter groups, or a state tensor that cannot be mapped on its parameter.
    """
    if is_flat(model):
        return _flat_placeholder(model, optimizer, saved, name)
    current = named_state(model, optimizer)
    by_name = dict(zip(names_of(current), parameters_of(optimizer), strict=True))
    wanted = {parameter: entries for parameter, entries in saved["state"].items() if parameter in by_name}
    first = first_state(optimizer, [by_name[parameter] for parameter in wanted])
    state = {
        parameter: _entries(
            f"{name}.state.{parameter}",
            by_name[parameter],
            optimizer.state.get(by_name[parameter]) or first.get(by_name[parameter], {}),
            entries,
        )
        for parameter, entries in wanted.items()
    }
    return {"state": state, "param_groups": _groups(current["param_groups"], saved, name)}


def apply(model: nn.Module, optimizer: torch.optim.Optimizer, loaded: dict[str, Any], name: str) -> None:
    """Take what was loaded; ``ValueError`` where the parameters are grouped differently."""
    current = named_state(model, optimizer)
    groups = _matched_groups(current["param_groups"], loaded["param_groups"], name)
    if is_flat(model):
        _apply_flat(model, optimizer, {"state": loaded["state"], "param_groups": groups})
        return
    index = {parameter: number for number, parameter in enumerate(names_of(current))}
    optimizer.load_state_dict(
        {
            "state": {index[parameter]: entries for parameter, entries in loaded["state"].items()},
            "param_groups": [{**group, "params": [index[p] for p in group["params"]]} for group in groups],
        }
    )


@contextmanager
def _no_first_step(optimizer: torch.optim.Optimizer) -> Generator[None]:
    """Keep torch from stepping an optimizer that has no state yet: to it, one with empty entries has.

    FSDP1 wants an entry for each parameter, too.
    """
    marked = [parameter for parameter in parameters_of(optimizer) if parameter not in optimizer.state]
    for parameter in marked:
        optimizer.state[parameter] = {}
    try:
        yield
    finally:
        for parameter in (parameter for parameter in marked if not optimizer.state[parameter]):
            del optimizer.state[parameter]


def names_of(state: Mapping[str, Any]) -> list[str]:
    """Parameters in the order of the optimizer's groups."""
    return [name for group in state["param_groups"] for name in group["params"]]


def _entries(name: str, parameter: torch.Tensor, live: Mapping[str, Any], saved: Mapping[Any, Any]) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    for path, meta in saved.items():
        inner = entries
        for key in path[:-1]:
            inner = inner.setdefault(key, {})
        shape, dtype = (meta.size, meta.properties.dtype) if isinstance(meta, TensorStorageMetadata) else (None, None)
        inner[path[-1]] = empty_like_saved(
            ".".join(map(str, (name, *path))), parameter, live.get(path[0]), shape, dtype
        )
    return entries


def empty_like_saved(
    name: str, parameter: torch.Tensor, live: Any, shape: torch.Size | None, dtype: torch.dtype | None
) -> torch.Tensor | None:
    """A state tensor of the saved shape, sharded like its parameter; None for what is no tensor.

    Raises:
        ValueError: it is shaped unlike its parameter, which is sharded, so that its own sharding cannot be known.
    """
    if shape is None or dtype is None:
        return None
    if isinstance(live, torch.Tensor) and live.shape == shape and live.dtype == dtype:
        return live
    if parameter.shape == shape:
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    if len(shape) == 0:
        return torch.zeros((), dtype=dtype)
    if isinstance(parameter, DTensor):
        raise ValueError(
            f"{name} has the shape {list(shape)} and its parameter {list(parameter.shape)}: how to shard it "
            f"cannot be known. "
            f"Run one optimizer step before the load, so that the state exists in its sharding, or load without a mesh."
        )
    return torch.zeros(shape, dtype=dtype, device=parameter.device)


def _groups(current: list[dict[str, Any]], saved: Layout, name: str) -> list[dict[str, Any]]:
    if len(saved["param_groups"]) not in (0, len(current)):
        raise ValueError(
            f"The optimizer {name!r} has {len(current)} parameter groups and the checkpoint {len(saved['param_groups'])}. "
            f"Build it with the same groups as in the run that saved."
        )
    return [
        {**dict.fromkeys(path[0] for path in saved["param_groups"].get(number, {})), "params": group["params"]}
        for number, group in enumerate(current)
    ]


def _matched_groups(current: list[dict[str, Any]], loaded: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    by_names = {frozenset(group["params"]): group for group in loaded}
    matched: list[dict[str, Any]] = []
    for number, group in enumerate(current):
        found = by_names.get(frozenset(group["params"]))
        if found is None:
            raise ValueError(
                f"The optimizer {name!r}: group {number} has the parameters {sorted(group['params'])[:5]} ..., and no "
                f"group of the checkpoint has the same. Group the parameters as in the run that saved."
            )
        matched.append({**group, **found, "params": group["params"]})
    return matched


def is_flat(model: nn.Module) -> bool:
    """Whether FSDP1 keeps the parameters in flat pieces."""
    return bool(FullyShardedDataParallel.fsdp_modules(model))


def _flat_placeholder(model: nn.Module, optimizer: torch.optim.Optimizer, saved: Layout, name: str) -> dict[str, Any]:
    if saved["state"]:
        # FSDP1 alone knows how its flat parameters are cut, so here torch makes the state, by its step with zero gradients.
        current = cast(dict[str, Any], get_optimizer_state_dict(model, optimizer))
    else:
        current = named_state(model, optimizer)
    state = {parameter: entries for parameter, entries in current["state"].items() if parameter in saved["state"]}
    return {"state": state, "param_groups": _groups(current["param_groups"], saved, name)}


def _apply_flat(model: nn.Module, optimizer: torch.optim.Optimizer, loaded: dict[str, Any]) -> None:
    if loaded["state"]:
        set_optimizer_state_dict(model, optimizer, loaded, options=StateDictOptions(strict=False))
        return
    optimizer.state.clear()
    for group, values in zip(optimizer.param_groups, loaded["param_groups"], strict=True):
        group.update({key: value for key, value in values.items() if key != "params"})
