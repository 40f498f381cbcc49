"""Decoded columns of one fragment: converts Arrow arrays to NumPy arrays and Python values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as kinds

from rescale_data.errors import require_type
from rescale_data.sources.arrow_types import ArrowArray, ArrowSchema, ArrowTable, ArrowType
from rescale_data.sources.bad_row import BadRow, NullValueError
from rescale_data.sources.source import Tokens
from rescale_data.state import Ints


class Fragment:
    """The decoded columns of one fragment."""

    def __init__(self, table: ArrowTable) -> None:
        self._value_getters = {name: _value_getter(table.column(name)) for name in table.column_names}
        # The first argument of each function is the array that it reads: for lists, with offsets of 8 bytes
        self.nbytes: int = sum(get_value.args[0].nbytes for get_value in self._value_getters.values())

    def row(self, index: int) -> dict[str, Any]:
        return {name: get_value(index) for name, get_value in self._value_getters.items()}

    def texts(self, name: str, rows: Ints) -> list[str]:
        """Return the strings of a column (`is_text`) in some rows; raise `BadRow` if one is null."""
        array: ArrowArray = self._value_getters[name].args[0]
        try:
            texts = array.take(pa.array(rows)).to_pylist()
        except pa.ArrowNotImplementedError:  # of string_view
            texts = [array[row].as_py() for row in rows.tolist()]
        if None in texts:
            raise BadRow(f"{name!r} is not a string in each of these rows.")
        return texts


def _value_getter(column: ArrowArray) -> partial[Any]:
    """Return a function that returns a copy of a column's value in a row, such as an array for a list of numbers."""
    is_list, is_tensor = is_number_list(column.type), isinstance(column.type, pa.FixedShapeTensorType)
    if is_list and (lists := flat_lists(column)) is not None:
        return partial(_flat_value, lists)
    array: ArrowArray = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    return partial(_nullable_value, array, is_tensor) if is_list or is_tensor else partial(_object_value, array)


def _flat_value(lists: Tokens, row: int) -> npt.NDArray[Any]:
    start, stop = lists.offsets[row : row + 2]
    return lists.values[start:stop].copy()


def _nullable_value(array: ArrowArray, is_tensor: bool, row: int) -> npt.NDArray[Any] | None:
    """Return a list or tensor of numbers as an array, or `None`; `NullValueError` if a number in it is null."""
    scalar = array[row]
    if not scalar.is_valid:
        return None
    numbers = scalar.value.values if is_tensor else scalar.values
    if numbers.null_count:
        raise NullValueError(row)
    return np.array(scalar.to_numpy() if is_tensor else numbers.to_numpy(zero_copy_only=False))


def _object_value(array: ArrowArray, row: int) -> Any:
    return array[row].as_py()


def token_lists(array: ArrowArray) -> Tokens:
    """Return a column of lists of integers as flat values and offsets; `NullValueError` with the row of the first null."""
    lists = flat_lists(array)
    if lists is None:
        raise NullValueError(_first_null_row(array))
    return lists


def flat_lists(array: ArrowArray) -> Tokens | None:
    """Return a column of lists of numbers as flat values and offsets; `None` if a list is null or contains a null.

    The values of a single chunk are not copied.
    """
    flat_chunks = [_flatten_chunk(arrow_chunk) for arrow_chunk in array.chunks]
    chunks = [chunk for chunk in flat_chunks if chunk is not None]
    if len(chunks) < len(flat_chunks):
        return None
    if len(chunks) == 1:
        return chunks[0]
    if not chunks:
        return Tokens(np.zeros(0, np.int64), np.zeros(1, np.int64))
    lengths = np.concatenate([np.diff(chunk.offsets) for chunk in chunks])
    return Tokens(np.concatenate([chunk.values for chunk in chunks]), np.concatenate([[0], np.cumsum(lengths)]))


def _flatten_chunk(chunk: Any) -> Tokens | None:
    if kinds.is_fixed_size_list(chunk.type):
        list_size = chunk.type.list_size
        offsets = np.arange(len(chunk) + 1, dtype=np.int64) * list_size
        values = chunk.values[chunk.offset * list_size : (chunk.offset + len(chunk)) * list_size]
    else:
        offsets = chunk.offsets.to_numpy().astype(np.int64)
        values = chunk.values[offsets[0] : offsets[-1]]
        offsets -= offsets[0]
    if chunk.null_count or values.null_count:
        return None
    return Tokens(values.to_numpy(zero_copy_only=False), offsets)


def _first_null_row(array: ArrowArray) -> int:
    return next(i for i, scalar in enumerate(array) if not scalar.is_valid or scalar.values.null_count)


def is_number_list(kind: ArrowType) -> bool:
    return _is_list(kind) and (kinds.is_integer(kind.value_type) or kinds.is_floating(kind.value_type))


def is_token_list(kind: ArrowType) -> bool:
    return _is_list(kind) and kinds.is_integer(kind.value_type)


def is_text(kind: ArrowType) -> bool:
    """True if the values of a type are strings."""
    kind = kind.value_type if kinds.is_dictionary(kind) else kind
    return kinds.is_string(kind) or kinds.is_large_string(kind) or kinds.is_string_view(kind)


def _is_list(kind: ArrowType) -> bool:
    return kinds.is_list(kind) or kinds.is_large_list(kind) or kinds.is_fixed_size_list(kind)


def check_columns(schema: ArrowSchema, columns: Sequence[str], table: str) -> None:
    """Raise ``ValueError`` if a column is missing or occurs more than once in a schema."""
    for column in columns:
        if column not in schema.names:
            raise ValueError(f"{table} has no column {column!r}. It has {', '.join(map(repr, schema.names))}.")
        if len(schema.get_all_field_indices(column)) > 1:
            raise ValueError(f"{table} has several columns {column!r}. Rename them, or give columns=[...] without it.")


def chosen_columns(columns: Sequence[str] | None) -> list[str] | None:
    """Return the argument ``columns`` of a source as a list, or `None` for all; raise an error if it is no list of names."""
    if columns is None:
        return None
    require_type(Iterable, "a list with at least one name", columns=columns)
    column_names: list[object] = [] if isinstance(columns, str) else [*columns]
    if not column_names or not all(isinstance(name, str) for name in column_names):
        raise TypeError(f"columns={columns!r}: give a list with at least one name, or None for all columns.")
    if len({*column_names}) < len(column_names):
        raise ValueError(f"columns={columns!r} has a name twice: give each name once.")
    return list(columns)
