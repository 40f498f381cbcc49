"""Allocate the tensors that an optimizer's saved state is loaded into, and reject saved tensors that do not fit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import optim
from torch.distributed.tensor import DTensor

from rescale_data.checkpoint.tree import map_leaves


def allocate_state(
    optimizer: optim.Optimizer, parameter: torch.Tensor, live_state: Mapping[str, Any], saved: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return tensors to load a parameter's saved state into: the live ones if they fit, else new ones sharded like it.

    Args:
        live_state: The entries that the parameter has now.
        saved: The saved entries, with a tensor on the meta device for each tensor.

    Returns:
        The entries with a tensor to load into for each saved tensor; the reasons why tensors do not fit, by their dotted path.
    """
    mismatches: dict[str, str] = {}
    has_scalar_state = has_parameter_shapes(optimizer) and not any(getattr(leaf, "ndim", 0) for leaf in saved.values())

    def allocate_leaf(path: tuple[Any, ...], leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        live_value = live_state.get(path[0])
        is_number = leaf.ndim == 0 and (path[0] == "step" or not (has_scalar_state or getattr(live_value, "ndim", 0)))
        mismatch_text = "" if is_number else shape_mismatch(optimizer, parameter, live_value, leaf.shape)
        if mismatch_text:
            mismatches[".".join(map(str, path))] = mismatch_text
        return live_value if mismatch_text else empty_like_saved(parameter, live_value, leaf)

    return map_leaves(saved, allocate_leaf), mismatches


def has_parameter_shapes(optimizer: optim.Optimizer) -> bool:
    """True for optimizers of torch whose tensors have the shape and dtype of their parameter, or no dimension."""
    is_from_torch = type(optimizer).__module__.startswith("torch.optim.")
    return is_from_torch and not isinstance(optimizer, optim.Adafactor | optim.LBFGS)


def shape_mismatch(optimizer: optim.Optimizer, parameter: torch.Tensor, live_entry: Any, shape: torch.Size) -> str:
    """Return the reason why a saved tensor of this shape cannot be state of the parameter; else an empty text.

    Args:
        live_entry: The same entry of the optimizer as it is, or None.
    """
    live_shape = live_entry.shape if isinstance(live_entry, torch.Tensor) else None
    if shape in (parameter.shape, live_shape):
        return ""
    shapes_text = f"has the shape {list(shape)} and its parameter {list(parameter.shape)}"
    if has_parameter_shapes(optimizer) or live_shape == parameter.shape:
        return f"{shapes_text}; they are to be the same"
    if isinstance(parameter, DTensor):
        return (
            f"{shapes_text}: how to shard it cannot be known. Run one optimizer step before the load, so that the state exists "
            f"in its sharding, or load without a mesh"
        )
    return ""


def empty_like_saved(parameter: torch.Tensor, live_entry: Any, saved: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the saved shape and dtype, sharded like its parameter; the live tensor if it is the same."""
    if isinstance(live_entry, torch.Tensor) and live_entry.shape == saved.shape and live_entry.dtype == saved.dtype:
        return live_entry
    if parameter.shape == saved.shape:
        return torch.zeros_like(parameter, dtype=saved.dtype, requires_grad=False)
    return torch.zeros(saved.shape, dtype=saved.dtype, device=parameter.device if saved.dim() else None)


def cast_like(current: Any, saved: Any) -> Any:
    """Return ``current``, which torch has cast to the parameter's dtype, in the dtype that was saved."""
    if isinstance(current, torch.Tensor) and isinstance(saved, torch.Tensor):
        return current if current.dtype == saved.dtype else saved.to(current.device)
    if isinstance(current, dict) and isinstance(saved, Mapping):
        saved_entries = cast(Mapping[Any, Any], saved)
        return {key: cast_like(value, saved_entries.get(key)) for key, value in cast(dict[Any, Any], current).items()}
    if isinstance(current, list) and isinstance(saved, list):
        return [cast_like(*pair) for pair in zip(cast("list[Any]", current), cast("list[Any]", saved), strict=False)]
    return current


def missing_settings(optimizer: optim.Optimizer, keys: set[str]) -> list[str]:
    """Return the numeric settings of the optimizer, such as ``lr``, that are not among a saved group's keys.

    Flags do not count: torch adds some from release to release.
    """
    return sorted(key for key, value in optimizer.defaults.items() if key not in keys and _is_number(value))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | tuple | torch.Tensor) and not isinstance(value, bool)
