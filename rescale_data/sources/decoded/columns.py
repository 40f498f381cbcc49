"""Decoded columns of one fragment, or of a piece of it: converts Arrow arrays to NumPy arrays and Python values.

A piece holds the rows that one logical shard reads, so that all shards use one decoding of a fragment.

fragment, decoded      | rows of shard 7 | rows of shard 8 | rows of shard 9 |
cut, by copy           [ piece           ] [ piece         ] [ piece         ]   in the cache, and on disk
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as kinds

from rescale_data.errors import require_type
from rescale_data.sources.arrow_types import ArrowArray, ArrowSchema, ArrowTable, ArrowType
from rescale_data.sources.files.ranges import ArrowBuffer
from rescale_data.sources.source import BadRow, Tokens


class NullValueError(BadRow):
    """Error for a list of numbers that is null or contains a null; ``row`` is its row in the fragment."""

    def __init__(self, row: int) -> None:
        super().__init__(
            "a list of numbers is null or has a null in it. Fill or drop such rows where the files are made, read the other "
            "columns only (columns=...), or leave such rows out: rd.Filter(reader, has_tokens) those whose list is null, "
            "rd.Reader(on_error='skip') those with a null in it."
        )
        self.row = row


class Fragment:
    """The decoded columns of one fragment."""

    def __init__(self, table: ArrowTable) -> None:
        self._value_getters = {name: _value_getter(table.column(name)) for name in table.column_names}
        # The first argument of each function is the array that it reads: for lists, with offsets of 8 bytes
        self.nbytes: int = sum(get_value.args[0].nbytes for get_value in self._value_getters.values())

    def row(self, index: int) -> dict[str, Any]:
        return {name: get_value(index) for name, get_value in self._value_getters.items()}


class FragmentPiece:
    """Some rows of a fragment as an Arrow IPC stream, the same bytes in memory and on disk.

    Args:
        stream_bytes: The stream.
        first_row: Row of the fragment at which the piece begins.
    """

    def __init__(self, stream_bytes: ArrowBuffer, first_row: int) -> None:
        self.stream_bytes, self.start = stream_bytes, first_row
        self.nbytes: int = stream_bytes.size

    @cached_property
    def rows(self) -> Fragment:
        return Fragment(self._table())

    @cached_property
    def tokens(self) -> Tokens:
        """The tokens of the piece's only column, decoded on first use."""
        lists = token_lists(self._table().column(0))
        return Tokens(lists.values, lists.offsets, self.start)

    def _table(self) -> ArrowTable:
        return pa.ipc.open_stream(self.stream_bytes).read_all()


def _value_getter(column: ArrowArray) -> partial[Any]:
    """Return a function that returns a copy of a column's value in a row, such as an array for a list of numbers."""
    is_list, is_tensor = is_number_list(column.type), isinstance(column.type, pa.FixedShapeTensorType)
    if is_list and (lists := flat_lists(column)) is not None:
        return partial(Tokens.copy_of, lists)
    array: ArrowArray = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    return partial(_nullable_value, array, is_tensor) if is_list or is_tensor else partial(_object_value, array)


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


def token_lists(column: ArrowArray) -> Tokens:
    """Return a column of lists of integers, or of strings, as flat values and offsets.

    Raises:
        NullValueError: A value is null or contains a null; the error has the row of the first one.
    """
    array = _to_lists(column)
    if (lists := flat_lists(array)) is None:
        raise NullValueError(next(i for i, each in enumerate(array) if not each.is_valid or each.values.null_count))
    return lists


def _to_lists(column: ArrowArray) -> ArrowArray:
    """Return a column of strings as lists of their UTF-8 bytes, and any other column unchanged."""
    return pa.chunked_array(map(_to_byte_lists, column.chunks)) if is_text(column.type) else column


def _to_byte_lists(strings: ArrowArray) -> ArrowArray:
    if not (kinds.is_string(strings.type) or kinds.is_large_string(strings.type)):
        strings = strings.cast(pa.large_string())  # of a dictionary, or string_view
    list_type = (pa.list_ if kinds.is_string(strings.type) else pa.large_list)(pa.uint8())
    validity, offsets, data = strings.buffers()
    values = pa.Array.from_buffers(pa.uint8(), 0 if data is None else data.size, [None, data])
    return pa.Array.from_buffers(list_type, len(strings), [validity, offsets], offset=strings.offset, children=[values])


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


ArrayBytes: TypeAlias = tuple[np.dtype[Any], int, int]
"""The dtype, the length and the first byte of an array of numbers in a buffer, as ``np.frombuffer`` takes them."""


class ListBytes(NamedTuple):
    """The places, in a buffer, of the values and of the offsets of a column of lists or strings without nulls."""

    values: ArrayBytes
    offsets: ArrayBytes

    @staticmethod
    def find(column: ArrowArray, data: ArrowBuffer) -> ListBytes | None:
        """Return the place of a column that Arrow read from ``data`` without a copy; `None` if Arrow copied it."""
        chunk = _to_lists(column).chunk(0) if column.num_chunks == 1 else None
        if chunk is None or kinds.is_fixed_size_list(chunk.type) or chunk.null_count or chunk.values.null_count:
            return None
        values = _array_place(chunk.values.to_numpy(zero_copy_only=False), data)
        offsets = _array_place(chunk.offsets.to_numpy(), data)
        return None if values is None or offsets is None else ListBytes(values, offsets)

    def tokens(self, data: ArrowBuffer) -> Tokens:
        """Return the column's tokens from the bytes of a fragment, values not copied; ``ValueError`` if bytes are missing."""
        offsets = np.frombuffer(data, *self.offsets).astype(np.int64)
        start, stop = int(offsets[0]), int(offsets[-1])
        offsets -= start
        return Tokens(np.frombuffer(data, *self.values)[start:stop], offsets)


def _array_place(array: npt.NDArray[Any], data: ArrowBuffer) -> ArrayBytes | None:
    """Return the place of an array in a buffer; `None` if the array is a copy outside of the buffer."""
    first_byte = array.ctypes.data - data.address
    return (array.dtype, len(array), first_byte) if 0 <= first_byte <= data.size - array.nbytes else None


def copy_as_stream(table: ArrowTable, start: int, stop: int) -> ArrowBuffer:
    """Return some rows of a table as the bytes of an Arrow IPC stream, a copy that does not keep the table in memory."""
    rows = table.slice(start, stop - start).combine_chunks()
    size_counter = pa.MockOutputStream()
    _write(rows, size_counter)
    stream_buffer = pa.allocate_buffer(size_counter.size())  # a growing buffer would keep up to twice as much
    _write(rows, pa.FixedSizeBufferWriter(stream_buffer))
    return stream_buffer


def _write(table: ArrowTable, sink: object) -> None:
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)


def has_type(kind: ArrowType, is_wanted: Callable[[ArrowType], bool]) -> bool:
    """True if a type is, or contains, one for which a function of ``pyarrow.types`` is true."""
    inner = [kind.value_type] if kinds.is_dictionary(kind) else [kind.field(i).type for i in range(kind.num_fields)]
    return is_wanted(kind) or any(has_type(each, is_wanted) for each in inner)


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
