"""`JsonlSource`: rows of files with one JSON object in each line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from string import whitespace
from typing import Any, ClassVar, cast

import numpy as np

from rescale_data.sources.file_source import FragmentRows
from rescale_data.sources.files.blocks import CODECS
from rescale_data.sources.files.ranges import ArrowBuffer, RangeReader
from rescale_data.sources.fragments import Footer, contiguous_footer
from rescale_data.sources.indexed import FRAGMENT_BYTES, IndexedSource
from rescale_data.sources.source import BadRow, Tokens
from rescale_data.state import Ints

_CHUNK_BYTES = 2**24
_MAX_EMPTY_LINE_BYTES = 8
_NEWLINE = 10
_NUMBER_TYPES = frozenset((int, float))
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_scan_json = cast(Any, json.JSONDecoder()).scan_once


class JsonlSource(IndexedSource):
    """Rows of JSON-lines files: each line is an object, ``{column: value}``; lists of numbers become arrays.

    One of the processes scans each file, once, and an index beside the files keeps the places of its lines. Empty lines are no
    rows.

    Args:
        paths: A glob, a folder (``*.jsonl`` and ``*.ndjson`` below it, also with ``.gz``, ``.zst`` or ``.bz2``), a file, or a
            list; local or any fsspec URL.
        columns: Columns to keep; a row without one of them is an error. Default: all columns that a line has.
        cache_bytes, storage_options, remote, cache_dir, cache_dir_bytes: See `ParquetSource`.
        index_dir: Folder for the index, which all ranks share; default: beside the files. Needed for URLs.
        transcode: Whether the source may write a copy of each compressed file, once, beside the index; rows of the copy can be
            read at random. `False` refuses compressed files.

    Raises:
        FileNotFoundError: ``paths`` stand for no file.
        ValueError: A file is damaged, or there is no row. A line that does not parse raises it when that row is read.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> import rescale_data as rd
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = Path(folder, "rows.jsonl").write_text('{"text": "one"}')
        ...     rd.JsonlSource(folder).row(0)
        {'text': 'one'}
    """

    FORMAT: ClassVar[str] = "jsonl"
    SUFFIXES = tuple(f".{name}{codec_suffix}" for name in ("jsonl", "ndjson") for codec_suffix in ("", *CODECS))

    def locate(self, index: int) -> str:
        file, row = self._index.file_and_row(index)
        empty_lines = self._array(file, "empty")
        return f"{self._files.path(file)}, line {row + 1 + int(np.searchsorted(empty_lines, row, side='right'))}"

    def has_texts(self, column: str) -> bool:
        return True

    def texts(self, column: str, rows: Ints) -> Tokens:
        fragments = np.searchsorted(self._index.starts, rows, side="right") - 1
        indices, fragment_list = (rows - self._index.starts[fragments]).tolist(), fragments.tolist()
        lines = {fragment: cast(_Lines, self._rows(fragment)) for fragment in {*fragment_list}}
        parsed = [parse(lines[fragment].line(number)) for fragment, number in zip(fragment_list, indices, strict=True)]
        texts = [*map(str.encode, (select_columns(row, self.columns)[column] for row in parsed))]
        return Tokens(np.frombuffer(b"".join(texts), dtype=np.uint8), np.cumsum([0, *map(len, texts)]))

    def _scan_file(self, range_reader: RangeReader) -> Footer:
        starts, empty_line_positions = find_lines(range_reader)
        return contiguous_footer(starts, FRAGMENT_BYTES, {}, {"starts": starts, "empty": empty_line_positions})

    def _rows_from_bytes(self, data: ArrowBuffer, fragment: int) -> FragmentRows:
        rows = self._index.rows_in_file(fragment)
        starts = self._array(self._index.file_of(fragment), "starts")[rows.start : rows.stop + 1]
        return _Lines(data, starts - starts[0], self.columns)


class _Lines:
    """The lines of one fragment, each parsed when its row is read."""

    def __init__(self, data: ArrowBuffer, line_offsets: Ints, columns: Sequence[str] | None) -> None:
        self._data, self._line_offsets, self._columns = memoryview(data), line_offsets.data, columns
        self.nbytes: int = data.size

    def row(self, index: int) -> dict[str, Any]:
        values = select_columns(parse(self.line(index)), self._columns)
        return {name: _to_array(value) for name, value in values.items()}

    def line(self, index: int) -> memoryview:
        return self._data[self._line_offsets[index] : self._line_offsets[index + 1]]


def select_columns(row: dict[str, Any], columns: Sequence[str] | None) -> dict[str, Any]:
    """Return the chosen columns of a row, or all of them; raise `BadRow` if one is missing."""
    if columns is None:
        return row
    if missing := [name for name in columns if name not in row]:
        raise BadRow(f"the line has no {missing}; it has {list(row)}. Fix it, or leave such rows out.")
    return {name: row[name] for name in columns}


def parse(line: memoryview) -> dict[str, Any]:
    """Parse the JSON object in a line; raise `BadRow` if the line contains anything else."""
    try:  # takes a third of the time of json.loads, which first detects the encoding
        text = str(line, "utf-8", "surrogatepass")
        value, end = _scan_json(text, 0)
    except (ValueError, StopIteration, RecursionError):
        value, text, end = None, "", 0
    if value is None or text[end:].strip(whitespace):
        value = _parse_slowly(bytes(line).strip())
    if not isinstance(value, dict):
        raise BadRow(f"it is a JSON {type(value).__name__}, not an object. Write each row as {{column: value}}.")
    return value


def _parse_slowly(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:  # RecursionError: lists are nested too deeply
        excerpt = line[:60].decode(errors="replace")
        raise BadRow(f"it is not JSON: {error}. It begins with {excerpt!r}. Fix it, or leave such rows out.") from None


def _to_array(value: Any) -> Any:
    """Return a list of numbers as an int64 or float64 array, and any other value unchanged."""
    if not isinstance(value, list) or not _NUMBER_TYPES.issuperset(map(type, value)):
        return value
    array = np.array(value, dtype=None if value else np.int64)
    expected_kind = "f" if float in map(type, value) else "i"  # a list with integers beyond 64 bits stays a list
    return array if array.dtype.kind == expected_kind else value


def find_lines(reader: RangeReader) -> tuple[Ints, Ints]:
    """Find the byte offsets of the lines in a file, and its empty lines.

    Returns:
        ``int64[R + 1]``, the byte at which each line that is not empty begins, and the end of the file; and for each empty
        line, the number of lines before it that are not empty.
    """
    start_offset = 3 if reader.size and reader.read(0, 3).to_pybytes() == _BYTE_ORDER_MARK else 0
    line_starts = [np.array([start_offset], dtype=np.int64)]
    for offset in range(0, reader.size, _CHUNK_BYTES):
        chunk = np.frombuffer(reader.read(offset, _CHUNK_BYTES), dtype=np.uint8)
        line_starts.append(np.flatnonzero(chunk == _NEWLINE) + (offset + 1))
    bounds = np.concatenate(line_starts)
    if bounds[-1] < reader.size:
        bounds = np.append(bounds, reader.size)
    lengths = np.diff(bounds)
    short = np.flatnonzero(lengths <= _MAX_EMPTY_LINE_BYTES)
    is_empty = [not reader.read(int(bounds[i]), int(lengths[i])).to_pybytes().strip() for i in short.tolist()]
    empty_lines = short[np.array(is_empty, dtype=bool)]
    starts = np.append(np.delete(bounds[:-1], empty_lines), bounds[-1])
    return starts, empty_lines - np.arange(len(empty_lines))
