"""The protocol of a source: rows at rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from rescale_data.state import Ints


@runtime_checkable
class Source(Protocol):
    """Rows at rest, numbered ``0 .. num_rows - 1`` in file order (files by path), the same on every machine.

    A source holds no position. It pickles with its index and without its data.
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


@dataclass(frozen=True)
class Tokens:
    """A token column of one fragment: document i is ``values[offsets[i] : offsets[i + 1]]``."""

    values: npt.NDArray[np.integer[Any]]
    offsets: Ints

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.offsets.nbytes


@runtime_checkable
class TokenSource(Source, Protocol):
    """A source that can also be read a fragment at a time, without a Python object for a row or a token."""

    @property
    def cache_bytes(self) -> int:
        """The byte budget of what this process keeps decoded."""
        ...

    def check_tokens(self, column: str) -> None:
        """``ValueError`` where there is no such column, ``TypeError`` where it does not hold lists of integers."""
        ...

    def tokens(self, column: str, fragment: int) -> Tokens:
        """A column of the fragment that begins at row ``fragments[fragment]``; read-only, and not to be kept."""
        ...

    def prepare(self, column: str, fragment: int) -> None:
        """A hint that the tokens of a fragment will be asked for soon. It returns at once, and raises nothing."""
        ...
