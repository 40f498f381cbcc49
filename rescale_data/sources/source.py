"""The protocol of a source: rows at rest. Yours may be as short as this:

    class LogLines:
        '''The lines of one log file.'''

        name, fragments = "log", None  # no fragments: any line is read as cheaply as the next

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
shards, resumes and rescales it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from rescale_data.state import Ints

_NARROW = [(dtype, int(np.iinfo(dtype).max)) for dtype in (np.uint8, np.uint16, np.int32)]


class Described(Protocol):
    """Data that a node reads, of whatever kind."""

    @property
    def name(self) -> str:
        """A short name for logs and counters."""
        ...

    def manifest(self) -> Mapping[str, Any]:
        """What identifies the data, as JSON values: paths relative to the root, sizes, row counts."""
        ...


@runtime_checkable
class Saveable(Protocol):
    """Data of which it is not certain that a position in it can be saved."""

    def require_saveable(self) -> None:
        """`DataStateError` where it cannot."""
        ...


@runtime_checkable
class Source(Protocol):
    """Rows at rest, numbered ``0 .. num_rows - 1`` in file order (files by path), the same on every machine.

    A source holds no position. It pickles with its index and without its data.

    Example:
        >>> import rescale_data as rd
        >>> source = rd.SyntheticSource(8)
        >>> isinstance(source, rd.Source), source.num_rows, source.locate(3)
        (True, 8, 'synthetic row 3')
    """

    @property
    def name(self) -> str:
        """A short name for logs and counters."""
        ...

    @property
    def num_rows(self) -> int: ...

    @property
    def fragments(self) -> Ints | None:
        """``int64[F + 1]``, the first row of each fragment (what is decoded at once) and ``num_rows``.

        `None` where any row can be read as cheaply as the next: then a full permutation shuffles it.
        """
        ...

    def manifest(self) -> Mapping[str, Any]:
        """What identifies the data, as JSON values: paths relative to the root, sizes, row counts."""
        ...

    def row(self, index: int) -> Any:
        """One row, ``{column: value}`` of arrays, bytes, strings or numbers: copies that the caller owns.

        A map-style dataset gives its own samples, whatever they are.
        """
        ...

    def locate(self, index: int) -> str:
        """Where a row is, for messages: ``"part-3.parquet, row 17"``."""
        ...


@runtime_checkable
class BatchSource(Source, Protocol):
    """A source of which many rows at once cost less than one by one."""

    @property
    def cache_bytes(self) -> int:
        """The byte budget of what this process keeps of them."""
        ...

    @property
    def batch_rows(self) -> int:
        """As many are worth fetching together."""
        ...

    def rows(self, indices: Sequence[int]) -> Sequence[Any]:
        """What `row` would return for each."""
        ...


@runtime_checkable
class ColumnSource(Source, Protocol):
    """A source of which some columns may be chosen."""

    @property
    def columns(self) -> list[str] | None:
        """Those of a row; `None` for whatever each row has."""
        ...


@runtime_checkable
class GrowingSource(Source, Protocol):
    """A source of files, to which others may be added in the course of a run.

    Its manifest has ``"files": [[name, ...], ...]``, and tells nothing of them elsewhere.
    """

    def subset(self, manifest: Mapping[str, Any]) -> Ints:
        """``int64[G]``, the fragments of the files that a manifest names and that are there."""
        ...


@runtime_checkable
class FiledSource(Source, Protocol):
    """A source of files."""

    def rows_of_file(self, name: str) -> range:
        """The rows of a file, by its path or the end of it; ``ValueError`` where there is none, or several."""
        ...


@runtime_checkable
class CountedSource(Source, Protocol):
    """A source that knows how many tokens it has without reading them."""

    def num_tokens(self, column: str | None, fragments: Ints | None = None) -> int:
        """Of a column, in some fragments (``int64[G]``) or all."""
        ...


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


@runtime_checkable
class TokenSource(Source, Protocol):
    """A source that can also be read a fragment at a time, without a Python object for a row or a token."""

    @property
    def cache_bytes(self) -> int:
        """The byte budget of what this process keeps decoded."""
        ...

    def token_dtype(self, column: str) -> np.dtype[Any]:
        """The dtype of a column in each row; ``ValueError`` where there is no such column, ``TypeError`` where it does not hold
        lists of integers."""
        ...

    def tokens(self, column: str, fragment: int) -> Tokens:
        """A column of the fragment that begins at row ``fragments[fragment]``; read-only, as it is while anybody has it."""
        ...


@runtime_checkable
class TextSource(Source, Protocol):
    """A source of which strings can also be read many at a time, without the rest of their rows."""

    def texts(self, column: str, rows: Ints) -> list[str]:
        """A column of some rows; it raises where `row` does, or where there is no string."""
        ...


@runtime_checkable
class DecodingSource(TokenSource, Protocol):
    """A source whose fragments take so long to decode that another thread should have begun."""

    @property
    def spill_bytes(self) -> int:
        """What may lie on disk beside what the cache holds."""
        ...

    @property
    def fragment_bytes(self) -> int:
        """Bytes of the median fragment when it is decoded, as far as is known."""
        ...

    def decode_ahead(self, column: str, fragment: int) -> None:
        """The tokens of a fragment will be asked for soon. It returns at once, and raises nothing."""
        ...

    def pass_by(self, column: str, fragment: int) -> None:
        """The tokens of a fragment have been copied: they need not stay, if there is anything else to keep."""
        ...
