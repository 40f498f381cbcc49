"""`ArrowSource`: rows of Arrow IPC files, some record batches a fragment."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.types as kinds

from rescale_data.sources import ipc
from rescale_data.sources.arrow_types import ArrowBuffer, ArrowSchema, ArrowTable, ArrowType
from rescale_data.sources.decoded.cache import DEFAULT_BYTES, handles, owner_of
from rescale_data.sources.documents import document_table, one_row_each
from rescale_data.sources.file_source import Footer
from rescale_data.sources.files.paths import Files, Paths
from rescale_data.sources.files.ranges import Ranges, open_ranges
from rescale_data.sources.files.remote import Remote
from rescale_data.sources.saved_dataset import data_files
from rescale_data.sources.tables import SPILL_BYTES, TableSource
from rescale_data.state import Ints

FRAGMENT_ROWS = 1024
FRAGMENT_BYTES = 2**24


@dataclass(frozen=True)
class Batches:
    """The record batches of one file, and which of them make a fragment: ``cuts[i] .. cuts[i + 1]``."""

    schema: ArrowSchema
    blocks: ipc.Blocks
    cuts: Ints
    has_footer: bool
    is_compressed: bool

    def part(self, fragment: int) -> ipc.Blocks:
        """The record batches of one fragment."""
        return self.blocks[slice(*self.cuts[fragment : fragment + 2].tolist())]

    @property
    def fragment_bytes(self) -> Ints:
        return np.add.reduceat(self.blocks.body, self.cuts[:-1]) if len(self.blocks) else np.zeros(0, np.int64)


class ArrowSource(TableSource):
    """Rows of Arrow IPC files, of the file format or of the stream format.

    Opening reads the footers and the metadata of the record batches, of several files at a time, and no data. Small batches are
    read together, as many as fit in 1,024 rows and 16 MiB.

    Args:
        paths: A glob, a folder (``*.arrow`` below it), a file, or a list of these; local or any fsspec URL. Files are
            ordered by path. A folder may be what ``save_to_disk`` of Hugging Face ``datasets`` wrote for one split.
        columns: Which to read; default all.
        cache_bytes: What this process may keep decoded, over all sources.
        storage_options: For fsspec.
        remote: How to read files of URLs: retries, a local cache, reading ahead.
        spill_dir: A local folder for what is decoded and does not fit ``cache_bytes``, where this process serves so many
            logical shards that their fragments do not: each is then decoded once an epoch, and not again and again.
        spill_bytes: What this process may write there.
        document_per_batch: Each record batch is one row, and what a column holds in it is the row's value, an array: the
            layout of existing pre-tokenized corpora.

    Raises:
        FileNotFoundError: ``paths`` stand for no file.
        ValueError: A file is damaged or lacks a column, two differ in their columns, or there is no row; the file is named.
    """

    FORMAT: ClassVar[str] = "arrow"
    SUFFIXES: ClassVar[tuple[str, ...]] = (".arrow", ".feather", ".ipc")

    def __init__(
        self,
        paths: Paths,
        *,
        columns: Sequence[str] | None = None,
        cache_bytes: int = DEFAULT_BYTES,
        storage_options: Mapping[str, Any] | None = None,
        remote: Remote | None = None,
        document_per_batch: bool = False,
        spill_dir: str | os.PathLike[str] | None = None,
        spill_bytes: int = SPILL_BYTES,
    ) -> None:
        self.document_per_batch = document_per_batch
        super().__init__(
            paths,
            columns=columns,
            cache_bytes=cache_bytes,
            storage_options=storage_options,
            remote=remote,
            spill_dir=spill_dir,
            spill_bytes=spill_bytes,
        )

    @property
    def decoding_costs(self) -> bool:
        return self._files.filesystem is not None or any(detail.is_compressed for detail in self._details)

    def _find(self, paths: Paths, storage_options: Mapping[str, Any] | None, remote: Remote | None) -> Files:
        return super()._find(data_files(paths, storage_options, remote), storage_options, remote)

    def manifest(self) -> Mapping[str, Any]:
        return {**super().manifest(), "document_per_batch": self.document_per_batch}

    def _footer(self, file: int) -> Footer:
        ranges = open_ranges(self._files, file)
        blocks, has_footer = ipc.read_blocks(ranges), ipc.is_file_format(ranges)
        schema = ipc.read_schema(ranges, blocks)
        _refuse_dictionaries(schema, has_footer)
        rows = np.ones_like(blocks.body) if self.document_per_batch else ipc.read_rows(ranges, blocks)
        detail = Batches(schema, blocks, _cuts(rows, blocks.body), has_footer, ipc.starts_compressed(ranges, blocks))
        rows = np.add.reduceat(rows, detail.cuts[:-1]) if len(rows) else rows
        shown = one_row_each(schema) if self.document_per_batch else schema
        return Footer(rows, detail.fragment_bytes, detail, shown)

    def _open(self, file: int) -> Ranges:
        return open_ranges(self._files, file)

    def _extent(self, file: int, number: int) -> tuple[int, int] | None:
        index: Batches = self._details[file]
        if index.is_compressed or self._needs_reader(index, self._schema.names):
            return None
        return index.part(number).extent

    def _table(self, handle: Any, file: int, number: int, columns: Sequence[str]) -> ArrowTable:
        index = self._details[file]
        if self._needs_reader(index, columns):
            return self._read_columns(handle, file, range(*index.cuts[number : number + 2].tolist()), columns)
        blocks = index.part(number)
        data = self._bytes(file, number, blocks.extent)
        if self.document_per_batch:
            return document_table(data, index.schema, blocks, columns)
        return _read_messages(data, index.schema, blocks).select(list(columns))

    def _release_with(self, decoded: object, handle: Any, file: int, number: int) -> None:
        if self._files.filesystem is not None:
            return  # what was fetched is a copy, and goes with what was decoded of it
        handle.release_with(decoded, handle.read(*self._details[file].part(number).extent))

    def _needs_reader(self, index: Batches, columns: Sequence[str]) -> bool:
        """Whether to read by the footer: to decompress some columns only, or to find dictionaries."""
        some = set(columns) != set(index.schema.names)
        return index.has_footer and not self.document_per_batch and (some or _has_dictionary(index.schema))

    def _read_columns(self, handle: Any, file: int, batches: range, columns: Sequence[str]) -> ArrowTable:
        fields = [self._details[file].schema.get_field_index(name) for name in columns]
        options = pa.ipc.IpcReadOptions(included_fields=fields)
        key = (owner_of(self), file, *fields)
        reader: Any = handles().make(key, lambda: pa.ipc.open_file(handle.whole(), options=options))
        return pa.Table.from_batches([reader.get_batch(i) for i in batches]).select(list(columns))


def _read_messages(data: ArrowBuffer, schema: ArrowSchema, blocks: ipc.Blocks) -> ArrowTable:
    """Whole batches without their file's footer; ``data`` begins with the first of them."""
    places = zip((blocks.offset - blocks.offset[0]).tolist(), (blocks.metadata + blocks.body).tolist(), strict=True)
    messages = [pa.ipc.read_message(data.slice(start, length)) for start, length in places]
    return pa.Table.from_batches([pa.ipc.read_record_batch(message, schema) for message in messages])


