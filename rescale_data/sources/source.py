"""`Source`, `TokenSource` and `FiledSource`: base classes for data that is read by row number.

A source of your own may be as short as this:

    class LogLines(rd.Source):
        '''The lines of one log file.'''

        name = "log"

        def __init__(self, path: str) -> None:
            self.path, lines = path, Path(path).read_bytes().split(b"\\n")
            self.ends = np.cumsum([len(line) + 1 for line in lines])
            self.num_rows = len(lines)

        def manifest(self):
            return {"format": "log", "rows": self.num_rows, "bytes": int(self.ends[-1])}

        def row(self, index):
            start = int(self.ends[index - 1]) if index else 0
            with open(self.path, "rb") as file:
                file.seek(start)
                return {"line": file.read(int(self.ends[index]) - start - 1).decode()}

        def locate(self, index):
            return f"{self.path}, line {index + 1}"

Then ``rescale_data.testing.assert_source(LogLines("log.txt"))`` checks that it keeps the contract, and `Reader` shuffles,
shards, resumes and rescales it. A source that can do more, such as read many rows at once, overrides the methods and attributes
that have defaults.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from rescale_data.sources.decoded.cache import DEFAULT_CACHE_BYTES
from rescale_data.state import Ints

_NARROW_DTYPES = [(dtype, int(np.iinfo(dtype).max)) for dtype in (np.uint8, np.uint16, np.int32)]


class BadRow(ValueError):
    """Error of a single row. Its message has the problem and the remedy; the source adds the file and the number of the row."""


class RowRange(NamedTuple):
    """Rows ``start .. stop - 1`` of a fragment that one logical shard reads, and the key of that shard's `RowRanges`."""

    shard_key: Hashable
    start: int
    stop: int


class RowRanges(Protocol):
    """The pieces of fragments that one logical shard reads in one epoch."""

    @property
    def shard_key(self) -> Hashable: ...

    def served_row_ranges(self, fragment: int) -> Sequence[RowRange]:
        """Return the row ranges of a fragment that all shards of this process read, this shard included."""
        ...

    def own_row_range(self, fragment: int) -> RowRange:
        """Return the row range of a fragment that this shard reads."""
        ...


class BaseSource(ABC):
    """Data that a node reads: a `Source` of rows, or the streams of an `IterableSource`."""

    name: str
    """Short name for logs and counters."""

    @abstractmethod
    def manifest(self) -> Mapping[str, Any]:
        """Return JSON values that identify the data: paths below the root, sizes, row counts."""

    def require_saveable(self) -> None:  # noqa: B027
        """Raise `DataStateError` if the position in this data cannot be saved."""


class Source(BaseSource):
    """Rows with random access, numbered ``0 .. num_rows - 1`` in the order of their files' paths, the same on every machine.

    A source holds no position. It pickles with its index and without its data. A subclass defines ``name``, ``num_rows``,
    `manifest`, `row` and `locate`. All other members have defaults.

    Example:
        >>> import rescale_data as rd
        >>> source = rd.SyntheticSource(8)
        >>> isinstance(source, rd.Source), source.num_rows, source.locate(3)
        (True, 8, 'synthetic row 3')
    """

    num_rows: int
    fragments: Ints | None = None
    """``int64[F + 1]``: the first row of each fragment, and ``num_rows``. The rows of a fragment are decoded together.

    `None` if any row can be read as cheaply as the next: then a full permutation shuffles the rows."""
    columns: Sequence[str] | None = None
    """Names of the columns that are read, if the source can choose; `None` if each row has columns of its own."""
    cache_bytes: int = DEFAULT_CACHE_BYTES
    """Byte budget of the cache of a rank, which all its sources share, and all its processes in equal parts."""
    disk_bytes: int = 0
    """Byte budget of a folder on a local disk, used in addition to the cache; 0 if there is none."""
    fragment_bytes: int = 0
    """Decoded bytes of a typical fragment; 0 if not known."""
    batch_rows: int = 1
    """Number of rows that are best fetched together."""
    faults: ClassVar[tuple[type[Exception], ...]] = ()
    """Errors that come from a disk or a network and not from the row that is read: ``on_error="skip"`` raises them."""
    reads_ahead: bool = False
    """True if `prefetch` fetches fragments in the background."""

    @abstractmethod
    def row(self, index: int) -> Any:
        """Return one row, ``{column: value}``; its arrays, bytes, strings or numbers are copies that the caller owns.

        A map-style dataset returns its own samples, of any kind.
        """

    @abstractmethod
    def locate(self, index: int) -> str:
        """Return a description of the place of a row, for messages: ``"part-3.parquet, row 17"``."""

    def rows(self, indices: Sequence[int]) -> Sequence[Any]:
        """Return ``[row(i) for i in indices]``, in one read if that costs less than reading row by row."""
        return [self.row(index) for index in indices]

    def has_texts(self, column: str) -> bool:
        """True if the strings of a column can be read many at a time: as the tokens of a `TokenSource`, else by `texts`."""
        return False

    def texts(self, column: str, rows: Ints) -> Tokens:
        """Return the UTF-8 bytes of a column's strings in the given rows, ``int64[n]``. Raises if one of them is no string."""
        raise NotImplementedError

    def num_tokens(self, column: str | None, fragments: Ints | None = None) -> int | None:
        """Return the number of tokens in a column; `None` if they must be read to be counted.

        Args:
            column: The column; `None` if the source has one.
            fragments: ``int64[G]``, the fragments to count; `None` for all.
        """
        return None

    def prefetch(self, column: str | None, fragment: int, share: RowRanges | None = None) -> None:
        """Start to fetch a fragment that will be needed soon; return at once, and raise nothing.

        Args:
            column: The column of tokens to fetch; `None` for rows.
            fragment: Number of the fragment.
            share: Fetch the piece of this share; `None` for the whole fragment.
        """

    def should_cache_pieces(self, num_shards: int, *, packed: bool) -> bool:
        """True if the cache should keep the pieces of fragments that each logical shard reads, in place of whole fragments.

        Args:
            num_shards: Number of logical shards that take turns in this process.
            packed: True if one column of tokens is read; False if rows are.
        """
        return False

    def row_of(self, index: int, share: RowRanges) -> Any:
        """Return the same row as `row` does, read from the piece of the fragment that one logical shard keeps.

        Called only if `should_cache_pieces`.
        """
        return self.row(index)


