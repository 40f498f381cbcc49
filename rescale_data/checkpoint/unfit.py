"""Tensors that DCP would save or load wrongly, or fail at without a name: refused by name, before anything is done."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch


def refuse_unfit(plain: Mapping[str, Any]) -> None:
    """``ValueError`` naming every tensor of a nested state that has no place in a checkpoint, and the cure."""
    found = [f"{name} {why}" for name, tensor in _tensors(plain, "") if (why := _why(tensor))]
    if found:
        listed = "\n  ".join(found)
        raise ValueError(f"These tensors can be neither saved nor loaded; nothing was done:\n  {listed}")


def _why(tensor: torch.Tensor) -> str:
    if tensor.device.type == "meta":
        return "is on the meta device and has no memory: call module.to_empty(device=...) before."
    # Not is_quantized and is_nested: FSDP1's ShardedTensor knows neither.
    if str(tensor.dtype).startswith(("torch.qint", "torch.quint")):
        return "is quantized: put int_repr(), scale and zero point into the state instead."
    if tensor.layout != torch.strided:
        layout = str(tensor.layout).removeprefix("torch.")
        return f"is {layout}: put the dense tensors that it is made of into the state instead."
    return ""


def _tensors(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors by flattened name, in the containers that DCP looks into; it pickles whatever else there is."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, Mapping | list):
        items = cast("Mapping[Any, Any]", value).items() if isinstance(value, Mapping) else enumerate(value)
        for key, inner in items:
            yield from _tensors(inner, f"{name}.{key}" if name else str(key))