def _cuts(rows: Ints, nbytes: Ints) -> Ints:
    """Where fragments begin: as many batches as fit in the rows and bytes of one, and at least one batch."""
    total_rows, total_bytes = (np.concatenate([[0], np.cumsum(counts)]) for counts in (rows, nbytes))
    cuts = [0]
    while cuts[-1] < len(rows):
        at = cuts[-1]
        by_rows = np.searchsorted(total_rows, total_rows[at] + FRAGMENT_ROWS, side="right") - 1
        by_bytes = np.searchsorted(total_bytes, total_bytes[at] + FRAGMENT_BYTES, side="right") - 1
        cuts.append(max(at + 1, int(min(by_rows, by_bytes))))
    return np.array(cuts, dtype=np.int64)


def _has_dictionary(schema: ArrowSchema) -> bool:
    return any(_is_dictionary(field.type) for field in schema)


def _is_dictionary(kind: ArrowType) -> bool:
    return kinds.is_dictionary(kind) or any(_is_dictionary(kind.field(i).type) for i in range(kind.num_fields))


def _refuse_dictionaries(schema: ArrowSchema, has_footer: bool) -> None:
    if not has_footer and _has_dictionary(schema):
        raise ValueError(
            "a stream with dictionaries cannot be read at random; write it in the file format (pa.ipc.new_file)"
        )
