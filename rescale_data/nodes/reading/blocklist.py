"""`Blocklist`: the rows of one source that a `Reader` leaves out; `find_rows` makes such a list from ids."""

from __future__ import annotations

import hashlib
import logging
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from numbers import Number
from typing import Any, TypeAlias, cast

import numpy as np

from rescale_data.errors import checks_argument_types
from rescale_data.sources.dataset import MapStyle, as_source
from rescale_data.sources.decoded.cache import owner_id
from rescale_data.sources.source import FiledSource, Source
from rescale_data.state import Ints

ExcludedRows: TypeAlias = Mapping[str, Collection[int] | Ints] | Collection[int] | Ints
"""Rows of a source: ``{file: rows in it}`` for a source of files, numbered as in messages; else row numbers."""

_MAX_BLOCKLISTS = 1024
_log = logging.getLogger("rescale_data")


class Blocklist:
    """Rows of a source that a `Reader` leaves out.

    Args:
        source: The source.
        excluded_rows: The rows, see `ExcludedRows`.

    Raises:
        TypeError: ``excluded_rows`` is no collection of ints, or, for a source of files, no mapping.
        ValueError: ``excluded_rows`` has a file or a row that the source does not have.
    """

    def __init__(self, source: Source, excluded_rows: ExcludedRows) -> None:
        self.rows = np.unique(np.concatenate([np.zeros(0, dtype=np.int64), *_to_source_rows(source, excluded_rows)]))
        """``int64[n]``, ascending row numbers over all files of the source."""
        self.digest = _digest(_rows_by_file(source, self.rows))
        """Positive hash of the files and rows. It does not depend on the form of the list, or on files added later."""

    def unblocked_indices(self, rows: Ints) -> memoryview | None:
        """Return the indices of ``rows`` that are not blocked, as int64; `None` for all."""
        unblocked = np.flatnonzero(~np.isin(rows, self.rows))
        return None if len(unblocked) == len(rows) else unblocked.data

    def parameters(self) -> dict[str, Any]:
        return {"rows": len(self.rows), "digest": f"{self.digest:x}"}


@dataclass(frozen=True)
class _CachedBlocklist:
    """A blocklist, the collection that it was made of (so that its id stays valid), and the logical shards that have it."""

    blocklist: Blocklist
    excluded_rows: object
    content: object
    shards: set[int]


_blocklists: dict[tuple[int, int], _CachedBlocklist] = {}
"""Blocklists by id of the collection and the source."""


def blocklist_of(source: Source, excluded_rows: ExcludedRows, shard: int) -> Blocklist:
    """Return the `Blocklist` of a collection; the same object gives the same blocklist for all logical shards.

    A logical shard that asks again belongs to another loader, before which the collection may have been changed in place.
    """
    blocklist_key = (id(excluded_rows), owner_id(source))
    cached = _blocklists.get(blocklist_key)
    if cached is not None and shard in cached.shards:
        cached.shards.clear()
        cached = cached if cached.content == _content(excluded_rows) else None
    if cached is None:
        while len(_blocklists) >= _MAX_BLOCKLISTS:
            _blocklists.pop(next(iter(_blocklists)))
        cached = _CachedBlocklist(Blocklist(source, excluded_rows), excluded_rows, _content(excluded_rows), set())
        _blocklists[blocklist_key] = cached
    cached.shards.add(shard)
    return cached.blocklist


def _content(excluded_rows: Any) -> object:
    """Return a copy of excluded rows, to be compared with a later one."""
    if isinstance(excluded_rows, Mapping):
        return {file: _content(rows) for file, rows in cast("Mapping[Any, Any]", excluded_rows).items()}
    if hasattr(excluded_rows, "__array__"):
        return np.asarray(excluded_rows).tobytes()
    return [*excluded_rows] if isinstance(excluded_rows, Collection) else excluded_rows


