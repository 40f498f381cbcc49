"""Build NumPy arrays, scalars and dtypes from the records of a pickle, with checked arguments.

NumPy's own constructors believe a pickle: a dtype whose flags deny that its elements are pointers makes pointers of bytes.
Here a dtype is made of its code, or of the names, codes and places of its fields, without objects. An array is made of
exactly the bytes that it needs, and an array of objects of a list of that length.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable
from typing import Any, Literal, cast

import numpy as np

from rescale_data.checkpoint.storage.records import Record, checked, checked_sizes

_DTYPE_CODE_PATTERN = re.compile(r"b1|[iufcmM]\d{1,2}|[SUV]\d{1,9}|O8?")
_TIME_UNIT_PATTERN = re.compile(r"[a-zμ]{1,2}|[YMWD]|generic")
BuildValue = Callable[[Any], Any]


def _build_dtype(build: BuildValue, record: Record) -> np.dtype[Any]:
    dtype_code, dtype_state = record.args[0], (*(record.state or ()), *(None,) * 9)[:9]
    _, order, base_dtype, names, fields, item_size, _, _, unit = dtype_state
    if not (isinstance(dtype_code, str) and _DTYPE_CODE_PATTERN.fullmatch(dtype_code)):
        raise ValueError(f"a dtype of {dtype_code!r}")
    if base_dtype is not None:
        dtype = np.dtype((build(base_dtype[0]), checked_sizes(base_dtype[1])))
    elif names is not None:
        field_specs: list[Any] = [(*cast(Any, fields)[name], None)[:3] for name in names]
        formats, offsets, titles = zip(*field_specs, strict=True)
        field_layout = {"names": names, "formats": [*map(build, formats)], "offsets": offsets, "titles": titles}
        dtype = np.dtype(cast(Any, {**field_layout, "itemsize": item_size}))
    elif dtype_code[0] in "mM" and unit is not None:
        dtype = np.dtype(f"{dtype_code}{_time_unit(build(unit[1]))}")
    else:
        dtype = np.dtype(dtype_code)
    if dtype.hasobject and dtype != np.dtype(object):
        raise ValueError("objects within a structure")
    return dtype.newbyteorder(order) if order in ("<", ">") else dtype


def _time_unit(unit: Any) -> str:
    """Return the unit of a time dtype as text, ``[25s]`` for ``(b"s", 25, 1, 1)``."""
    name, multiple, *_ = unit
    unit_name = name.decode() if isinstance(name, bytes) else name
    if not (_TIME_UNIT_PATTERN.fullmatch(unit_name) and type(multiple) is int):
        raise ValueError(f"the unit {unit!r}")
    return "" if unit_name == "generic" else f"[{multiple}{unit_name}]"


def _build_array(build: BuildValue, record: Record) -> np.ndarray[Any, Any]:
    _, shape, dtype, fortran, data = record.state
    checked_dtype, sizes, order = checked(build(dtype), np.dtype), checked_sizes(shape), "F" if fortran is True else "C"
    if checked_dtype.hasobject:
        if type(data) is not list or len(cast("list[Any]", data)) != math.prod(sizes):
            raise ValueError("an array of objects whose list has another length")
        flat_array = np.empty(len(cast("list[Any]", data)), object)
        for index, item in enumerate(cast("list[Any]", data)):
            flat_array[index] = build(item)
        return np.array(flat_array.reshape(sizes), order=order)
    return _array_from_bytes(sizes, checked_dtype, build(data), order)


def _build_scalar(build: BuildValue, record: Record) -> Any:
    dtype, data = record.args
    checked_dtype = checked(build(dtype), np.dtype)
    if checked_dtype.hasobject:
        raise ValueError("an object in place of a number")
    return _array_from_bytes((), checked_dtype, build(data))[()]


def _array_from_bytes(
    shape: tuple[int, ...], np_dtype: np.dtype[Any], data: Any, order: Literal["C", "F"] = "C"
) -> np.ndarray[Any, Any]:
    """Return an array with exactly the given bytes; raise ``ValueError`` if their number is wrong."""
    content, num_bytes = data.encode("latin1") if isinstance(data, str) else data, math.prod(shape) * np_dtype.itemsize
    if not isinstance(content, bytes) or len(content) != num_bytes:
        raise ValueError(f"{num_bytes} bytes for an array, and other data")
    array: np.ndarray[Any, Any] = np.ndarray(shape, np_dtype, bytearray(content), order=order)
    _refuse_invalid_text(array)
    return array


def _refuse_invalid_text(array: np.ndarray[Any, Any]) -> None:
    """Raise ``ValueError`` if a text in the array has a code point beyond Unicode."""
    for name in array.dtype.names or ():
        _refuse_invalid_text(array[name])
    if array.dtype.kind == "U" and array.dtype.itemsize and array.size:
        code_points = np.ascontiguousarray(array).reshape(-1).view(np.dtype("u4").newbyteorder(array.dtype.byteorder))
        if code_points.max() > sys.maxunicode:
            raise ValueError("text with letters that Unicode does not have")


CONSTRUCTORS: dict[str, Callable[[Any, Record], Any]] = {
    "numpy.dtype": _build_dtype,
    **{f"numpy.{core}.multiarray._reconstruct": _build_array for core in ("core", "_core")},
    **{f"numpy.{core}.multiarray.scalar": _build_scalar for core in ("core", "_core")},
}
