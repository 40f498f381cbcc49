"""`ParquetSource`: rows of Parquet files, a row group a fragment."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pyarrow.parquet as pq

from rescale_data.sources.ahead import ahead
from rescale_data.sources.arrow_types import ArrowFile, ArrowTable
from rescale_data.sources.cache import cache, owner_of
from rescale_data.sources.files import FileSource, Footer
from rescale_data.sources.source import Tokens

_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "FLOAT": 4, "INT64": 8, "DOUBLE": 8, "INT96": 12}


class ParquetSource(FileSource):
    """Rows of Parquet files, ``{column: value}``: arrays for lists of numbers, else Python values.

    Opening reads the footers, several at a time, and nothing else. It pickles with them.

    Args:
        paths: A glob, a folder (``*.parquet`` below it), a file, or a list of these; local or any fsspec URL. Files are
            ordered by path.
        columns: Which to read; default all.
        cache_bytes: What this process may keep decoded, over all sources.
        storage_options: For fsspec.

    Raises:
        FileNotFoundError: ``paths`` stand for no file.
        ValueError: A file is damaged or lacks a column, two differ in their columns, or there is no row; the file is named.
    """

    FORMAT: ClassVar[str] = "parquet"
    SUFFIXES: ClassVar[tuple[str, ...]] = (".parquet", ".parq", ".pq")

    def _footer(self, file: int) -> Footer:
        with self._files.open(file) as handle:
            metadata = pq.read_metadata(handle)
        groups = range(metadata.num_row_groups)
        rows = np.array([metadata.row_group(i).num_rows for i in groups], dtype=np.int64)
        width = _decoded_bytes(metadata.row_group(0)) / max(1, rows[0]) if len(rows) else 0.0
        return Footer(metadata.schema.to_arrow_schema(), rows, (rows * width).astype(np.int64), metadata)

    def _open(self, file: int) -> _Handle:
        return _Handle(pq.ParquetFile(self._files.open(file), metadata=self._details[file]))

    def _table(self, handle: Any, file: int, number: int, columns: Sequence[str]) -> ArrowTable:
        del file
        with handle.lock:
            return handle.file.read_row_group(number, columns=list(columns))

    def tokens(self, column: str, fragment: int) -> Tokens:
        ahead().wait((owner_of(self), fragment, column))
        return super().tokens(column, fragment)

    def prepare(self, column: str, fragment: int) -> None:
        """Decode it in another thread."""
        key = (owner_of(self), fragment, column)
        if cache().get(key) is None:
            ahead().begin(key, partial(super().tokens, column, fragment))


class _Handle:
    """An open file, for one thread at a time."""

    def __init__(self, file: ArrowFile) -> None:
        self.file = file
        self.lock = threading.Lock()


def _decoded_bytes(group: Any) -> int:
    """Dictionaries and runs make the encoded size of numbers smaller than what they take in memory."""
    columns = [group.column(i) for i in range(group.num_columns)]
    return sum(max(c.total_uncompressed_size, c.num_values * _WIDTHS.get(c.physical_type, 0)) for c in columns)
