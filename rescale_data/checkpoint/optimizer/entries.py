"""Entries of an optimizer's state, one parameter's ``exp_avg`` or ``step``: what a saved one is loaded into."""

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


def misfit(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, live: Any, shape: torch.Size) -> str | None:
    """Why a saved tensor of this shape is not the parameter's.

    Args:
        live: The same entry of the optimizer as it is, or None.
    """
    known = live.shape if isinstance(live, torch.Tensor) else None
    if len(shape) == 0 or shape in (parameter.shape, known):
        return None
    text = f"has the shape {list(shape)} and its parameter {list(parameter.shape)}"
    if is_like_parameters(optimizer) or known == parameter.shape:
        return f"{text}; they are to be the same"
    if isinstance(parameter, DTensor):
        return (
            f"{text}: how to shard it cannot be known. Run one optimizer step before the load, so that the state exists in "
            f"its sharding, or load without a mesh"
        )
    return None


def empty_like_saved(parameter: torch.Tensor, live: Any, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of the saved shape and dtype, sharded like its parameter; the live one where it is of the same."""
    if isinstance(live, torch.Tensor) and live.shape == shape and live.dtype == dtype:
        return live
    if parameter.shape == shape:
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    return torch.zeros(shape, dtype=dtype, device=parameter.device if len(shape) else None)


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
