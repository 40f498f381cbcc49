"""What Parquet and Arrow sources share: an index of fragments made from footers, and rows read through the cache."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from rescale_data.sources.arrow_types import ArrowSchema, ArrowTable
from rescale_data.sources.cache import DEFAULT_BYTES, cache, handles, owner_of
from rescale_data.sources.columns import Fragment, NullValueError, check_columns, is_token_list, token_lists
from rescale_data.sources.paths import Paths, find
from rescale_data.sources.source import Tokens
from rescale_data.state import Ints

_OPENING_THREADS = 16
_DAMAGE = (OSError, ValueError, IndexError, pa.ArrowException)


@dataclass(frozen=True)
class Footer:
    """What is known of a file before any of its data is read.

    Args:
        schema: As its rows are read.
        rows: ``int64[F]``, rows of each of its fragments.
        nbytes: ``int64[F]``, about as many bytes as each takes when all columns are decoded.
        detail: Whatever the format needs to read a fragment without the footer; it must pickle.
    """

    schema: ArrowSchema
    rows: Ints
    nbytes: Ints
    detail: Any


class FileSource(ABC):
    """Rows of files that have a schema and fragments. A format says how to read a footer and a fragment."""

    FORMAT: ClassVar[str]
    SUFFIXES: ClassVar[tuple[str, ...]]

    def __init__(
        self,
        paths: Paths,
        *,
        columns: Sequence[str] | None = None,
        cache_bytes: int = DEFAULT_BYTES,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        if cache_bytes < 1:
            raise ValueError(f"cache_bytes={cache_bytes}: give a number of bytes, at least 1.")
        self.cache_bytes = cache_bytes
        self._files = find(paths, self.SUFFIXES, storage_options)
        footers = self._read_footers()
        self._schema = self._one_schema([footer.schema for footer in footers], columns)
        self._details = [footer.detail for footer in footers]
        self._file_rows = [int(footer.rows.sum()) for footer in footers]
        counts = np.concatenate([footer.rows for footer in footers])
        self._file_of = np.repeat(np.arange(len(footers)), [len(footer.rows) for footer in footers])
        self._number_of = np.concatenate([np.arange(len(footer.rows)) for footer in footers])
        self._fragments = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        self.fragment_bytes = (
            int(np.median(np.concatenate([footer.nbytes for footer in footers]))) if len(counts) else 0
        )
        if not self.num_rows:
            raise ValueError(
                f"The {len(footers)} files below {self._files.root} have no rows. Give files that have some."
            )

    @abstractmethod
    def _footer(self, file: int) -> Footer:
        """Read a footer; most errors mean that the file is damaged, and are made to say so."""

    @abstractmethod
    def _open(self, file: int) -> Any:
        """A handle to read fragments of a file from; the process keeps some of them."""

    @abstractmethod
    def _table(self, handle: Any, file: int, number: int, columns: Sequence[str]) -> ArrowTable:
        """Decode columns of the fragment ``number`` of a file."""

    def _release_with(self, decoded: object, handle: Any, file: int, number: int) -> None:
        """Let go of what a fragment takes beyond what was decoded of it, as soon as the latter is gone."""
        del decoded, handle, file, number

    @property
    def name(self) -> str:
        """The folder above all files."""
        return self._files.root.rstrip("/").rpartition("/")[2] or self._files.root

    @property
    def num_rows(self) -> int:
        return int(self._fragments[-1])

    @property
    def fragments(self) -> Ints:
        return self._fragments

    @property
    def columns(self) -> list[str]:
        """The columns of a row, in their order."""
        return list(self._schema.names)

    def manifest(self) -> Mapping[str, Any]:
        files = zip(self._files.names, self._files.sizes, self._file_rows, strict=True)
        return {"format": self.FORMAT, "files": [list(file) for file in files]}

    def locate(self, index: int) -> str:
        file = int(self._file_of[self._fragment_at(index)])
        first = int(self._fragments[np.searchsorted(self._file_of, file)])
        return f"{self._files.path(file)}, row {index - first}"

    def row(self, index: int) -> dict[str, Any]:
        at = self._fragment_at(index)
        fragment = cache().get((owner_of(self), at))
        if fragment is None:
            fragment = Fragment(self._decode(at, self._schema.names))
            self._keep(at, fragment)
        try:
            return fragment.row(index - int(self._fragments[at]))
        except NullValueError:
            raise self._null(index) from None

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
        found = cache().get((owner_of(self), fragment, column))
        if found is None:
            table = self._decode(fragment, [column])
            try:
                found = token_lists(table.column(column))
            except NullValueError as null:
                raise self._null(int(self._fragments[fragment]) + null.row) from None
            self._keep(fragment, found, column)
        return found

    def prepare(self, column: str, fragment: int) -> None:
        del column, fragment  # as a rule there is nothing to gain

    def _fragment_at(self, index: int) -> int:
        return bisect_right(self._fragments.data, index) - 1

    def _keep(self, fragment: int, decoded: Fragment | Tokens, *column: str) -> None:
        self._release_with(
            decoded, self._handle(fragment), int(self._file_of[fragment]), int(self._number_of[fragment])
        )
        cache().register(self)
        cache().put((owner_of(self), fragment, *column), decoded)

    def _decode(self, fragment: int, columns: Sequence[str]) -> ArrowTable:
        file = int(self._file_of[fragment])
        try:
            return self._table(self._handle(fragment), file, int(self._number_of[fragment]), columns)
        except _DAMAGE as error:
            raise self._damaged(file, error) from error

    def _handle(self, fragment: int) -> Any:
        file = int(self._file_of[fragment])
        return handles().make((owner_of(self), file), lambda: self._open(file))

    def _null(self, index: int) -> ValueError:
        return ValueError(
            f"{self.locate(index)}: a list of numbers is null or has a null in it. Fill or drop such rows where the files "
            f"are made, or read the other columns only (columns=...)."
        )

    def _damaged(self, file: int, error: Exception) -> Exception:
        if isinstance(error, FileNotFoundError | PermissionError):
            return error
        return ValueError(
            f"{self._files.path(file)} cannot be read as {self.FORMAT}: {error}. It may be half-written or of another "
            f"format: write it again, or leave it out."
        )

    def _read_footers(self) -> list[Footer]:
        with ThreadPoolExecutor(_OPENING_THREADS) as pool:
            return list(pool.map(self._try_footer, range(len(self._files.names))))

    def _try_footer(self, file: int) -> Footer:
        try:
            return self._footer(file)
        except _DAMAGE as error:
            raise self._damaged(file, error) from error

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
