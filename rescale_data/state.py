"""A node's state as one row of int64 numbers, and the states of all logical shards as one table of such rows.

A *field* is one value of a node's nested state. Numbers take one slot (float64 as its bits, bool as 0 or 1), tensors of
a fixed shape take their bytes, padded to whole slots. Rows are therefore integers alone: copying one is a memory copy,
and a table of N rows becomes one tensor a field without a Python object a shard.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from rescale_data.errors import DataStateError

Ints: TypeAlias = npt.NDArray[np.int64]

EPOCH_FIELD = "epoch"
"""Name of a field that counts epochs."""
COUNT_LIMITS = (0, 2**48)
"""Limits of a field that counts rows, tokens, samples or epochs, beyond what any run reaches."""
_SCALAR_DTYPES: dict[type, torch.dtype] = {bool: torch.bool, int: torch.int64, float: torch.float64}


def copy_of(position: memoryview) -> memoryview:
    """Return a copy of a row of int64 numbers."""
    return np.array(position, dtype=np.int64).data


@dataclass(frozen=True)
class Field:
    """A value of a node's state: its path, dtype and shape.

    Args:
        path: Keys from the root of the nested state down to the value.
        dtype: ``torch.int64``, ``float64`` or ``bool`` for numbers; any dtype for tensors.
        shape: ``None`` for a number, else the shape of the tensor.
        counts: True if it counts what was done on the way (rows skipped, a digest) and does not say where the stream stands.
        limits: The smallest and the largest value that a run can come to; `None` for any.

    Example:
        >>> import rescale_data as rd
        >>> rd.Field(("seen",), counts=True).key
        'seen'
    """

    path: tuple[str, ...]
    dtype: torch.dtype = torch.int64
    shape: tuple[int, ...] | None = None
    counts: bool = False
    limits: tuple[int, int] | None = None

    @property
    def key(self) -> str:
        """The path as a checkpoint names it, such as ``"source.row"``."""
        return ".".join(self.path)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape or ()) * self.dtype.itemsize

    @property
    def num_slots(self) -> int:
        return 1 if self.shape is None else -(-self.num_bytes // 8)

    def with_parents(self, *parents: str) -> Field:
        """Return the same field with the names of parent nodes before its path."""
        return replace(self, path=(*parents, *self.path))

    def describe(self) -> dict[str, Any]:
        """Return dtype and shape as JSON values, for ``fields`` in a checkpoint."""
        return {"dtype": str(self.dtype).removeprefix("torch."), "shape": list(self.shape or ())}


def counter(name: str) -> Field:
    """Return a field that counts what was done on the way (`Field.counts`), from 0 on."""
    return Field((name,), counts=True, limits=COUNT_LIMITS)


def field_of(path: tuple[str, ...], value: Any) -> Field:
    """Return the field that holds ``value``; ``TypeError`` if it is neither a number nor a tensor of a fixed shape."""
    if type(value) in _SCALAR_DTYPES:
        return Field(path, _SCALAR_DTYPES[type(value)])
    if isinstance(value, np.bool_ | np.integer | np.floating):
        return Field(path, _SCALAR_DTYPES[type(value.item())])
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(value)
    if isinstance(value, torch.Tensor):
        return Field(path, value.dtype, tuple(value.shape))
    raise TypeError(
        f"The state {'.'.join(path)!r} is a {type(value).__name__}. The state of a logical shard is made of int, float, "
        f"bool and tensors of a fixed shape: keep a position (a count, an index) from which the rest can be recomputed."
    )


def field_from_description(key: str, description: Mapping[str, Any]) -> Field:
    """Return the field that a result of `Field.describe` describes, with ``key`` as its path.

    Without a shape, and with the dtype of a number, it is a number.
    """
    dtype, shape = getattr(torch, description["dtype"]), tuple(description["shape"])
    return Field((key,), dtype, shape if shape or dtype not in _SCALAR_DTYPES.values() else None)


def encode(field: Field, value: Any) -> list[int]:
    """Return ``value`` as the int64 numbers of a field; ``TypeError`` if its dtype or shape is not the field's."""
    actual = field_of(field.path, value)
    if field.dtype is torch.float64 and field.shape is None and actual.dtype is torch.int64 and actual.shape is None:
        actual, value = field, float(value)
    if (actual.dtype, actual.shape) != (field.dtype, field.shape):
        raise TypeError(
            f"The state {field.key!r} was {field.describe()} when the pipeline was built and is {actual.describe()} now. "
            f"The dtype and the shape of a node's state never change."
        )
    if field.shape is None:
        return [struct.unpack("<q", struct.pack("<d", value))[0] if field.dtype is torch.float64 else int(value)]
    raw = torch.as_tensor(value, device="cpu").detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return np.frombuffer(raw.ljust(field.num_slots * 8, b"\0"), dtype=np.int64).tolist()


def decode(field: Field, slots: Sequence[int]) -> Any:
    """Return the value that `encode` turned into the given int64 numbers."""
    value = _to_tensor(field, np.array([slots], dtype=np.int64))[0]
    return value.item() if field.shape is None else value