@dataclass(frozen=True)
class Tokens:
    """A token column of one fragment: document i is ``values[offsets[i] : offsets[i + 1]]``.

    Args:
        values: Tokens of all documents, in any integer dtype that holds them; it may differ from the dtype of the rows.
        offsets: ``int64[D + 1]``, where each document begins in ``values``, and where the last one ends.
        first_row: Row of the fragment at which document 0 is; above 0 only in a piece of a fragment.
    """

    values: npt.NDArray[np.integer[Any]]
    offsets: Ints
    first_row: int = 0

    @property
    def nbytes(self) -> int:
        return self.offsets.nbytes + self.values.nbytes

    def copy_of(self, document: int) -> npt.NDArray[np.integer[Any]]:
        """Return a copy of the tokens of one document."""
        start, stop = self.offsets[document : document + 2]
        return self.values[start:stop].copy()

    def with_narrow_dtype(self) -> Tokens:
        """Return a copy with values in the smallest of uint8, uint16 and int32 that holds them all; else in the present dtype.

        The memory that Arrow decodes into is up to three times as large, and memory that is new to the process costs more time
        than decoding.
        """
        all_bits = int(np.bitwise_or.reduce(self.values))  # at least as large as each value; negative if any value is
        fitting_dtypes = (dtype for dtype, max_value in _NARROW_DTYPES if 0 <= all_bits <= max_value)
        return Tokens(self.values.astype(next(fitting_dtypes, self.values.dtype)), self.offsets, self.first_row)


class TokenSource(Source):
    """Source whose token columns can be read as arrays, a fragment at a time, without a Python object for each row.

    A column of strings (`has_texts`) is read in the same way, as the UTF-8 bytes of its strings.
    """

    decodes_ahead: ClassVar[bool] = False
    """True if decoding a fragment takes so long that another thread should begin it before it is needed (`decode_ahead`)."""

    @abstractmethod
    def token_dtype(self, column: str) -> np.dtype[Any]:
        """Return the dtype of a token column in the rows of the source.

        Raises:
            ValueError: There is no such column.
            TypeError: The column does not hold lists of integers.
        """

    @abstractmethod
    def tokens(self, column: str, fragment: int) -> Tokens:
        """Return a token column of fragment number ``fragment``; the caller must not change its arrays."""

    def tokens_of(self, column: str, fragment: int, share: RowRanges) -> Tokens:
        """Return the tokens in the piece of a fragment that one logical shard reads. Called only if `should_cache_pieces`."""
        return self.tokens(column, fragment)

    def decode_ahead(self, column: str, fragment: int) -> None:
        """Start to decode the tokens of a fragment that will be needed soon; return at once, and raise nothing."""

    def release_tokens(self, column: str, fragment: int) -> None:
        """Allow the cache to evict the tokens of a fragment before anything else, because they have been copied."""


class FiledSource(Source):
    """Source that reads files, to which more files may be added in the course of a run.

    Its manifest describes the files under ``"files": [[name, ...], ...]`` and nowhere else. A folded manifest describes folders
    instead, see `file_manifest`.
    """

    @abstractmethod
    def subset(self, manifest: Mapping[str, Any]) -> Ints:
        """Return ``int64[G]``, the fragments of the files that a manifest lists, as far as the source still has them."""

    def file_manifest(self, manifest: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return a manifest with its list of files; `None` if it holds digests of folders instead, and the list is lost."""
        return manifest

    @abstractmethod
    def rows_of_file(self, name: str) -> range:
        """Return the range of the source's rows that come from one file, given its path or the end of its path.

        Raises:
            ValueError: There is no such file, or there are several.
        """

    @abstractmethod
    def rows_in_file(self, name: str, rows: Ints) -> Ints:
        """Return the source's row numbers for some rows of a file, without the rows that a filter left out.

        Args:
            name: Name of the file below the root, as in `file_row`, its absolute path or its URL; not the end of a path, which
                may become the name of a file that joins.
            rows: ``int64[n]``, rows of the file, numbered as in `file_row`.

        Raises:
            ValueError: There is no such file, or it cannot have such a row.
        """

    @abstractmethod
    def file_row(self, index: int) -> tuple[str, int]:
        """Return the name, below the root, of the file that holds a row, and the row's number in that file, from 0.

        Rows of the file that a filter left out count, too.
        """
