"""An optimizer's state by parameter name, as DCP saves it.

Names are the business of ``torch.distributed.checkpoint.state_dict``. What it would do to an optimizer without state, a step
with zero gradients that leaves ``step`` at 1, is prevented here.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

GROUPS = "param_groups"


def owning_module(
    optimizer_name: str, optimizer: torch.optim.Optimizer, modules: list[tuple[tuple[str, ...], nn.Module]]
) -> nn.Module:
    """Return the module that has all parameters of the optimizer, or several modules combined into one."""
    wanted_ids = {id(parameter) for parameter in parameters_of(optimizer)}
    candidates = [(path, module, wanted_ids & {id(param) for param in module.parameters()}) for path, module in modules]
    for _, module, owned_ids in candidates:
        if owned_ids == wanted_ids:
            return module
    if wanted_ids <= {parameter for _, _, owned_ids in candidates for parameter in owned_ids}:
        return _combine_modules({"/".join(path): module for path, module, owned_ids in candidates if owned_ids})
    raise ValueError(
        f"The parameters of the optimizer {optimizer_name!r} are not those of a module in the state "
        f"({[path for path, _ in modules] or 'there is none'}), so they have no names. "
        f'Put its model into the state too: {{"model": model, "{optimizer_name}": optimizer}}.'
    )


def _combine_modules(modules: dict[str, nn.Module]) -> nn.Module:
    """Combine modules into one, by name. A character that a module name cannot have becomes a slash."""
    combined_module = nn.Module()
    for name, module in modules.items():
        module_name = name.replace(".", "/")
        combined_module.add_module(f"{module_name}/" if module_name in dir(combined_module) else module_name, module)
    return combined_module


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def named_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state of an optimizer by parameter name, with its live tensors.

    ``{"state": {name: {entry: value}}, "param_groups": [{"params": [name, ...], ...}]}``.
    """
    with _without_dummy_step(optimizer):
        state = cast(dict[str, Any], get_optimizer_state_dict(model, optimizer))
    state["state"] = {name: entries for name, entries in state["state"].items() if entries}
    return state


@contextmanager
def _without_dummy_step(optimizer: torch.optim.Optimizer) -> Generator[None]:
    """Give parameters without state an empty one inside the ``with`` block, so that torch makes no first step to create it."""
    without_state = [parameter for parameter in parameters_of(optimizer) if parameter not in optimizer.state]
    for parameter in without_state:
        optimizer.state[parameter] = {}
    try:
        yield
    finally:
        for parameter in (parameter for parameter in without_state if not optimizer.state[parameter]):
            del optimizer.state[parameter]


def named_parameters(state: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return an optimizer's parameters by name, in the order of its groups, from its ``named_state``."""
    parameter_names = [name for group in state[GROUPS] for name in group["params"]]
    return dict(zip(parameter_names, parameters_of(optimizer), strict=True))
