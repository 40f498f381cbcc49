"""`TableSource`: base class of Parquet and Arrow sources, which have one schema, rows of columns, and columns of tokens."""

from __future__ import annotations

import base64
import copy
from abc import abstractmethod
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.types as kinds

from rescale_data.errors import DataStateError, checks_argument_types
from rescale_data.sources.arrow_types import ArrowExpression, ArrowSchema, ArrowTable
from rescale_data.sources.condition import RowFilter, filtered_footer
from rescale_data.sources.counts import READ_BYTES, read_counters
from rescale_data.sources.decoded.cache import cache, cache_share, owner_id
from rescale_data.sources.decoded.cache_demand import bytes_needed, room_for_block
from rescale_data.sources.decoded.columns import (
    Fragment,
    FragmentPiece,
    NullValueError,
    check_columns,
    chosen_columns,
    copy_as_stream,
    has_type,
    is_text,
    is_token_list,
    token_lists,
)
from rescale_data.sources.file_source import FileSource
from rescale_data.sources.files.local_store import LocalStore
from rescale_data.sources.fragments import Footer, join_footers
from rescale_data.sources.source import RowRange, RowRanges, Tokens, TokenSource


@checks_argument_types
@dataclass(eq=False, repr=False, kw_only=True)
class TableSource(FileSource, TokenSource):
    """Base class of sources of files with a schema. A subclass for each format reads footers, and columns of fragments."""

    columns: Sequence[str] | None = None
    filter: ArrowExpression | None = None

    def __post_init__(self) -> None:
        self._condition = None if self.filter is None else RowFilter(self.filter)
        self._must_index, self.columns = self.filter is not None, chosen_columns(self.columns)
        super().__post_init__()

    @abstractmethod
    def _table(self, fragment: int, columns: Sequence[str]) -> ArrowTable:
        """Return some columns of a fragment, decoded, as a table."""

    def _release_pages_with(self, decoded: object, fragment: int) -> None:
        """Free the mapped memory of a fragment when ``decoded``, an object made from it, is garbage-collected."""

    def token_dtype(self, column: str) -> np.dtype[Any]:
        check_columns(self._schema, [column], f"{self.name} (columns={self._schema.names})")
        kind = self._schema.field(column).type
        if not is_token_list(kind):
            raise TypeError(
                f"The column {column!r} of {self.name} is of type {kind}, which is not tokens: those are lists of integers. "
                f"Tokenize it in the pipeline (torchdata.nodes.Mapper over rd.Reader), or name another column of "
                f"{self._schema.names}."
            )
        return np.dtype(kind.value_type.to_pandas_dtype())

    def tokens(self, column: str, fragment: int) -> Tokens:
        key, load_column = self._cache_key(fragment, column), partial(self._load_tokens, column)
        cached: Tokens | None = cache().get(key)
        if cached is not None:
            return cached
        with self._name_row_in_errors(fragment):
            return self._read(key, fragment, load_column, cached=self.decoding_costs or self._may_stay_cached(fragment))

    @contextmanager
    def _name_row_in_errors(self, fragment: int, first_row: int = 0) -> Generator[None]:
        """Make the error for a null value name its row, counted from row ``first_row`` of a fragment."""
        try:
            yield
        except NullValueError as null:
            raise self._bad_row_error(int(self._index.starts[fragment]) + first_row + null.row, null) from None

    def _load_tokens(self, column: str, fragment: int) -> Tokens:
        tokens = token_lists(self._decode(fragment, [column]).column(column))
        self._release_pages_with(tokens, fragment)
        return tokens.with_narrow_dtype() if self.decoding_costs else tokens

    def _fill_cache(self, column: str | None, fragment: int, share: RowRanges | None) -> None:
        if share is not None:
            self._piece(fragment, share, column)
        elif column is not None:
            self._get_or_make(self._cache_key(fragment, column), partial(self._load_tokens, column, fragment))
        else:
            super()._fill_cache(column, fragment, share)

    @property
    def decoding_costs(self) -> bool:
        """True if reading a fragment again means decoding or fetching it again, not only touching memory-mapped pages."""
        return True

    def should_cache_pieces(self, num_shards: int, *, packed: bool) -> bool:
        if not self.decoding_costs or num_shards == 1 or (packed and not self.disk_bytes and room_for_block(self)):
            return False
        needed_bytes, room_bytes = min(num_shards, len(self._index.starts) - 1) * self.fragment_bytes, cache_share(self)
        # with many sources, a shard reads one row of each at a visit: then pieces pay only if a disk keeps them
        return needed_bytes > room_bytes or (self.disk_bytes > 0 and bytes_needed(self, num_shards) > room_bytes)

    def row_of(self, index: int, share: RowRanges) -> dict[str, Any]:
        fragment = self._index.fragment_at(index)
        piece = self._piece(fragment, share)
        return self._row_in(piece.rows, index, int(self._index.starts[fragment]) + piece.start)

    def tokens_of(self, column: str, fragment: int, share: RowRanges) -> Tokens:
        piece = self._piece(fragment, share, column)
        with self._name_row_in_errors(fragment, piece.start):
            return piece.tokens

    def has_texts(self, column: str) -> bool:
        return column in self._schema.names and is_text(self._schema.field(column).type)

    def _piece(self, fragment: int, share: RowRanges, column: str | None = None) -> FragmentPiece:
        """Return one shard's rows of a fragment, from the cache or from disk, or after cutting the fragment for all shards."""
        key = self._cache_key(fragment, column, share)
        cached: FragmentPiece | None = cache().get(key)
        if cached is not None:
            return cached
        # While this thread waits for the lock, another one may cut the fragment
        with self._record_file_reading(fragment), cache().lock_for((owner_id(self), "cutting", fragment)):
            piece = cache().get(key) or self._read_stored(fragment, share, column)
            return piece or self._cut_pieces(fragment, share, column)

    def _cut_pieces(self, fragment: int, share: RowRanges, column: str | None) -> FragmentPiece:
        table = self._decode(fragment, self._schema.names if column is None else [column])
        read_counters().add(READ_BYTES, table.nbytes)
        cache().register(self)
        requested_piece: FragmentPiece | None = None
        base_key, store = self._cache_key(fragment, column), self._local_store(fragment)
        for row_range in share.served_row_ranges(fragment):
            key = (*base_key, "piece", row_range.shard_key)
            piece = FragmentPiece(copy_as_stream(table, row_range.start, row_range.stop), row_range.start)
            requested_piece = piece if row_range.shard_key == share.shard_key else requested_piece
            if store is not None:
                store.put(self._piece_name(fragment, column, row_range), piece.stream_bytes)
            if cache().get(key) is None:
                cache().put(key, piece)
        if requested_piece is None:
            raise RuntimeError(f"{share.shard_key} reads no row of fragment {fragment}")
        return requested_piece

    def _local_store(self, fragment: int) -> LocalStore | None:
        """Return the local store for pieces of a fragment; `None` if there is none, or if nothing shows changes of the file."""
        return self._files.store if self._files.stamps[self._index.file_of(fragment)] else None

    def _read_stored(self, fragment: int, share: RowRanges, column: str | None) -> FragmentPiece | None:
        if (store := self._local_store(fragment)) is None:
            return None
        row_range = share.own_row_range(fragment)
        data = store.get(self._piece_name(fragment, column, row_range))
        return None if data is None else FragmentPiece(data, row_range.start)

    def _piece_name(self, fragment: int, column: str | None, rows: RowRange) -> str:
        """Return the name of a piece in the local store, the same in all processes that read these rows and columns."""
        files, file = self._files, self._index.file_of(fragment)
        file_key = (self.FORMAT, files.path(file), int(files.sizes[file]), files.stamps[file], self._index_arguments())
        columns = self._schema.names if column is None else [column]
        return repr(("piece", file_key, fragment - int(self._index.files[file]), columns, rows.start, rows.stop))

    def _index_arguments(self) -> Mapping[str, Any]:
        return {} if self._condition is None else {"filter": self._condition.identity}

    def _check_files(self) -> None:
        self._schemas = [_schema_of(kind) for kind in self._index.kinds]
        self._schema = self._common_schema(self.columns)
        self.columns = list(self._schema.names)
        if self._condition is not None and not self.num_rows:
            raise DataStateError(
                f"{self.name}: no row of {len(self._files.names)} files below {self._files.root} matches filter="
                f"{self.filter}. Give another filter, or leave the source out."
            )
        super()._check_files()

    def _try_footer(self, file: int) -> Footer:
        footer = super()._try_footer(file)
        return footer if self._condition is None else self._filter_footer(self._condition, file, footer)

    def _filter_footer(self, condition: RowFilter, file: int, footer: Footer) -> Footer:
        """Return a footer, reduced to the rows of the file that match a filter.

        Fragments in which no row can match are not read.
        """
        try:
            used_columns = condition.columns(_schema_of(footer.format_facts))
        except ValueError as error:
            raise ValueError(f"{self._files.path(file)}: {error}") from None
        with self._name_file_in_errors(file):
            clone = copy.copy(self)
            clone._condition, clone._files, clone._index = None, self._files.select([file]), join_footers([footer])
            clone._schemas = [_schema_of(footer.format_facts)]
            fragments = clone._candidate_fragments(footer, condition.expression, used_columns)
            return filtered_footer(footer, {i: condition.matches(clone._table(i, used_columns)) for i in fragments})

    def _candidate_fragments(self, footer: Footer, condition: ArrowExpression, columns: Sequence[str]) -> Iterable[int]:
        """Return the fragments in which rows may match a filter on these columns; the source has one file here."""
        return range(len(footer.row_counts))

    def _load(self, fragment: int) -> Fragment:
        decoded = Fragment(self._decode(fragment, self._schema.names))
        self._release_pages_with(decoded, fragment)
        return decoded

    def _decode(self, fragment: int, columns: Sequence[str]) -> ArrowTable:
        table, chosen = self._table(fragment, columns), self._index.chosen_of(fragment)
        if chosen is None:
            return table
        self._release_pages_with(table, fragment)
        try:
            return table.take(pa.array(chosen))
        except pa.ArrowNotImplementedError:  # of a type such as string_view
            return pa.concat_tables([table.slice(row, 1) for row in chosen.tolist()]).combine_chunks()

    def _file_schema(self, file: int) -> ArrowSchema:
        return self._schemas[int(self._index.kind_of[file])]

    def _common_schema(self, columns: Sequence[str] | None) -> ArrowSchema:
        """Return the common schema of the columns to read; ``ValueError`` names two files and a column that differs in them."""
        expected = self._schemas[0]
        names = list(expected.names if columns is None else columns)
        check_columns(expected, names, self._files.path(0))
        for schema_index, schema in enumerate(self._schemas):
            if not schema.equals(expected) and (field := _differing_column(expected, schema, names, columns is None)):
                other_file = self._files.path(int(np.argmax(self._index.kind_of == schema_index)))
                raise ValueError(
                    f"The files differ in {field!r}: {_column_type(expected, field)} in {self._files.path(0)}, "
                    f"{_column_type(schema, field)} in {other_file}. Give columns=[...] that all files share, or a "
                    f"source for each kind of file."
                )
        return pa.schema([expected.field(name) for name in names])


def has_dictionary(schema: ArrowSchema) -> bool:
    return any(has_type(field.type, kinds.is_dictionary) for field in schema)


def schema_to_json(schema: ArrowSchema) -> dict[str, Any]:
    """Return a schema as a JSON value, without its metadata, such as an index of pandas."""
    return {"schema": base64.b64encode(schema.remove_metadata().serialize()).decode()}


def _schema_of(format_facts: Mapping[str, Any]) -> ArrowSchema:
    return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(format_facts["schema"])))


def _differing_column(expected: ArrowSchema, other: ArrowSchema, columns: Sequence[str], uses_all: bool) -> str | None:
    names = [*columns, *(name for name in other.names if uses_all and name not in columns)]
    return next((name for name in names if _column_type(expected, name) != _column_type(other, name)), None)


def _column_type(schema: ArrowSchema, name: str) -> str:
    return " and ".join(str(schema.field(i).type) for i in schema.get_all_field_indices(name)) or "missing"
