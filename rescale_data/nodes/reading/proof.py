"""Digests of rows, which check that a logical shard reads each of its rows once an epoch, across all segments of a run.

Each row that is read adds its hash to a digest, which is part of the state and so goes from segment to segment. The sum does
not depend on the order. So the sum over the rows that a shard owns can be computed without the order in which it reads them.
Rows that were lost or repeated change the sum, except with a chance of 2**-63 (Bellare and Micciancio, "A New Paradigm for
Collision-Free Hashing", 1997, on sums of hashes).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rescale_data.errors import DataStateError
from rescale_data.order import UInts, splitmix64
from rescale_data.state import Ints

if TYPE_CHECKING:
    from rescale_data.nodes.reader import Reader

_DIGEST_MASK = (1 << 63) - 1  # so that a digest fits int64
_ROWS_PER_CHUNK = 2**20


def digest_after(reader: Reader, digest: int, epoch: int, row: int, num_rows: int) -> int:
    """Return the digest with ``num_rows`` more rows added, which the reader reads from ``row`` of an epoch on."""
    stop = min(row + num_rows, reader.num_epoch_rows(epoch))
    while row < stop:
        plan = reader.plan(epoch, row)
        first_row, sums = plan.first_row, plan.row_hash_sums
        stop_index = min(stop - first_row, len(sums) - 1)
        digest, row = digest + sums[stop_index] - sums[row - first_row], first_row + stop_index
    return digest & _DIGEST_MASK


def digests_after_each(reader: Reader, digest: int, epoch: int, row: int, num_rows: int) -> Ints:
    """Return ``int64[num_rows]``, the digest after each of the next ``num_rows`` rows, which lie in one window."""
    plan = reader.plan(epoch, row)
    sums = np.asarray(plan.row_hash_sums)[row - plan.first_row :][: num_rows + 1]
    return ((sums[1:] - sums[0] + np.uint64(digest)) & np.uint64(_DIGEST_MASK)).astype(np.int64)


def check_digest(reader: Reader, epoch: int, row: int, digest: int) -> None:
    """Raise ``DataStateError`` if the rows that were read are not the first ``row`` rows of the epoch."""
    source, shard, rows, size = reader.source, reader.shard, reader.rows, reader.num_epoch_rows(epoch)
    # The order of rows does not matter within whole windows.
    stop = row - row % rows.rows_per_window if row < size else size
    starts = range(0, stop, _ROWS_PER_CHUNK)
    stops = [min(start + _ROWS_PER_CHUNK, stop) for start in starts]
    row_chunks = (rows.unshuffled_rows(epoch, *ends, shard.index) for ends in zip(starts, stops, strict=True))
    expected_digest = sum(_sum_of_hashes(rows.to_epoch_rows(epoch, chunk)) for chunk in row_chunks)
    if digest_after(reader, expected_digest & _DIGEST_MASK, epoch, stop, row - stop) != digest:
        raise DataStateError(
            f"{source.name}, logical shard {shard.index} of {shard.num_logical_shards}: the rows that were delivered in "
            f"epoch {epoch} are not the first {row} of the {size} that it owns: some were lost or repeated since the epoch "
            f"began. The state, or a node of the pipeline that skips or rewinds its source, is at fault; go back to a "
            f"checkpoint from before this epoch and report it."
        )


def running_hash_sums(rows: Ints) -> memoryview:
    """Return ``uint64[n + 1]``: item i is the digest of the first i rows, item j less item i that of rows ``i .. j - 1``."""
    sums = np.zeros(len(rows) + 1, dtype=np.uint64)
    np.cumsum(_hashes(rows), out=sums[1:])
    return sums.data


def _sum_of_hashes(rows: Ints) -> int:
    return int(_hashes(rows).sum(dtype=np.uint64))


def _hashes(rows: Ints) -> UInts:
    return splitmix64(rows.astype(np.uint64) + np.uint64(1))
