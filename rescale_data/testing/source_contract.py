"""Checks of the contract of a source, used by `rescale_data.testing.assert_source`."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rescale_data.errors import checks_argument_types
from rescale_data.nodes.reader import Reader
from rescale_data.order import permutation
from rescale_data.shard import Shard
from rescale_data.sources.dataset import DatasetSource
from rescale_data.sources.decoded.cache import cache
from rescale_data.sources.source import Source, TokenSource

_NUM_SHARDS = 3
_MAX_ROWS = 2000


@checks_argument_types
def assert_source(source: Source, *, num_rows: int = 100, columns: Iterable[str] = ()) -> None:
    """Check that a source fulfils the contract of `Source`, on which all pipelines that read it rely.

    Args:
        source: The source to check.
        num_rows: The number of its rows, spread over all of it, that are read several times.
        columns: Token columns, which must be the same a fragment at a time as they are row by row.

    Raises:
        AssertionError: It breaks its contract; the message says how.

    Example:
        >>> import rescale_data as rd
        >>> from rescale_data import testing
        >>> testing.assert_source(rd.SyntheticSource(100, length=4), columns=["tokens"])  # raises if it breaks its contract
    """
    missing_attributes = [name for name in ("name", "num_rows") if not hasattr(source, name)]
    if missing_attributes or not isinstance(source, Source):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise AssertionError(
            f"A {type(source).__name__} is no source: it is no subclass of rd.Source, or lacks {missing_attributes}"
        )
    _check_attributes(source)
    rows = sorted({int(i) for i in np.linspace(0, source.num_rows - 1, num_rows)})
    read_rows = {index: copy.deepcopy(source.row(index)) for index in rows}
    _check_repeated_reads(source, read_rows)
    _check_pickles(source, read_rows)
    _check_locations(source, rows)
    for column in columns:
        _check_tokens(source, column, read_rows)
    if source.num_rows <= _MAX_ROWS:
        _check_readers(source)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)


def _check_attributes(source: Source) -> None:
    _require(type(source.num_rows) is int and source.num_rows > 0, f"num_rows is {source.num_rows!r}: an int above 0")
    _require(isinstance(source.name, str) and bool(source.name), f"name is {source.name!r}: a short text")  # pyright: ignore[reportUnnecessaryIsInstance]
    fragments = source.fragments
    if fragments is not None:
        are_offsets = isinstance(fragments, np.ndarray) and fragments.dtype == np.int64 and len(fragments) >= 2  # pyright: ignore[reportUnnecessaryIsInstance]
        _require(are_offsets, "fragments is None, or int64[F + 1]")
        spans_all_rows = int(fragments[0]) == 0 and int(fragments[-1]) == source.num_rows
        _require(spans_all_rows and bool((np.diff(fragments) >= 0).all()), "fragments go up from 0 to num_rows")
    try:
        json_text = json.dumps(dict(source.manifest()), sort_keys=True)
    except TypeError as error:
        raise AssertionError(f"manifest() holds JSON values: {error}") from error
    _require(json_text == json.dumps(dict(source.manifest()), sort_keys=True), "manifest() is the same at every call")


def _check_repeated_reads(source: Source, read_rows: Mapping[int, Any]) -> None:
    """Check that rows depend neither on the order of reads nor on changes that a caller makes to them."""
    indices = np.array(list(read_rows))
    for seed in range(2):
        for index in indices[permutation(len(indices), "contract", seed)].tolist():
            row = source.row(index)
            _require(rows_equal(row, read_rows[index]), f"row({index}) is {row!r} now and was {read_rows[index]!r}")
            if not isinstance(source, DatasetSource):
                _overwrite(row)
        cache().clear()


def _check_pickles(source: Source, read_rows: Mapping[int, Any]) -> None:
    try:
        unpickled: Source = pickle.loads(pickle.dumps(source))
    except Exception as error:
        raise AssertionError(f"a source pickles, so that worker processes can have it: {error}") from error
    _require(dict(unpickled.manifest()) == dict(source.manifest()), "its manifest() is another after pickling")
    index = next(reversed(read_rows))
    _require(rows_equal(unpickled.row(index), read_rows[index]), f"row({index}) is another after pickling")


def _check_locations(source: Source, rows: list[int]) -> None:
    locations = [source.locate(index) for index in rows]
    _require(len(set(locations)) == len(locations), "locate() says the same of two rows")


def _check_tokens(source: Source, column: str, read_rows: Mapping[int, Any]) -> None:
    if not isinstance(source, TokenSource) or source.fragments is None:
        raise AssertionError(f"it has no tokens(column, fragment) to read {column!r} with")
    dtype = source.token_dtype(column)
    for index, row in read_rows.items():
        fragment = int(np.searchsorted(source.fragments, index, side="right")) - 1
        tokens, row_in_fragment = source.tokens(column, fragment), index - int(source.fragments[fragment])
        row_tokens = tokens.values[tokens.offsets[row_in_fragment] : tokens.offsets[row_in_fragment + 1]]
        is_equal = row_tokens.tolist() == row[column].tolist()
        _require(is_equal, f"tokens({column!r}, {fragment}) are not those of row({index})")
        _require(
            row[column].dtype == dtype, f"token_dtype({column!r}) is {dtype}, row({index}) has {row[column].dtype}"
        )


def _check_readers(source: Source) -> None:
    readers = [Reader(source, Shard(i, _NUM_SHARDS)) for i in range(_NUM_SHARDS)]
    num_drawn = sum(1 for reader in readers for _ in reader)
    _require(num_drawn == source.num_rows, f"{_NUM_SHARDS} readers drew {num_drawn} rows of {source.num_rows}")


def _overwrite(row: Any) -> None:
    """Overwrite the values of a row in place, as any caller may do."""
    for value in row.values() if isinstance(row, dict) else ():
        if isinstance(value, np.ndarray) and value.flags.writeable and value.dtype.kind in "iuf":
            value[...] = 0
        elif isinstance(value, torch.Tensor):
            value.zero_()
    if isinstance(row, dict):
        row.clear()


def rows_equal(a: Any, b: Any) -> bool:
    """True if two rows are equal, arrays included."""
    if isinstance(a, np.ndarray | torch.Tensor) or isinstance(b, np.ndarray | torch.Tensor):
        return type(a) is type(b) and a.dtype == b.dtype and _equal_arrays(np.asarray(a), np.asarray(b))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return list(a) == list(b) and all(rows_equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(rows_equal(x, y) for x, y in zip(a, b, strict=True))
    return bool(type(a) is type(b) and (a == b or (a != a and b != b)))


def _equal_arrays(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> bool:
    return np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
