"""`ParquetSource`: rows of Parquet files; each row group is a fragment."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.types as kinds
from pyarrow import dataset

from rescale_data.sources.arrow_types import ArrowTable
from rescale_data.sources.decoded.ahead import decode_runner
from rescale_data.sources.decoded.cache import cache
from rescale_data.sources.decoded.columns import has_type
from rescale_data.sources.files.ranges import ArrowBuffer, RangeReader
from rescale_data.sources.fragments import Footer
from rescale_data.sources.tables import TableSource, schema_to_json

_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "FLOAT": 4, "INT64": 8, "DOUBLE": 8, "INT96": 12}
_TAIL_BYTES = 2**16


class ParquetSource(TableSource):
    """Rows of Parquet files, ``{column: value}``: arrays for lists of numbers, else Python values.

    Opening the source reads the footers, several at a time, or an index of all footers.

    Args:
        paths: A glob, a folder (``*.parquet`` below it), a file, or a list of these; local or any fsspec URL. Files are
            ordered by path.
        columns: Columns to read; default: all.
        cache_bytes: Bytes of decoded data that a rank may keep in memory, over all sources. Its process and its worker
            processes have equal parts of them.
        storage_options: Arguments of the fsspec filesystem.
        remote: Options for files behind URLs: time-outs, retries, reading ahead.
        index_dir: Folder for an index of all files, which all ranks share. The first process that opens the source reads the
            footers; processes that open it at the same time share this work; all others map the index.
        filter: Expression that chooses the rows to read, over any columns, such as ``pyarrow.compute.field("lang") == "de"``.
            All other rows are as if they were not in the files. The filter is applied once, to the row groups in which rows may
            match; an index, in ``index_dir`` or beside the files, keeps the rows that match.
        cache_dir: Folder on a local disk, which the processes of a machine share. It keeps ranges that were read from URLs, and
            blocks of compressed files (``.jsonl.gz``), decompressed. If the fragments of the logical shards of this process do
            not fit ``cache_bytes``, it keeps decoded pieces of them, too: each fragment is then decoded once an epoch instead
            of at each visit. If the disk is full, nothing more is kept.
        cache_dir_bytes: Bytes that ``cache_dir`` may hold. The entries that were not used for longest are deleted first. An
            entry of more than an eighth of these bytes is not kept.

    Raises:
        FileNotFoundError: ``paths`` stand for no file.
        ValueError: A file is damaged or lacks a column, two files differ in their columns, or there is no row. The message
            names the file. A local file whose size has changed since the source was opened raises it when it is read.
        DataStateError: No row matches the filter.

    Example:
        >>> import tempfile
        >>> import pyarrow as pa
        >>> from pyarrow import parquet
        >>> import rescale_data as rd
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     parquet.write_table(pa.table({"text": ["one", "two"]}), f"{folder}/rows.parquet")
        ...     rd.ParquetSource(folder).row(1)
        {'text': 'two'}
    """

    FORMAT: ClassVar[str] = "parquet"
    decodes_ahead: ClassVar[bool] = True
    SUFFIXES: ClassVar[tuple[str, ...]] = (".parquet", ".parq", ".pq")

    def _footer(self, file: int) -> Footer:
        is_local = self._files.filesystem is None
        handle = self._files.open(file) if is_local else pa.BufferReader(self._footer_bytes(file, read_soon=False))
        with handle:
            metadata = pq.read_metadata(handle)
        group_indices = np.arange(metadata.num_row_groups)
        row_counts = np.array([metadata.row_group(i).num_rows for i in group_indices.tolist()], dtype=np.int64)
        bytes_per_row = _decoded_bytes(metadata.row_group(0)) / max(1, row_counts[0]) if len(row_counts) else 0.0
        kind = schema_to_json(metadata.schema.to_arrow_schema())
        return Footer(row_counts, (row_counts * bytes_per_row).astype(np.int64), {"number": group_indices}, kind)

    def _candidate_fragments(self, footer: Footer, condition: Any, columns: Sequence[str]) -> Iterable[int]:
        """Return the row groups in which rows may match by their statistics; all for floats, whose bounds ignore NaN."""
        schema = self._file_schema(0)
        if any(has_type(schema.field(name).type, kinds.is_floating) for name in columns):
            return super()._candidate_fragments(footer, condition, columns)
        with self._files.open(0) as handle:
            row_groups = dataset.ParquetFileFormat().make_fragment(handle).split_by_row_group(filter=condition)
        group_ids = {group.id for fragment in row_groups for group in fragment.row_groups}
        return [i for i, group_id in enumerate(footer.locations["number"].tolist()) if group_id in group_ids]

    def _needs_decoding(self, fragment: int) -> bool:
        return True

    def _open(self, file: int) -> Any:
        if self._files.filesystem is not None:
            return pq.read_metadata(pa.BufferReader(self._footer_bytes(file)))
        # pre_buffer=True, the default, would keep the bytes of the last row group while it is open
        return pq.ParquetFile(self._files.open(file), pre_buffer=False), threading.Lock()

    def _read_footer_bytes(self, file: int) -> ArrowBuffer:
        return _read_tail(self._files.reader_of(file))

    def _table(self, fragment: int, columns: Sequence[str]) -> ArrowTable:
        file, group_index = self._index.file_of(fragment), self._index.location("number", fragment)
        handle = self._file_handle(file)
        if self._files.filesystem is None:
            parquet_file, lock = handle  # for one thread at a time
            with lock:  # one column is decoded in this thread: other threads would have to allocate anew
                table = parquet_file.read_row_group(group_index, columns=list(columns), use_threads=len(columns) > 1)
        else:  # one request for adjacent columns, by any number of threads at once
            remote_file = pq.ParquetFile(self._files.open(file), metadata=handle, pre_buffer=True)
            table = remote_file.read_row_group(group_index, columns=list(columns), use_threads=False)
        return table.select(columns)  # Arrow takes the name "a.b" for the field b of a column a, too

    def decode_ahead(self, column: str, fragment: int) -> None:
        key = self._cache_key(fragment, column)
        if self._files.filesystem is None and cache().get(key) is None:
            decode_runner.begin(key, partial(self.tokens, column, fragment))

    def release_tokens(self, column: str, fragment: int) -> None:
        cache().mark_for_eviction(self._cache_key(fragment, column))


def _read_tail(range_reader: RangeReader) -> ArrowBuffer:
    """Return the end of a Parquet file: its metadata, their length as ``int32``, and the mark PAR1."""
    tail = range_reader.read(max(0, range_reader.size - _TAIL_BYTES), _TAIL_BYTES)
    length = int.from_bytes(tail[-8:-4], "little") + 8
    if tail.size < length <= range_reader.size:
        tail = range_reader.read(range_reader.size - length, length)
    return pa.py_buffer(tail[max(0, tail.size - length) :].to_pybytes())  # a copy: a slice would keep all that was read


def _decoded_bytes(row_group: Any) -> int:
    """Return the approximate bytes of a decoded row group; dictionaries and run lengths make numbers smaller in the file."""
    chunks = [row_group.column(i) for i in range(row_group.num_columns)]
    return sum(max(col.total_uncompressed_size, col.num_values * _WIDTHS.get(col.physical_type, 0)) for col in chunks)