@checks_argument_types
def find_rows(source: Source | MapStyle, ids: Collection[Any], column: str = "id") -> dict[str, list[int]] | list[int]:
    """Return the rows whose ``column`` holds one of ``ids``, as JSON values, for ``Reader(exclude=)``.

    Every row is read once, so give a source that reads that column alone. A row that cannot be read or has no such column is
    logged with its place, and is not in the list. Errors of a disk or a network are raised.

    Args:
        source: A source or a map-style dataset.
        ids: Strings or integers.
        column: The column of the ids.

    Returns:
        ``{file: [row in it, ...]}`` for a source of files, else ``[row, ...]``.

    Raises:
        TypeError: ``ids`` is no collection, or no id is of the type of the column's values, so that no row can have it.
        ValueError: No row could be read.

    Example:
        >>> import rescale_data as rd
        >>> source = rd.DatasetSource([{"id": "a"}, {"id": "b"}, {"id": "c"}])
        >>> rd.find_rows(source, ["b", "c"])
        [1, 2]
    """
    source, wanted_ids, num_failed = as_source(source), frozenset(_require_collection("ids", ids)), 0
    rows, rows_by_file, value_types = list[int](), defaultdict[str, list[int]](list), set[type]()
    for row, value in _values_by_row(source, column):
        if isinstance(value, Exception):
            num_failed += 1
            _log.warning("%s cannot be looked up: %s: %s", source.locate(row), type(value).__name__, value)
        else:
            value_types.add(type(value))
            if value in wanted_ids:
                rows.append(row)
    if num_failed == source.num_rows:
        raise ValueError(f"No row of {source.name} can be looked up by its column {column!r}: give one that rows have.")
    kinds, id_kinds = ({_kind(value_type) for value_type in types} for types in (value_types, {*map(type, wanted_ids)}))
    if id_kinds and kinds.isdisjoint(id_kinds):
        raise TypeError(
            f"ids holds values of {', '.join(sorted(id_kinds))}, and the column {column!r} of {source.name} values of "
            f"{', '.join(sorted(kinds))}: no row has such an id. Give ids of the type that the column has."
        )
    if not isinstance(source, FiledSource):
        return rows
    for row in rows:
        file, row_in_file = source.file_row(row)
        rows_by_file[file].append(row_in_file)
    return dict(rows_by_file)


def _kind(value_type: type) -> str:
    """Return the kind of an id type: one name for all numbers, one for all strings, one for all bytes, else the type's own."""
    return next((kind.__name__ for kind in (Number, str, bytes) if issubclass(value_type, kind)), value_type.__name__)


def _values_by_row(source: Source, column: str) -> Iterator[tuple[int, Any]]:
    """Yield each row number with the row's value of a column, or with the error that reading it raised."""
    for row in range(source.num_rows):
        try:
            value = source.row(row)[column]
            hash(value)
        except source.faults:
            raise
        except Exception as error:
            value = error
        yield row, value


def _to_source_rows(source: Source, excluded: ExcludedRows) -> Iterator[Ints]:
    """Yield the row numbers of the source for the excluded rows of each file, or for all of a source without files."""
    if not isinstance(source, FiledSource):
        if isinstance(excluded, Mapping):
            raise TypeError(
                f"exclude= was given a {type(excluded).__name__}, and {source.name} does not name the files of its rows: give "
                f"row numbers, or make it an rd.FiledSource."
            )
        rows = _to_row_numbers("", excluded)
        if len(rows) and not 0 <= rows[0] <= rows[-1] < source.num_rows:
            raise ValueError(
                f"exclude= has rows from {rows[0]} to {rows[-1]}; {source.name} has the rows 0 to {source.num_rows - 1}."
            )
        yield rows
    elif isinstance(excluded, Mapping):
        for file, rows_in_file in cast("Mapping[str, Collection[int]]", excluded).items():
            if not isinstance(file, str):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise TypeError(f"exclude= has the key {file!r}: give the names of files, {{file: rows in it}}.")
            yield source.rows_in_file(file, _to_row_numbers(f" for {file}", rows_in_file))
    elif len(_require_collection("exclude", excluded)):
        raise TypeError(
            f"exclude= was given a {type(excluded).__name__} for {source.name}, whose rows have other numbers when files join. "
            f"Give {{file: rows in it}}, as rd.find_rows returns it."
        )


def _rows_by_file(source: Source, rows: Ints) -> Iterator[tuple[str, Ints]]:
    """Yield ``(file, rows in the file)`` for given rows of a source; a source without files has one empty file name."""
    if not isinstance(source, FiledSource):
        yield "", rows
        return
    while len(rows):
        name, _ = source.file_row(int(rows[0]))
        file_rows = source.rows_of_file(name)
        num_rows = int(np.searchsorted(rows, file_rows.stop))
        yield name, rows[:num_rows] - file_rows.start
        rows = rows[num_rows:]


def _digest(rows_by_file: Iterable[tuple[str, Ints]]) -> int:
    digest = hashlib.blake2b(digest_size=8)
    for name, rows in rows_by_file:
        digest.update(f"{name}\0{len(rows)}\0".encode() + rows.tobytes())
    return int.from_bytes(digest.digest(), "little") >> 1 | 1


def _to_row_numbers(context: str, rows: Any) -> Ints:
    row_numbers = np.asarray([*_require_collection("exclude", rows)])
    if row_numbers.size and (row_numbers.ndim != 1 or row_numbers.dtype.kind not in "iu"):
        raise TypeError(f"exclude= holds values of {row_numbers.dtype}{context}: give row numbers, ints.")
    return np.unique(row_numbers.astype(np.int64))


def _require_collection(argument_name: str, value: Any) -> Any:
    if isinstance(value, str | bytes) or not isinstance(value, Collection):
        raise TypeError(f"{argument_name}={value!r}: give a list, a set or an array.")
    return value
