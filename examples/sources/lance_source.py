"""A Lance dataset as a source: ``rd.DataLoader(LanceSource("corpus.lance"), global_batch_size=...)``.

Nothing is kept for a row: its number is its address, and the order of an epoch is computed (``pip install pylance``).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import lance

import rescale_data as rd
from rescale_data.sources.decoded.columns import Fragment


class LanceSource(rd.Source):
    """The rows of a dataset as it was at one version, however many are written to it since.

    Args:
        uri: What ``lance.dataset`` takes.
        columns: Of a row; default: all.
        version: Default: the newest. A run that resumes reads the version of its state: name it when the dataset grows.
        batch_rows: As many rows of a logical shard are fetched together.
        cache_bytes: What this process may keep of rows that were fetched, over all sources.
    """

    name = "lance"  # without fragments: any row is read as cheaply as the next, and an epoch is one permutation of all

    def __init__(
        self, uri: str, *, columns: Sequence[str] | None = None, version: int | None = None, batch_rows: int = 256,
        cache_bytes: int = 2**30,
    ) -> None:  # fmt: skip
        self.uri, self.batch_rows, self.cache_bytes = uri, batch_rows, cache_bytes
        dataset = lance.dataset(uri, version=version)
        self.version, self.num_rows = int(dataset.version), int(dataset.count_rows())
        self.columns = list(columns) if columns is not None else list(dataset.schema.names)

    def manifest(self) -> dict[str, Any]:
        return {"format": "lance", "version": self.version, "rows": self.num_rows}

    def row(self, index: int) -> dict[str, Any]:
        return self.rows([index])[0]

    def rows(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        table = self._dataset.take(list(indices), columns=self.columns)
        decoded = Fragment(table)  # lists of numbers become arrays
        return [decoded.row(number) for number in range(len(indices))]

    def locate(self, index: int) -> str:
        return f"{self.uri}, version {self.version}, row {index}"

    @functools.cached_property
    def _dataset(self) -> Any:
        return lance.dataset(self.uri, version=self.version)

    def __getstate__(self) -> dict[str, Any]:
        """Return what another process opens the dataset from."""
        return {name: value for name, value in self.__dict__.items() if name != "_dataset"}
