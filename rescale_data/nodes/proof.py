"""`Proof`: that a logical shard reads each of its rows once an epoch, whatever legs the run is made of.

Each row that is read adds its hash to a digest, which is part of the state and so goes from leg to leg. The sum does not
depend on the order, so that of the rows a shard owns can be computed without the order in which it reads them. Rows that
were lost or repeated leave another sum, up to a chance of 2**-63 (Bellare and Micciancio, "A New Paradigm for Collision-Free
Hashing", 1997, on sums of hashes).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from rescale_data.errors import DataStateError
from rescale_data.order import mix
from rescale_data.state import Ints

_MASK = (1 << 63) - 1  # so that a digest is a number that int64 holds
_CHUNK = 2**20

RowsFrom: TypeAlias = Callable[[int, int], Ints]


class Proof:
    """The digest of one logical shard.

    Args:
        name: Of the shard, for messages.
        size: Rows of the shard.
        in_order: ``(epoch, row)`` -> the rows of the source that are read from there on, up to the end of a window.
        owned: ``(epoch, first, stop)`` -> the rows ``first .. stop-1`` that the shard owns, in the order of the source.
        window_of: The first row of the window that a row is in.
    """

    def __init__(
        self,
        name: str,
        size: int,
        in_order: RowsFrom,
        owned: Callable[[int, int, int], Ints],
        window_of: Callable[[int], int],
    ) -> None:
        self._name, self._size = name, size
        self._in_order, self._owned, self._window_of = in_order, owned, window_of

    def read(self, digest: int, epoch: int, row: int, num_rows: int) -> int:
        """The digest after some more rows have been read."""
        stop = min(row + num_rows, self._size)
        while row < stop:
            rows = self._in_order(epoch, row)[: stop - row]
            digest, row = digest + _sum(rows), row + len(rows)
        return digest & _MASK

    def check(self, epoch: int, row: int, digest: int) -> None:
        """``DataStateError`` if the first ``row`` rows of the epoch are not what was read."""
        whole = min(self._window_of(row), self._size) if row < self._size else self._size
        expected = sum(_sum(self._owned(epoch, a, min(a + _CHUNK, whole))) for a in range(0, whole, _CHUNK))
        if self.read(expected & _MASK, epoch, whole, row - whole) != digest:
            raise DataStateError(
                f"{self._name}: the rows that were delivered in epoch {epoch} are not the first {row} of the {self._size} that "
                f"it owns: some were lost or repeated since the epoch began. The state, or a node of the pipeline that skips "
                f"or rewinds its source, is at fault; go back to a checkpoint from before this epoch and report it."
            )


def _sum(rows: Ints) -> int:
    return int(mix(rows.astype(np.uint64) + np.uint64(1)).sum(dtype=np.uint64))
