"""`Source`, `TokenSource` and `FiledSource`: rows at rest. Yours may be as short as this:

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

Then ``rescale_data.testing.assert_source(LogLines("log.txt"))`` says whether it keeps the contract, and `Reader` shuffles,
shards, resumes and rescales it. Whoever can do more, such as read many rows at once, overrides a method or an attribute that
has a default.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from rescale_data.sources.decoded.cache import DEFAULT_BYTES
from rescale_data.state import Ints

if TYPE_CHECKING:
    from rescale_data.sources.decoded.pieces import Share

_NARROW = [(dtype, int(np.iinfo(dtype).max)) for dtype in (np.uint8, np.uint16, np.int32)]


class Described(ABC):
    """Data that a node reads, of whatever kind."""

    name: str
    """A short name for logs and counters."""

    @abstractmethod
    def manifest(self) -> Mapping[str, Any]:
        """Return what identifies the data, as JSON values: paths relative to the root, sizes, row counts."""

    def require_saveable(self) -> None:  # noqa: B027
        """Raise `DataStateError` where no state can say how far the data was read."""


class Source(Described):
    """Rows at rest, numbered ``0 .. num_rows - 1`` in file order (files by path), the same on every machine.

    A source holds no position. It pickles with its index and without its data. A subclass has ``name``, ``num_rows``,
    `manifest`, `row` and `locate`; the rest has defaults.

    Example:
        >>> import rescale_data as rd
        >>> source = rd.SyntheticSource(8)
        >>> isinstance(source, rd.Source), source.num_rows, source.locate(3)
        (True, 8, 'synthetic row 3')
    """

    num_rows: int
    fragments: Ints | None = None
    """``int64[F + 1]``, the first row of each fragment (what is decoded at once) and ``num_rows``.

    `None` where any row can be read as cheaply as the next: then a full permutation shuffles it."""
    columns: list[str] | None = None
    """The columns of a row, where some can be chosen; `None` for whatever each row has."""
    cache_bytes: int = DEFAULT_BYTES
    """The byte budget of what this process keeps of all sources."""
    cache_dir_bytes: int = 0
    """The bytes that may lie on a local disk beside what the cache holds."""
    fragment_bytes: int = 0
    """Bytes of the median fragment when it is decoded, as far as is known."""
    batch_rows: int = 1
    """As many rows are worth fetching together."""
    has_texts: ClassVar[bool] = False
    """True if `texts` reads many strings at a time."""

    @abstractmethod
    def row(self, index: int) -> Any:
        """Return one row, ``{column: value}`` of arrays, bytes, strings or numbers: copies that the caller owns.

        A map-style dataset gives its own samples, whatever they are.
        """

    @abstractmethod
    def locate(self, index: int) -> str:
        """Return the place of a row, for messages: ``"part-3.parquet, row 17"``."""

    def rows(self, indices: Sequence[int]) -> Sequence[Any]:
        """Return ``[row(i) for i in indices]``, in one read where many rows cost less than one by one."""
        return [self.row(index) for index in indices]

    def texts(self, column: str, rows: Ints) -> list[str]:
        """Return the strings of a column in some rows, without the rest of these rows. Raises where `row` does."""
        raise NotImplementedError

    def num_tokens(self, column: str | None, fragments: Ints | None = None) -> int | None:
        """Return the number of tokens of a column, in some fragments (``int64[G]``) or all; `None` if only reading tells."""
        del column, fragments
        return None

    @property
    def reads_ahead(self) -> bool:
        """True if `prepare` begins anything."""
        return False

    def prepare(self, column: str | None, fragment: int, share: Share | None = None) -> None:
        """Begin to fetch a fragment that will be needed soon: its rows, the tokens of a column, or the piece of a share.

        It returns at once, and raises nothing.
        """

    def cuts_pay(self, num_shards: int, *, packed: bool) -> bool:
        """True if pieces of fragments are to be kept in place of whole ones.

        Args:
            num_shards: Logical shards that take turns in this process.
            packed: True for one column of tokens, else for rows.
        """
        del num_shards, packed
        return False

    def row_of(self, index: int, share: Share) -> Any:
        """Return `row`, out of the piece of a share; called where `cuts_pay`."""
        del share
        return self.row(index)


@dataclass(frozen=True)
class Tokens:
    """A token column of one fragment: document i is ``values[offsets[i] : offsets[i + 1]]``.

    Args:
        values: In any integer dtype that holds them, whatever that of the rows is.
        first: The row of the fragment at which they begin, where they are a part of it.
    """

    values: npt.NDArray[np.integer[Any]]
    offsets: Ints
    first: int = 0

    @property
    def nbytes(self) -> int:
        return self.offsets.nbytes + self.values.nbytes

    def tight(self) -> Tokens:
        """The same in memory of its own, as the smallest dtype of three that holds all values: what Arrow decodes takes up to
        three times as much, and memory that is new to the process costs more than decoding."""
        bits = int(np.bitwise_or.reduce(self.values))  # no less than any of them, and negative where one is
        fit = (dtype for dtype, most in _NARROW if 0 <= bits <= most)
        return Tokens(self.values.astype(next(fit, self.values.dtype)), self.offsets, self.first)


class TokenSource(Source):
    """A source that can also be read a fragment at a time, without a Python object for a row or a token."""

    decodes_ahead: ClassVar[bool] = False
    """True if a fragment takes so long to decode that another thread begins before it is needed (`decode_ahead`)."""

    @abstractmethod
    def token_dtype(self, column: str) -> np.dtype[Any]:
        """Return the dtype of a column in each row.

        Raises:
            ValueError: There is no such column.
            TypeError: It does not hold lists of integers.
        """

    @abstractmethod
    def tokens(self, column: str, fragment: int) -> Tokens:
        """Return a column of the fragment that begins at row ``fragments[fragment]``; read-only, and it stays as it is."""

    def tokens_of(self, column: str, fragment: int, share: Share) -> Tokens:
        """Return `tokens`, out of the piece of a share; called where `cuts_pay`."""
        del share
        return self.tokens(column, fragment)

    def decode_ahead(self, column: str, fragment: int) -> None:
        """Begin to decode the tokens of a fragment that will be needed soon. It returns at once, and raises nothing."""

    def pass_by(self, column: str, fragment: int) -> None:
        """Note that the tokens of a fragment have been copied: they need not stay, if there is anything else to keep."""


class FiledSource(Source):
    """A source of files, to which others may be added in the course of a run.

    Its manifest has ``"files": [[name, ...], ...]``, and tells nothing of them elsewhere.
    """

    @abstractmethod
    def subset(self, manifest: Mapping[str, Any]) -> Ints:
        """Return ``int64[G]``, the fragments of the files that a manifest names and that are there."""

    def unfold(self, manifest: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return a manifest of now or earlier in full, where it may be folded; `None` where no list of its files is left."""
        return manifest

    @abstractmethod
    def rows_of_file(self, name: str) -> range:
        """Return the rows of a file, by its path or the end of it.

        Raises:
            ValueError: There is no such file, or several.
        """

    @abstractmethod
    def rows_in_file(self, name: str, rows: Ints) -> Ints:
        """Return the numbers over all files of ``rows`` of a file (``int64[n]``, as `locate` has them) that are there.

        Raises:
            ValueError: There is no such file, there are several, or it cannot have such a row.
        """

    @abstractmethod
    def file_row(self, index: int) -> tuple[str, int]:
        """Return the name of a row's file, below the root, and the number of the row in it, as `locate` has them."""
