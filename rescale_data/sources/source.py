"""The protocol of a source: rows at rest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

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

    def row(self, index: int) -> dict[str, Any]:
        """One row as ``{column: value}``: arrays, bytes, strings or numbers, copies that the caller owns."""
        ...

    def locate(self, index: int) -> str:
        """Where a row is, for messages: ``"part-3.parquet, row 17"``."""
        ...
