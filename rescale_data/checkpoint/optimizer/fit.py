"""Whether a saved optimizer's state is this one's: its groups, and each parameter's entries (``exp_avg``, ``step``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import optim
from torch.distributed.tensor import DTensor

_LIKE_PARAMETERS = (
    optim.ASGD,
    optim.Adadelta,
    optim.Adagrad,
    optim.Adam,
    optim.AdamW,
    optim.Adamax,
    optim.Muon,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Rprop,
    optim.SGD,
    optim.SparseAdam,
)
"""torch's optimizers whose tensors are of the shape and dtype of their parameter, or without dimension."""


def is_like_parameters(optimizer: torch.optim.Optimizer) -> bool:
    return type(optimizer) in _LIKE_PARAMETERS


def misfit(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, live: Any, shape: torch.Size) -> str:
    """Why a saved tensor of this shape is not the parameter's; else nothing.

    Args:
        live: The same entry of the optimizer as it is, or None.
    """
    known = live.shape if isinstance(live, torch.Tensor) else None
    if len(shape) == 0 or shape in (parameter.shape, known):
        return ""
    text = f"has the shape {list(shape)} and its parameter {list(parameter.shape)}"
    if is_like_parameters(optimizer) or known == parameter.shape:
        return f"{text}; they are to be the same"
    if isinstance(parameter, DTensor):
        return (
            f"{text}: how to shard it cannot be known. Run one optimizer step before the load, so that the state exists in "
            f"its sharding, or load without a mesh"
        )
    return ""


def empty_like_saved(parameter: torch.Tensor, live: Any, saved: torch.Tensor) -> torch.Tensor:
    """A tensor of the saved shape and dtype, sharded like its parameter; the live one where it is of the same."""
    if isinstance(live, torch.Tensor) and live.shape == saved.shape and live.dtype == saved.dtype:
        return live
    if parameter.shape == saved.shape:
        return torch.zeros_like(parameter, dtype=saved.dtype, requires_grad=False)
    return torch.zeros(saved.shape, dtype=saved.dtype, device=parameter.device if saved.dim() else None)


def as_saved(current: Any, saved: Any) -> Any:
    """``current``, which torch has cast to the parameter's dtype, with the values in the dtype in which they were saved."""
    if isinstance(current, torch.Tensor) and isinstance(saved, torch.Tensor):
        return current if current.dtype == saved.dtype else saved.to(current.device)
    if isinstance(current, dict) and isinstance(saved, Mapping):
        pairs = cast(Mapping[Any, Any], saved)
        return {key: as_saved(value, pairs.get(key)) for key, value in cast(dict[Any, Any], current).items()}
    if isinstance(current, list) and isinstance(saved, list):
        return [as_saved(*pair) for pair in zip(cast("list[Any]", current), cast("list[Any]", saved), strict=False)]
    return current


def lacking(optimizer: torch.optim.Optimizer, keys: set[str]) -> list[str]:
    """The numbers that the optimizer is built with and a group with these keys does not have: it is another optimizer's.

    Flags do not count: torch adds some from release to release.
    """
    return sorted(key for key, value in optimizer.defaults.items() if key not in keys and _is_number(value))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | tuple | torch.Tensor) and not isinstance(value, bool)
