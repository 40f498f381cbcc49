"""`ParquetSource`: rows of Parquet files, a row group a fragment."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial
from typing import Any, ClassVar
from weakref import ref

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import dataset

from rescale_data.sources.arrow_types import ArrowBuffer, ArrowFile, ArrowTable
from rescale_data.sources.condition import has_floats
from rescale_data.sources.decoded.ahead import ahead
from rescale_data.sources.decoded.cache import cache
from rescale_data.sources.files.ranges import Ranges
from rescale_data.sources.fragments import Footer
from rescale_data.sources.tables import TableSource, schema_kind

_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "FLOAT": 4, "INT64": 8, "DOUBLE": 8, "INT96": 12}
_TAIL = 2**16


class ParquetSource(TableSource):
    """Rows of Parquet files, ``{column: value}``: arrays for lists of numbers, else Python values.

    Opening reads the footers, several at a time, or an index of all of them.

    Args:
        paths: A glob, a folder (``*.parquet`` below it), a file, or a list of these; local or any fsspec URL. Files are
            ordered by path.
        columns: Which to read; default all.
        cache_bytes: What this process may keep decoded, over all sources.
        storage_options: For fsspec.
        remote: How to read files of URLs: time-outs, retries, reading ahead.
        index_dir: Where an index of all files is kept, a folder that all ranks share: the first process that opens the source
            reads the footers, several processes at once share them out, all others map it.
        filter: Which rows to read: an expression over any columns, such as ``pyarrow.compute.field("lang") == "de"``. All
            other rows are as if they were not in the files. It is applied once, to the row groups that it may match, and
            the rows that it matches are kept in an index, in ``index_dir`` or beside the files.
        cache_dir: A local folder, shared by the processes of a machine, for ranges of URLs that were read, and for what is
            decoded and does not fit ``cache_bytes``, where this process serves so many logical shards that their fragments do
            not: each is then decoded once an epoch, and not again and again. Without space there it keeps nothing more.
        cache_dir_bytes: The bound on all that lies there. Entries that were not used for longest go first, and one of more
            than an eighth of it is not kept.

    Raises:
        FileNotFoundError: ``paths`` stand for no file.
        ValueError: A file is damaged or lacks a column, two differ in their columns, or there is no row; the file is named.
            One has changed since the index was made.
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
        local = self._files.filesystem is None
        with self._files.open(file) if local else pa.BufferReader(self._tail(file, soon=False)) as handle:
            metadata = pq.read_metadata(handle)
        groups = np.arange(metadata.num_row_groups)
        rows = np.array([metadata.row_group(i).num_rows for i in groups.tolist()], dtype=np.int64)
        width = _decoded_bytes(metadata.row_group(0)) / max(1, rows[0]) if len(rows) else 0.0
        kind = schema_kind(metadata.schema.to_arrow_schema())
        return Footer(rows, (rows * width).astype(np.int64), {"number": groups}, kind)

    def _may_match(self, footer: Footer, condition: Any, columns: Sequence[str]) -> Iterable[int]:
        """Return the row groups that Arrow keeps by their statistics; all of them for floats, whose bounds leave NaN out."""
        schema = self._file_schema(0).schema
        if any(has_floats(schema.field(name).type) for name in columns):
            return super()._may_match(footer, condition, columns)
        with self._files.open(0) as handle:
            parts = dataset.ParquetFileFormat().make_fragment(handle).split_by_row_group(filter=condition)
        found = {group.id for part in parts for group in part.row_groups}
        return [i for i, number in enumerate(footer.places["number"].tolist()) if number in found]

    def _open(self, file: int) -> _Handle:
        source = ref(self)  # the process keeps the handle, which would keep the source and its cache_bytes for ever

        def tail() -> ArrowBuffer:
            owner = source()
            if owner is None:
                raise ReferenceError("the source of this file is gone")
            return owner._tail(file)

        return _Handle(partial(self._files.open, file), tail)

    def _tail(self, file: int, *, soon: bool = True) -> ArrowBuffer:
        """The footer of a file behind a URL, which the cache keeps when the file is long closed.

        Args:
            soon: Whether the file is about to be read; else it is kept where those of all files take little.
        """
        return self._brought("footer", file, lambda: _tail_of(self._files.ranges(file)), soon=soon)

    def _table(self, fragment: int, columns: Sequence[str]) -> ArrowTable:
        handle: _Handle = self._handle(self._index.file_of(fragment))
        number = self._index.place("number", fragment)
        # Arrow takes the name "a.b" for the field b of a column a, too: select
        if self._files.filesystem is not None:
            return handle.fetch(number, columns).select(columns)
        with handle.lock:  # one column in this thread: another's memory would be another's, new to the process
            found = handle.file.read_row_group(number, columns=list(columns), use_threads=len(columns) > 1)
        return found.select(columns)

    def decode_ahead(self, column: str, fragment: int) -> None:
        key = self._key(fragment, column)
        if not self.reads_ahead and cache().get(key) is None:
            ahead().begin(key, partial(self.tokens, column, fragment))

    def pass_by(self, column: str, fragment: int) -> None:
        cache().give_up(self._key(fragment, column))


class _Handle:
    """A file whose footer is read with its first row group, and kept as long as it is open."""

    def __init__(self, opener: Callable[[], Any], tail: Callable[[], ArrowBuffer]) -> None:
        self._opener, self._tail = opener, tail
        self.lock = threading.RLock()

    @cached_property
    def file(self) -> ArrowFile:
        """For one thread at a time."""
        with self.lock:
            # pre_buffer=True, the default, would keep the bytes of the last row group while it is open
            return self.__dict__.get("file") or pq.ParquetFile(self._opener(), pre_buffer=False)

    @cached_property
    def _metadata(self) -> Any:
        with self.lock:
            return self.__dict__.get("_metadata") or pq.read_metadata(pa.BufferReader(self._tail()))

    def fetch(self, number: int, columns: Sequence[str]) -> ArrowTable:
        """As one request for columns that lie side by side; any number of threads may do so at once."""
        opened = pq.ParquetFile(self._opener(), metadata=self._metadata, pre_buffer=True)
        return opened.read_row_group(number, columns=list(columns), use_threads=False)


def _tail_of(ranges: Ranges) -> ArrowBuffer:
    """The footer of a Parquet file with what follows it: metadata, ``int32`` their length, "PAR1"."""
    tail = ranges.read(max(0, ranges.size - _TAIL), _TAIL)
    length = int.from_bytes(tail[-8:-4], "little") + 8
    if tail.size < length <= ranges.size:
        tail = ranges.read(ranges.size - length, length)
    return pa.py_buffer(tail[max(0, tail.size - length) :].to_pybytes())  # a copy, which holds no more than that


def _decoded_bytes(group: Any) -> int:
    """Dictionaries and runs make the encoded size of numbers smaller than what they take in memory."""
    columns = [group.column(i) for i in range(group.num_columns)]
    return sum(max(c.total_uncompressed_size, c.num_values * _WIDTHS.get(c.physical_type, 0)) for c in columns)
