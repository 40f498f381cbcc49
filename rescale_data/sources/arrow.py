"""`ArrowSource`: reads rows of Arrow IPC files; one or several record batches make one fragment."""

from __future__ import annotations

import json
import os
import posixpath
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from rescale_data.sources import ipc
from rescale_data.sources.arrow_types import ArrowArray, ArrowSchema, ArrowTable
from rescale_data.sources.decoded.cache import open_files, owner_id
from rescale_data.sources.decoded.columns import ListBytes
from rescale_data.sources.file_source import OpenFile
from rescale_data.sources.files.paths import Files, Paths, StorageOptions, read_if_exists
from rescale_data.sources.files.ranges import ArrowBuffer
from rescale_data.sources.files.remote import Remote
from rescale_data.sources.fragments import MAX_FRAGMENT_ROWS, Footer, cumulative_sums, group_pieces
from rescale_data.sources.source import Tokens
from rescale_data.sources.tables import TableSource, has_dictionary, schema_to_json

FRAGMENT_BYTES = 2**24
_SPLITS_FILE, _STATE_FILE = "dataset_dict.json", "state.json"


class ArrowSource(TableSource):
    """Rows of Arrow IPC files, in the file format or in the stream format.

    Opening the source reads the footers and the metadata of the record batches, of several files at a time, and no data. Small
    batches are read together: as many as fit in 1,024 rows and 16 MiB.

    Args:
        paths: A glob, a folder (``*.arrow`` below it), a file, or a list of these; local or any fsspec URL. Files are
            ordered by path. A folder may be one that ``save_to_disk`` of Hugging Face ``datasets`` wrote for one split.
        columns: Columns to read; default: all.
        cache_bytes, storage_options, remote, index_dir, filter, cache_dir, cache_dir_bytes: See `ParquetSource`.

    Raises:
        FileNotFoundError: ``paths`` stand for no file.
        ValueError: A file is damaged or lacks a column, two files differ in their columns, or there is no row. The message
            names the file.

    Example:
        >>> import tempfile
        >>> import pyarrow as pa
        >>> import rescale_data as rd
        >>> rows = pa.table({"text": ["one", "two"]})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with pa.ipc.new_file(f"{folder}/rows.arrow", rows.schema) as file:
        ...         file.write(rows)
        ...     rd.ArrowSource(folder).row(1)
        {'text': 'two'}
    """

    FORMAT: ClassVar[str] = "arrow"
    SUFFIXES: ClassVar[tuple[str, ...]] = (".arrow", ".feather", ".ipc")

    @property
    def decoding_costs(self) -> bool:
        return self._files.filesystem is not None or any(kind["is_compressed"] for kind in self._index.kinds)

    @classmethod
    def find_files(cls, paths: Paths, storage_options: StorageOptions = None, remote: Remote | None = None) -> Files:
        return super().find_files(_data_files(paths, storage_options, remote), storage_options, remote)

    def _footer(self, file: int) -> Footer:
        ranges = self._files.reader_of(file)
        blocks, has_footer = ipc.read_blocks(ranges), ipc.is_file_format(ranges)
        schema = ipc.read_schema(ranges, blocks)
        if not has_footer and has_dictionary(schema):
            raise ValueError("a stream with dictionaries cannot be read at random; write a file (pa.ipc.new_file)")
        rows, is_compressed = ipc.read_batch_headers(ranges, blocks)
        stops = ipc.stops_of(blocks)
        # A fragment begins at each batch that does not lie directly behind the one before it
        gaps = None if has_dictionary(schema) else np.flatnonzero(blocks["offset"][1:] != stops[:-1]) + 1
        batch_bounds = group_pieces(
            cumulative_sums(rows), cumulative_sums(blocks["body"]), MAX_FRAGMENT_ROWS, FRAGMENT_BYTES, gaps
        )
        starts, last_batches = batch_bounds[:-1], batch_bounds[1:] - 1
        locations = {"batch": starts, "batches": np.diff(batch_bounds), "offset": blocks["offset"][starts]}
        locations["length"] = stops[last_batches] - locations["offset"]
        rows, nbytes = (np.add.reduceat(nums, starts) if len(nums) else nums for nums in (rows, blocks["body"]))
        format_facts = {**schema_to_json(schema), "has_footer": has_footer, "is_compressed": is_compressed}
        return Footer(rows, nbytes, locations, format_facts)

    def _open(self, file: int) -> OpenFile:
        return OpenFile(self._files.reader_of(file), {})

    def _needs_decoding(self, fragment: int) -> bool:
        file = self._index.file_of(fragment)
        return self._index.facts_of(file)["is_compressed"] or self._needs_reader(file, self._schema.names)

    def _load_tokens(self, column: str, fragment: int) -> Tokens:
        file = self._index.file_of(fragment)
        if self._files.filesystem is not None or self._index.facts_of(file)["is_compressed"]:
            return super()._load_tokens(column, fragment)
        open_file: OpenFile = self._file_handle(file)
        # Places of token columns in fragments, as long as the file is open; `None` if pyarrow must read the column
        places: dict[tuple[str, int], ListBytes | None] = open_file.kept
        data = self._bytes_in_file(fragment)
        if (column, fragment) not in places:
            # pyarrow makes a copy when it reads some columns of a file, and none when it reads all
            names = self._file_schema(file).names
            columns = names if len({*names}) == len(names) else [column]
            places[column, fragment] = ListBytes.find(self._decode(fragment, columns).column(column), data)
        if (place := places[column, fragment]) is None:
            return super()._load_tokens(column, fragment)
        tokens = place.tokens(data)
        open_file.ranges.release_with(tokens, data)
        return tokens

    def _table(self, fragment: int, columns: Sequence[str]) -> ArrowTable:
        """Return columns of a fragment as a table, after full validation.

        Arrow itself does not check that offsets lie within their buffers, and would read beyond them.
        """
        file = self._index.file_of(fragment)
        if self._needs_reader(file, columns):
            first_batch = self._index.location("batch", fragment)
            batches = range(first_batch, first_batch + self._index.location("batches", fragment))
            table = self._read_columns(file, batches, columns)
        else:
            table = _read_messages(self._read_raw_bytes(fragment), self._file_schema(file)).select(list(columns))
        for column in table.columns:
            _as_bytes(column).validate(full=True)
        return table

    def _release_pages_with(self, decoded: object, fragment: int) -> None:
        if self._files.filesystem is not None:
            return  # the fetched bytes are a copy, freed with the decoded columns
        open_file: OpenFile = self._file_handle(self._index.file_of(fragment))
        open_file.ranges.release_with(decoded, self._bytes_in_file(fragment))

    def _needs_reader(self, file: int, columns: Sequence[str]) -> bool:
        """True if columns must be read through the file's footer: to decompress only some of them, or to find dictionaries."""
        schema, has_footer = self._file_schema(file), self._index.facts_of(file)["has_footer"]
        return has_footer and (set(columns) != set(schema.names) or has_dictionary(schema))

    def _read_columns(self, file: int, batches: range, columns: Sequence[str]) -> ArrowTable:
        schema, ranges = self._file_schema(file), self._file_handle(file).ranges
        field_indices = [schema.get_field_index(name) for name in columns]
        read_options = pa.ipc.IpcReadOptions(included_fields=field_indices)
        key = (owner_id(self), file, "reader", *field_indices)
        source_file = ranges.as_arrow()
        reader: Any = open_files().get_or_make(key, lambda: pa.ipc.open_file(source_file, options=read_options))
        return pa.Table.from_batches([reader.get_batch(i) for i in batches]).select(list(columns))


