"""What Parquet and Arrow sources share: one schema, rows of columns, and columns of tokens."""

from __future__ import annotations

import os
import threading
from abc import abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from typing import Any

import pyarrow as pa

from rescale_data.sources.arrow_types import ArrowBuffer, ArrowSchema, ArrowTable
from rescale_data.sources.bad_row import BadRow, NullValueError
from rescale_data.sources.decoded.cache import DEFAULT_BYTES, cache, handles, owner_of
from rescale_data.sources.decoded.columns import Fragment, check_columns, chosen_columns, is_token_list, token_lists
from rescale_data.sources.decoded.pieces import Piece, Share, cut_out
from rescale_data.sources.decoded.spill import spill_in
from rescale_data.sources.file_source import FileSource, Footer
from rescale_data.sources.files.paths import Paths
from rescale_data.sources.files.remote import Remote
from rescale_data.sources.source import Tokens

SPILL_BYTES = 2**36


class TableSource(FileSource):
    """Rows of files that have a schema. A format says how to read a footer and columns of a fragment."""

    def __init__(
        self,
        paths: Paths,
        *,
        columns: Sequence[str] | None = None,
        cache_bytes: int = DEFAULT_BYTES,
        storage_options: Mapping[str, Any] | None = None,
        remote: Remote | None = None,
        spill_dir: str | os.PathLike[str] | None = None,
        spill_bytes: int = SPILL_BYTES,
    ) -> None:
        self._columns = chosen_columns(columns)
        self._spill_dir = None if spill_dir is None else os.path.abspath(os.fspath(spill_dir))
        super().__init__(paths, cache_bytes=cache_bytes, storage_options=storage_options, remote=remote)
        self.spill_bytes = spill_bytes if spill_dir is not None else 0

    @abstractmethod
    def _table(self, handle: Any, file: int, number: int, columns: Sequence[str]) -> ArrowTable:
        """Decode columns of the fragment ``number`` of a file."""

    def _release_with(self, decoded: object, handle: Any, file: int, number: int) -> None:
        """Let go of what a fragment takes beyond what was decoded of it, as soon as the latter is gone."""
        del decoded, handle, file, number

    @property
    def columns(self) -> list[str]:
        """The columns of a row, in their order."""
        return list(self._schema.names)

    def check_tokens(self, column: str) -> None:
        check_columns(self._schema, [column], f"{self.name} (columns={self._schema.names})")
        kind = self._schema.field(column).type
        if not is_token_list(kind):
            raise TypeError(
                f"The column {column!r} of {self.name} is of type {kind}, which is not tokens: those are lists of integers. "
                f"Tokenize it in the pipeline (torchdata.nodes.Mapper over rd.Reader), or name another column of "
                f"{self._schema.names}."
            )

    def tokens(self, column: str, fragment: int) -> Tokens:
        key = self._key(fragment, column)
        return cache().get(key) or self._awaited(key) or self._keep(key, self._load_tokens(column, fragment))

    def _load_tokens(self, column: str, fragment: int) -> Tokens:
        table = self._decode(fragment, [column])
        try:
            found = token_lists(table.column(column))
        except NullValueError as null:
            raise self._bad(int(self._fragments[fragment]) + null.row, null) from None
        self._release(fragment, found)
        return found

    def _fill(self, column: str | None, fragment: int, share: Share | None) -> None:
        if share is not None:
            self._piece(fragment, share, column)
        elif column is not None:
            self._keep(self._key(fragment, column), self._load_tokens(column, fragment))
        else:
            super()._fill(column, fragment, share)

    @property
    def decoding_costs(self) -> bool:
        """Whether a fragment that is needed again costs more than a look at the page cache."""
        return True

    def cuts_pay(self, num_shards: int) -> bool:
        needed = min(num_shards, len(self._fragments) - 1) * self.fragment_bytes
        return self.decoding_costs and num_shards > 1 and needed > self.cache_bytes

    def row_of(self, index: int, share: Share) -> dict[str, Any]:
        at = self._fragment_at(index)
        piece = self._piece(at, share)
        try:
            return piece.rows.row(index - int(self._fragments[at]) - piece.start)
        except BadRow as bad:
            raise self._bad(index, bad) from None

    def tokens_of(self, column: str, fragment: int, share: Share) -> Tokens:
        piece = self._piece(fragment, share, column)
        try:
            return piece.tokens
        except NullValueError as null:
            raise self._bad(int(self._fragments[fragment]) + piece.start + null.row, null) from None

    def _piece(self, fragment: int, share: Share, column: str | None = None) -> Piece:
        """The rows of one shard in a fragment: from the cache, from disk, or cut anew together with those of the others."""
        key = self._key(fragment, column, share)
        found: Piece | None = cache().get(key)
        return found or self._spilled(key, share, fragment) or self._cut(fragment, share, column)

    def _cut(self, fragment: int, share: Share, column: str | None) -> Piece:
        cutting: threading.Lock = handles().make((owner_of(self), "cutting", fragment), threading.Lock)
        with cutting:
            key = self._key(fragment, column, share)
            found = cache().get(key) or self._spilled(key, share, fragment)  # another thread may have been here before
            return found or self._cut_all(fragment, share, column)

    def _cut_all(self, fragment: int, share: Share, column: str | None) -> Piece:
        table = self._decode(fragment, self._schema.names if column is None else [column])
        cache().register(self)
        mine: Piece | None = None
        where = self._key(fragment, column)
        for cut in share.cuts(fragment):
            key = (*where, "piece", cut.key)
            piece = Piece(cut_out(table, cut.start, cut.stop), cut.start, partial(self._spill, key))
            mine = piece if cut.key == share.key else mine
            if cache().get(key) is None:
                cache().put(key, piece)
        if mine is None:
            raise RuntimeError(f"{share.key} reads no row of fragment {fragment}")
        return mine

    def _spill(self, key: Hashable, data: ArrowBuffer) -> None:
        if self._spill_dir is not None:
            spill_in(self._spill_dir, self.spill_bytes).put(key, data)

    def _spilled(self, key: Hashable, share: Share, fragment: int) -> Piece | None:
        data = None if self._spill_dir is None else spill_in(self._spill_dir, self.spill_bytes).get(key)
        if data is None:
            return None
        return Piece(data, share.start(fragment), _stay)

    def _accept(self, footers: Sequence[Footer]) -> None:
        self._schema = self._one_schema([footer.schema for footer in footers], self._columns)

    def _load(self, fragment: int) -> Fragment:
        decoded = Fragment(self._decode(fragment, self._schema.names))
        self._release(fragment, decoded)
        return decoded

    def _release(self, fragment: int, decoded: object) -> None:
        file, number = self._place(fragment)
        self._release_with(decoded, self._handle(file), file, number)

    def _decode(self, fragment: int, columns: Sequence[str]) -> ArrowTable:
        file, number = self._place(fragment)
        with self._blaming(file):
            return self._table(self._handle(file), file, number, columns)

    def _one_schema(self, schemas: Sequence[ArrowSchema], columns: Sequence[str] | None) -> ArrowSchema:
        """The columns that all files have; ``ValueError`` names two files and the field in which they differ."""
        first = schemas[0]
        wanted = list(first.names if columns is None else columns)
        check_columns(first, wanted, self._files.path(0))
        for file, schema in enumerate(schemas):
            if not schema.equals(first) and (field := _difference(first, schema, wanted, columns is None)):
                raise ValueError(
                    f"The files differ in {field!r}: {_type(first, field)} in {self._files.path(0)}, {_type(schema, field)} in "
                    f"{self._files.path(file)}. Give columns=[...] that all files share, or a source for each kind of file."
                )
        return pa.schema([first.field(name) for name in wanted])


def _difference(first: ArrowSchema, other: ArrowSchema, wanted: Sequence[str], whole: bool) -> str | None:
    names = [*wanted, *(name for name in other.names if whole and name not in wanted)]
    return next((name for name in names if _type(first, name) != _type(other, name)), None)


def _type(schema: ArrowSchema, name: str) -> str:
    return str(schema.field(name).type) if name in schema.names else "missing"


def _stay(data: ArrowBuffer) -> None:
    del data  # it is on disk