def require_limits(fields: Sequence[Field], rows: Ints, label: str) -> None:
    """Raise ``DataStateError`` if a number lies outside the limits of its field.

    Args:
        fields: The fields of the columns of ``rows``, in their order.
        rows: ``int64[M, slots]``.
        label: The name of a row in messages, with ``{}`` for its number, such as ``"logical shard {}"``.
    """
    for field, slot in zip(fields, slot_offsets(fields), strict=False):
        if field.limits is not None:
            field_values = rows[:, slot].view(np.float64) if field.dtype is torch.float64 else rows[:, slot]
            minimum, maximum = field.limits
            is_within = (field_values >= minimum) & (field_values <= maximum)  # which no NaN is
            if not is_within.all():
                row = int(is_within.argmin())
                raise DataStateError(
                    f"By the state {field.key!r} of {label.format(row)} is {field_values[row]}, and a run comes to "
                    f"{minimum} to {maximum} there: the state was changed or damaged. Load another checkpoint."
                )


def flatten(state: Mapping[str, Any], path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    """Return the leaves of a nested state in order, each with its path."""
    leaves: list[tuple[tuple[str, ...], Any]] = []
    for key, value in state.items():
        leaf_path = (*path, str(key))
        leaves.extend(flatten(value, leaf_path) if isinstance(value, Mapping) else [(leaf_path, value)])
    return leaves


def nest(leaves: Sequence[tuple[tuple[str, ...], Any]]) -> dict[str, Any]:
    """Return the nested state that has the given leaves; the inverse of `flatten`."""
    state: dict[str, Any] = {}
    for path, value in leaves:
        inner_state = state
        for key in path[:-1]:
            inner_state = inner_state.setdefault(key, {})
        inner_state[path[-1]] = value
    return state


def state_of(fields: Sequence[Field], row: memoryview) -> dict[str, Any]:
    """Return the nested state that a row of int64 numbers encodes."""
    pairs = zip(fields, slot_offsets(fields), strict=False)
    return nest([(field.path, decode(field, row[start : start + field.num_slots].tolist())) for field, start in pairs])


def row_of(fields: Sequence[Field], state: Mapping[str, Any], node: str) -> memoryview:
    """Return a nested state as a row of int64 numbers; ``ValueError`` if its paths differ from the fields of the node."""
    leaf_values = dict(flatten(state))
    if leaf_values.keys() != {field.path for field in fields}:
        state_paths = sorted(".".join(path) for path in leaf_values)
        raise ValueError(
            f"{node} was given a state with the fields {state_paths}; its own are {sorted(f.key for f in fields)}. "
            f"Load a state that the same pipeline saved."
        )
    return np.array([slot for field in fields for slot in encode(field, leaf_values[field.path])], dtype=np.int64).data


def slot_offsets(fields: Sequence[Field]) -> list[int]:
    """Return the index, in a row, of the first number of each field, and the length of the row."""
    field_starts = [0]
    for field in fields:
        field_starts.append(field_starts[-1] + field.num_slots)
    return field_starts


@lru_cache(maxsize=64)
def join_fields(
    node_fields: tuple[Field, ...], child_fields: tuple[tuple[str, tuple[Field, ...]], ...]
) -> tuple[tuple[Field, ...], dict[str, slice]]:
    """Return the fields of a node and of its children, and the slice of each child, as the same objects for every shard."""
    slot_counts = [slot_offsets(fields)[-1] for fields in (node_fields, *(fields for _, fields in child_fields))]
    child_slices = zip(child_fields, pairwise(accumulate(slot_counts)), strict=True)
    fields = node_fields + tuple(field.with_parents(name) for name, fields in child_fields for field in fields)
    return fields, {name: slice(*bounds) for (name, _), bounds in child_slices}


def position_slots(fields: Sequence[Field], *, include_epochs: bool = True) -> list[int]:
    """Return the indices of the numbers that identify a stream's position, without counters.

    Without ``include_epochs`` they also leave out epoch numbers.
    """
    are_included = [not f.counts and (include_epochs or f.path[-1] != EPOCH_FIELD) for f in fields]
    field_starts = zip(are_included, fields, slot_offsets(fields), strict=False)
    return [slot for is_included, f, start in field_starts if is_included for slot in range(start, start + f.num_slots)]


def to_tensors(fields: Sequence[Field], table: Ints) -> dict[str, torch.Tensor]:
    """Return the table of positions as a checkpoint holds it: one tensor for each field, a copy with N rows.

    Args:
        fields: The fields of a row, in the order of its slots.
        table: ``int64[N, slots]``.
    """
    return {
        field.key: _to_tensor(field, table[:, start : start + field.num_slots])
        for field, start in zip(fields, slot_offsets(fields), strict=False)
    }


def _to_tensor(field: Field, slots: Ints) -> torch.Tensor:
    if field.shape is not None:
        raw = np.ascontiguousarray(np.array(slots).view(np.uint8)[:, : field.num_bytes])
        return torch.from_numpy(raw).view(field.dtype).reshape(len(slots), *field.shape)
    column = torch.from_numpy(slots[:, 0].copy())
    if field.dtype is torch.bool:
        return column != 0
    return column.view(field.dtype)
