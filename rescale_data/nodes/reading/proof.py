"""`Proof`: that a logical shard reads each of its rows once an epoch, whatever legs the run is made of.

Each row that is read adds its hash to a digest, which is part of the state and so goes from leg to leg. The sum does not
depend on the order, so that of the rows a shard owns can be computed without the order in which it reads them. Rows that
were lost or repeated leave another sum, up to a chance of 2**-63 (Bellare and Micciancio, "A New Paradigm for Collision-Free
Hashing", 1997, on sums of hashes).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rescale_data.errors import DataStateError
from rescale_data.order import Words, mix
from rescale_data.state import Ints

_MASK = (1 << 63) - 1  # so that a digest is a number that int64 holds
_CHUNK = 2**20


class Proof:
    """The digest of one logical shard.

    Args:
        name: Of the shard, for messages.
        size: Epoch -> rows of the shard.
        sums: ``(epoch, row)`` -> the first row of the window that ``row`` is in, and the `running_sums` of its rows, in the
            order in which they are read.
        owned: ``(epoch, first, stop)`` -> the rows ``first .. stop-1`` that the shard owns, in the order of the source.
        window_of: The first row of the window that a row is in.
    """

    def __init__(
        self,
        name: str,
        size: Callable[[int], int],
        sums: Callable[[int, int], tuple[int, memoryview]],
        owned: Callable[[int, int, int], Ints],
        window_of: Callable[[int], int],
    ) -> None:
        self._name, self._size = name, size
        self._sums, self._owned, self._window_of = sums, owned, window_of

    def read(self, digest: int, epoch: int, row: int, num_rows: int) -> int:
        """The digest after some more rows have been read."""
        stop = min(row + num_rows, self._size(epoch))
        while row < stop:
            first, sums = self._sums(epoch, row)
            until = min(stop - first, len(sums) - 1)
            digest, row = digest + sums[until] - sums[row - first], first + until
        return digest & _MASK

    def after_each(self, digest: int, epoch: int, row: int, num_rows: int) -> Ints:
        """``int64[num_rows]``, the digest after each of the next rows, all of one window."""
        first, sums = self._sums(epoch, row)
        here = np.asarray(sums)[row - first : row - first + num_rows + 1]
        return ((here[1:] - here[0] + np.uint64(digest)) & np.uint64(_MASK)).astype(np.int64)

    def check(self, epoch: int, row: int, digest: int) -> None:
        """``DataStateError`` if the first ``row`` rows of the epoch are not what was read."""
        size = self._size(epoch)
        whole = min(self._window_of(row), size) if row < size else size
        expected = sum(_sum(self._owned(epoch, a, min(a + _CHUNK, whole))) for a in range(0, whole, _CHUNK))
        if self.read(expected & _MASK, epoch, whole, row - whole) != digest:
            raise DataStateError(
                f"{self._name}: the rows that were delivered in epoch {epoch} are not the first {row} of the {size} that "
                f"it owns: some were lost or repeated since the epoch began. The state, or a node of the pipeline that skips "
                f"or rewinds its source, is at fault; go back to a checkpoint from before this epoch and report it."
            )


def running_sums(rows: Ints) -> memoryview:
    """``uint64[n + 1]``: the digest of the first i of the rows, for each i; so that of any run of them is a difference."""
    sums = np.zeros(len(rows) + 1, dtype=np.uint64)
    np.cumsum(_hashes(rows), out=sums[1:])
    return sums.data


def _sum(rows: Ints) -> int:
    return int(_hashes(rows).sum(dtype=np.uint64))


def _hashes(rows: Ints) -> Words:
    return mix(rows.astype(np.uint64) + np.uint64(1))
