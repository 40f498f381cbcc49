"""Room for the saved state of an optimizer: tensors sharded like its parameters, and saved state that cannot be theirs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import optim
from torch.distributed.tensor import DTensor

from rescale_data.checkpoint.tree import mapped


def room(
    optimizer: optim.Optimizer, parameter: torch.Tensor, live: Mapping[str, Any], saved: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return tensors for the saved entries of a parameter, sharded like it and live where they can be.

    Args:
        live: The entries that it has.
        saved: With a tensor on the meta device for each tensor.

    Returns:
        The same with room for each tensor; and why that is not the parameter's, by its place in the entries.
    """
    misfits: dict[str, str] = {}

    def place(path: tuple[Any, ...], leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        old = live.get(path[0])
        if text := misfit(optimizer, parameter, old, leaf.shape):
            misfits[".".join(map(str, path))] = text
        return old if text else empty_like_saved(parameter, old, leaf)

    return mapped(saved, place), misfits


def is_like_parameters(optimizer: optim.Optimizer) -> bool:
    """True for torch's optimizers whose tensors are of the shape and dtype of their parameter, or without dimension."""
    is_torchs = type(optimizer).__module__.startswith("torch.optim.")
    return is_torchs and not isinstance(optimizer, optim.Adafactor | optim.LBFGS)


def misfit(optimizer: optim.Optimizer, parameter: torch.Tensor, live: Any, shape: torch.Size) -> str:
    """Return in words why a saved tensor of this shape is not the parameter's; else nothing.

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
    """Return a tensor of the saved shape and dtype, sharded like its parameter; the live one where it is of the same."""
    if isinstance(live, torch.Tensor) and live.shape == saved.shape and live.dtype == saved.dtype:
        return live
    if parameter.shape == saved.shape:
        return torch.zeros_like(parameter, dtype=saved.dtype, requires_grad=False)
    return torch.zeros(saved.shape, dtype=saved.dtype, device=parameter.device if saved.dim() else None)


def as_saved(current: Any, saved: Any) -> Any:
    """Return ``current``, which torch has cast to the parameter's dtype, with the values in the dtype that was saved."""
    if isinstance(current, torch.Tensor) and isinstance(saved, torch.Tensor):
        return current if current.dtype == saved.dtype else saved.to(current.device)
    if isinstance(current, dict) and isinstance(saved, Mapping):
        pairs = cast(Mapping[Any, Any], saved)
        return {key: as_saved(value, pairs.get(key)) for key, value in cast(dict[Any, Any], current).items()}
    if isinstance(current, list) and isinstance(saved, list):
        return [as_saved(*pair) for pair in zip(cast("list[Any]", current), cast("list[Any]", saved), strict=False)]
    return current


def lacking(optimizer: optim.Optimizer, keys: set[str]) -> list[str]:
    """Return the numbers that the optimizer is built with and a group with these keys lacks: it is another optimizer's.

    Flags do not count: torch adds some from release to release.
    """
    return sorted(key for key, value in optimizer.defaults.items() if key not in keys and _is_number(value))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | tuple | torch.Tensor) and not isinstance(value, bool)