def _data_files(paths: Paths, options: StorageOptions, remote: Remote | None) -> Paths:
    """Return the data files of a saved Hugging Face dataset. Its folder may hold other files, which transformations cached.

    Any other ``paths`` are returned as they are.

    Raises:
        ValueError: The folder holds several splits: give one of them.
    """
    if not isinstance(paths, str | os.PathLike):
        return paths
    folder = os.fspath(paths)
    split_list = read_if_exists(posixpath.join(folder, _SPLITS_FILE), options, remote)
    if split_list is not None:
        splits: list[str] = json.loads(split_list)["splits"]
        raise ValueError(f"{folder} has the splits {splits}. Give one of them, {posixpath.join(folder, splits[0])!r}.")
    dataset_state = read_if_exists(posixpath.join(folder, _STATE_FILE), options, remote)
    if dataset_state is None:
        return paths
    file_names = [item["filename"] for item in json.loads(dataset_state).get("_data_files") or ()]
    return [posixpath.join(folder, name) for name in file_names] or paths


def _read_messages(data: ArrowBuffer, schema: ArrowSchema) -> ArrowTable:
    """Return a table of record batches, decoded from their messages without the footer of the file."""
    messages = [message for message in pa.ipc.MessageReader.open_stream(data) if message.type == "record batch"]
    return pa.Table.from_batches([pa.ipc.read_record_batch(message, schema) for message in messages])


def _as_bytes(column: ArrowArray) -> ArrowArray:
    """Return a column, not copied, with strings as bytes: full validation then accepts strings that are not UTF-8.

    Such a string makes only its own row bad, when that row is read.
    """
    bytes_type = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary()}.get(column.type)
    return column if bytes_type is None else column.cast(bytes_type)
