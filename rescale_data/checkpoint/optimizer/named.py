"""An optimizer's state by parameter name, as DCP saves it.

Names and FSDP1's flat parameters are the business of ``torch.distributed.checkpoint.state_dict``. What it would do to an
optimizer without state, a step with zero gradients that leaves ``step`` at 1, is prevented here.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import FlatParameter, FullyShardedDataParallel

from rescale_data.errors import require

GROUPS = "param_groups"


def owner(name: str, optimizer: torch.optim.Optimizer, modules: list[tuple[tuple[str, ...], nn.Module]]) -> nn.Module:
    """The module of the state that has all of the optimizer's parameters, or those that have them together."""
    wanted = {id(parameter) for parameter in parameters_of(optimizer)}
    owned = [(path, module, wanted & {id(p) for p in module.parameters()}) for path, module in modules]
    for _, module, found in owned:
        if found == wanted:
            return module
    if wanted <= {parameter for _, _, found in owned for parameter in found}:
        return _together({"/".join(path): module for path, module, found in owned if found})
    raise ValueError(
        f"The parameters of the optimizer {name!r} are not those of a module in the state "
        f"({[p for p, _ in modules] or 'there is none'}), so they have no names. "
        f'Put its model into the state too: {{"model": model, "{name}": optimizer}}.'
    )


def _together(modules: dict[str, nn.Module]) -> nn.Module:
    """One module with these. A name that a module cannot have, with a dot or an attribute's, has a slash in it instead."""
    root = nn.Module()
    for name, module in modules.items():
        plain = name.replace(".", "/")
        root.add_module(f"{plain}/" if plain in dir(root) else plain, module)
    return root


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def named_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """``{"state": {name: {entry: value}}, "param_groups": [{"params": [name, ...], ...}]}`` with live tensors."""
    require(nn.Module, "a module", model=model)
    if not hasattr(optimizer, "param_groups"):
        raise TypeError(f"optimizer={optimizer!r} is a {type(optimizer).__name__}; give an optimizer of torch.")
    with _no_first_step(optimizer):
        state = cast(dict[str, Any], get_optimizer_state_dict(model, optimizer))
    state["state"] = {name: entries for name, entries in state["state"].items() if entries}
    return state


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
    return [name for group in state[GROUPS] for name in group["params"]]


def is_flat(model: nn.Module) -> bool:
    """Whether FSDP1 keeps the parameters in flat pieces."""
    return bool(FullyShardedDataParallel.fsdp_modules(model))


def flat_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """A state of all of FSDP1's parameters, by name.

    FSDP1 alone knows how its flat parameters are cut, so torch makes what is missing, by its step with zero gradients.
    """
    with _without_gradients(optimizer):
        return cast(dict[str, Any], get_optimizer_state_dict(model, optimizer))


def set_flat_state(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Give FSDP1's optimizer a whole state by name."""
    if state["state"]:
        with _without_gradients(optimizer):
            set_optimizer_state_dict(model, optimizer, cast(Any, state), options=StateDictOptions(strict=False))
        return
    optimizer.state.clear()
    for group, values in zip(optimizer.param_groups, state[GROUPS], strict=True):
        group.update({key: value for key, value in values.items() if key != "params"})


@contextmanager
def _without_gradients(optimizer: torch.optim.Optimizer) -> Generator[None]:
    """With gradients torch takes an optimizer without state for one that never has any."""
    gradients = [(parameter, parameter.grad) for parameter in parameters_of(optimizer)]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient


def numbered(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Parameters in the order in which the optimizer of the same model without wrapping numbers them.

    A group has them in that order, but for FSDP1's flat parameters, each of which is several: those of a group go by the
    order of the modules that own them, as ``model.parameters()`` does.
    """
    state = named_state(model, optimizer)
    place = _module_places(model, names_of(state))
    return [
        name
        for live, named in zip(optimizer.param_groups, state[GROUPS], strict=True)
        for name in (
            sorted(named["params"], key=lambda name: place[name.rpartition(".")[0]])
            if any(isinstance(parameter, FlatParameter) for parameter in live["params"])
            else named["params"]
        )
    ]


def _module_places(model: nn.Module, names: list[str]) -> dict[str, int]:
    """When a walk through the modules first comes to those that own parameters, by their names without wrapping."""
    parts = [name.split(".")[:-1] for name in names]
    known = {tuple(path[:length]) for path in parts for length in range(len(path) + 1)}
    places: dict[str, int] = {}
    for raw, _ in model.named_modules():
        path: tuple[str, ...] = ()
        for part in raw.split("."):
            path = (*path, part) if (*path, part) in known else path  # what is in no name is a wrapper's
        places.setdefault(".".join(path), len(places))
    return places
