"""`SyntheticSource`: random tokens computed from the row number, for smoke tests and benchmarks without files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rescale_data.errors import checks_argument_types, require_int
from rescale_data.order import random_words
from rescale_data.sources.decoded.cache import DEFAULT_CACHE_BYTES, cache, owner_id
from rescale_data.sources.source import Tokens, TokenSource

FRAGMENT_ROWS = 1024
TOKEN_COLUMN = "tokens"


class SyntheticSource(TokenSource):
    """Documents of random tokens: row i is a function of (seed, i) alone, the same on every machine.

    Args:
        num_rows: Number of documents.
        length: Number of tokens of each document, or the least and the largest number.
        vocab_size: Tokens are ``0 .. vocab_size - 1``, as int32.
        seed: Another seed gives other tokens.
        cache_bytes: Bytes of computed tokens that a rank may keep, see `ParquetSource`.

    Raises:
        ValueError: An argument is out of range.

    Example:
        >>> import rescale_data as rd
        >>> rd.SyntheticSource(8, length=4).row(0)["tokens"].tolist()
        [2480, 29303, 14963, 16671]
    """

    name = "synthetic"

    @checks_argument_types
    def __init__(
        self,
        num_rows: int,
        *,
        length: int | tuple[int, int] = (1, 1024),
        vocab_size: int = 32_000,
        seed: int = 0,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
    ) -> None:
        length_range: Any = length if isinstance(length, tuple | list) else (length, length)
        length_limits = require_int(**{f"length[{i}]": value for i, value in enumerate(length_range)})
        if num_rows < 1 or vocab_size < 1 or len(length_limits) != 2 or not 0 <= length_limits[0] <= length_limits[1]:
            raise ValueError(
                f"SyntheticSource({num_rows=}, {length=}, {vocab_size=}): give at least one row and one token of the "
                f"vocabulary, and a length of at least 0 or a range of lengths."
            )
        self.num_rows, self.vocab_size, self.seed, self.cache_bytes = num_rows, vocab_size, seed, cache_bytes
        self._min_length, self._max_length = length_limits
        self.fragments = np.append(np.arange(0, num_rows, FRAGMENT_ROWS, dtype=np.int64), num_rows)
        self.fragment_bytes = min(FRAGMENT_ROWS, num_rows) * (2 * (self._min_length + self._max_length) + 8)

    def manifest(self) -> Mapping[str, Any]:
        return {
            "format": "synthetic",
            "rows": self.num_rows,
            "length": [self._min_length, self._max_length],
            "vocab_size": self.vocab_size,
            "seed": self.seed,
        }

    def row(self, index: int) -> dict[str, Any]:
        fragment, row = divmod(index, FRAGMENT_ROWS)
        return {TOKEN_COLUMN: self.tokens(TOKEN_COLUMN, fragment).copy_of(row)}

    def locate(self, index: int) -> str:
        return f"synthetic row {index}"

    def token_dtype(self, column: str) -> np.dtype[Any]:
        if column != TOKEN_COLUMN:
            raise ValueError(f"A SyntheticSource has no column {column!r}. It has {TOKEN_COLUMN!r}.")
        return np.dtype(np.int32)

    def tokens(self, column: str, fragment: int) -> Tokens:
        cache().register(self)
        return cache().get_or_make((owner_id(self), fragment), lambda: self._compute_tokens(fragment))

    def _compute_tokens(self, fragment: int) -> Tokens:
        num_rows = min(FRAGMENT_ROWS, self.num_rows - fragment * FRAGMENT_ROWS)
        words = random_words(num_rows, "synthetic lengths", self.seed, fragment)
        lengths = self._min_length + (words % np.uint64(self._max_length - self._min_length + 1)).astype(np.int64)
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        values = random_words(int(offsets[-1]), "synthetic tokens", self.seed, fragment) % np.uint64(self.vocab_size)
        return Tokens(values.astype(np.int32), offsets)
