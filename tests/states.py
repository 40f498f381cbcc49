"""A state as its parts: what its header says, and its table column by column; and back; and what differs in two."""

import json
from collections.abc import Mapping
from typing import Any

import torch

from rescale_data.engine.states.codec import fields_in
from rescale_data.state import Field, slot_offsets


def opened(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a state's header, and its columns under "shards", which share memory with its table.

    What was opened already is returned as it is.
    """
    if "shards" in state:
        return dict(state)
    header, table = json.loads(state["header"]), state["table"]
    fields = fields_in(header)
    columns = {
        f.key: _view(f, table[:, a : a + f.num_slots]) for f, a in zip(fields, slot_offsets(fields), strict=False)
    }
    return {**header, "shards": columns}


def closed(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state that `opened` has returned the parts of."""
    header = {name: value for name, value in parts.items() if name != "shards"}
    table = torch.cat([_slots(column) for column in parts["shards"].values()], dim=1)
    return {"table": table, "header": json.dumps(header)}


def _view(field: Field, slots: torch.Tensor) -> torch.Tensor:
    if field.shape is None:
        return slots[:, 0] != 0 if field.dtype is torch.bool else slots[:, 0].view(field.dtype)
    return slots.view(torch.uint8)[:, : field.num_bytes].contiguous().view(field.dtype).reshape(-1, *field.shape)


def _slots(column: torch.Tensor) -> torch.Tensor:
    if column.ndim == 1:
        return (column.long() if column.dtype is torch.bool else column.view(torch.int64))[:, None]
    raw = column.contiguous().reshape(len(column), -1).view(torch.uint8)
    return torch.nn.functional.pad(raw, (0, -raw.shape[1] % 8)).view(torch.int64)


def where(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of a state without how it was come by: K, and what was left out."""
    return {name: value for name, value in opened(state).items() if name not in ("num_workers", "skipped")}


def difference(
    one: Mapping[str, Any], other: Mapping[str, Any], besides: tuple[str, ...] = (), *, unbatched: bool = True
) -> str:
    """Return in what two states differ, but for K and what was left out; empty if in nothing.

    Args:
        besides: Keys that may differ, too.
        unbatched: Compare places in a batch, too, where torchdata's Unbatcher puts them to 0 at its source's end.
    """
    one, other = where(one), where(other)
    if one.keys() != other.keys() or one["shards"].keys() != other["shards"].keys():
        return "keys"
    for key, column in one["shards"].items():
        its = other["shards"][key]
        if (column.shape, column.dtype) != (its.shape, its.dtype):
            return f"shards.{key}: {column.dtype} {[*column.shape]}, {its.dtype} {[*its.shape]}"
        differs = column != its
        if not unbatched and key.endswith(".batch_idx"):
            below = key.removesuffix("batch_idx")
            for name, ended in one["shards"].items():
                if name.startswith(below) and name.endswith("_ended"):
                    differs &= ~ended.bool()
        if differs.any():
            return f"shards.{key}: {column.tolist()} {its.tolist()}"
    keys = [key for key in one if key not in ("shards", *besides) and one[key] != other[key]]
    return "; ".join(f"{key}: {one[key]} {other[key]}" for key in keys)


def same_state(one: Mapping[str, Any], other: Mapping[str, Any], besides: tuple[str, ...] = ()) -> bool:
    """True if two states are equal, but for K and what was left out; ``besides`` names keys that may differ, too."""
    return not difference(one, other, besides)
