"""`SourceEpochs`: the number of rows of a source that each logical shard has in each epoch, and the epoch that follows."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from rescale_data.order import GlobalBatchOrder
from rescale_data.rounds import next_epoch_with_rows, row_range_index, rows_before
from rescale_data.shard import Shard
from rescale_data.state import Ints


@dataclass(frozen=True, slots=True)
class DataVersion:
    """Contents of a source from a given epoch on: all of its fragments, or some if files were added later.

    Args:
        since_epoch: The first epoch.
        num_rows: Number of rows in those fragments.
        fragments: ``int64[G]``, numbers of the fragments, in the order of the source; `None` for all.
        fragments_hash: Hash of ``fragments``, for comparisons and keys: other files may have as many rows.
    """

    since_epoch: int
    num_rows: int
    fragments: Ints | None = field(default=None, compare=False)
    fragments_hash: int = 0


class SourceEpochs:
    """Epochs of a source: the number of rows that each logical shard has in them, and the shard's next epoch.

    Args:
        shard: Any of the logical shards.
        versions: Contents of the source, in the order of their first epochs.
        order: Given if the order is the order of the source, global batch by global batch.
    """

    __slots__ = ("global_batch_order", "shard", "version_starts", "versions")

    def __init__(self, shard: Shard, versions: Sequence[DataVersion], order: GlobalBatchOrder | None = None) -> None:
        self.shard, self.versions, self.global_batch_order = shard, versions, order
        self.version_starts = [version.since_epoch for version in versions]

    @property
    def is_growing(self) -> bool:
        """True if later epochs of the source have other contents, because files were added."""
        return len(self.versions) > 1

    @property
    def is_small(self) -> bool:
        """True if the source has fewer rows than there are logical shards, in at least one epoch."""
        return any(version.num_rows < self.shard.num_logical_shards for version in self.versions)

    def version(self, epoch: int) -> DataVersion:
        """Return the contents of the source in an epoch, as a `DataVersion`."""
        return (
            self.versions[0] if len(self.versions) == 1 else self.versions[bisect_right(self.version_starts, epoch) - 1]
        )

    def row_range_of_shard(self, epoch: int, shard: int) -> int:
        """Return the index of the range of rows that a shard reads in an epoch."""
        version = self.version(epoch)
        if self.global_batch_order is not None or version.num_rows >= self.shard.num_logical_shards:
            return shard
        return row_range_index(shard, epoch, *self.range_args(version))

    def next_epoch(self, epoch: int, shard: int) -> int:
        """Return the epoch after ``epoch``; in an endless stream, the next epoch in which the shard has a row."""
        epoch += 1
        if not self.shard.repeat:
            return epoch
        for version, stop in zip(self.versions, self._stop_epochs(), strict=True):
            if epoch < stop:
                candidate = next_epoch_with_rows(shard, max(epoch, version.since_epoch), *self.range_args(version))
                if candidate < stop:
                    return candidate
        raise AssertionError

    def continues_round(self, epoch: int, shard: int) -> bool:
        """True if reading continues past the end of this epoch, since the source has fewer rows than logical shards."""
        n = self.shard.num_logical_shards
        is_small = self.shard.repeat and self.version(epoch).num_rows < n
        return is_small and self.next_epoch(epoch, shard) // n == epoch // n

    def shuffle_key(self, epoch: int) -> int:
        """Return the number with which the shuffle of an epoch is seeded.

        It is the epoch itself, or the number of its round if there are fewer rows than logical shards: then a shard reads each
        row once in a round.
        """
        n = self.shard.num_logical_shards
        return epoch if self.version(epoch).num_rows >= n else epoch // n

    def num_rows(self, first_epoch: int, stop: int, shard: int) -> int:
        """Return the number of rows of a shard in the epochs ``first_epoch .. stop - 1``."""
        return int(np.diff(self.sizes_before(np.array([first_epoch, max(first_epoch, stop)]), np.full(2, shard)))[0])

    def epoch_ends(self, epochs: Ints, shards: Ints) -> tuple[Ints, Ints]:
        """Return the number of rows that a reader reads from each epoch's beginning before it ends, and the epoch that follows.

        Reading may go on over the ends of some epochs (`continues_round`).
        """
        if not (self.shard.repeat and self.is_small):
            return self.sizes(epochs, shards), epochs + 1
        ends = [self.epoch_end(epoch, shard) for epoch, shard in zip(epochs.tolist(), shards.tolist(), strict=True)]
        num_left, next_epochs = np.array(ends, dtype=np.int64).reshape(-1, 2).T
        return num_left, next_epochs

    def epoch_end(self, epoch: int, shard: int) -> tuple[int, int]:
        """Return the result of `epoch_ends` for one epoch and shard."""
        n, num_epoch_rows = self.shard.num_logical_shards, self.num_rows(epoch, epoch + 1, shard)
        if not (self.shard.repeat and num_epoch_rows):
            return num_epoch_rows, self.next_epoch(epoch, shard)
        starts = [
            v.since_epoch
            for v, end in zip(self.versions, self._stop_epochs(), strict=True)
            if v.num_rows >= n and end > epoch
        ]
        stop = min(epoch - epoch % n + n, *(max(epoch, since) + 1 for since in starts), epoch + n)
        return self.num_rows(epoch, stop, shard), self.next_epoch(stop - 1, shard)

    def epoch_after_rows(self, epoch: int, num_rows: int, shard: int) -> tuple[int, int]:
        """Return the epoch in which a shard reads the last of its next rows, and the number of these rows in earlier epochs.

        If epochs may have no row and their ends count, this is ``epoch`` itself.

        Args:
            epoch: The epoch at whose beginning the shard stands.
            num_rows: Number of rows to read.
            shard: Index of the shard.
        """
        num_epochs = 1
        if self.is_small and not (self.shard.repeat and self.versions[-1].num_rows):
            return epoch, 0
        while self.num_rows(epoch, epoch + num_epochs, shard) < num_rows:
            num_epochs *= 2
        num_epochs = bisect_left(range(num_epochs), num_rows, key=lambda n: self.num_rows(epoch, epoch + n + 1, shard))
        return epoch + num_epochs, self.num_rows(epoch, epoch + num_epochs, shard)

    def sizes(self, epochs: Ints, shards: Ints) -> Ints:
        """Return ``int64[M]``, the number of rows of each given shard in the given epoch."""
        return self.sizes_before(epochs + 1, shards) - self.sizes_before(epochs, shards)

    def sizes_before(self, epochs: Ints, shards: Ints) -> Ints:
        """Return ``int64[M]``, the number of rows of each given shard in all epochs before the given one."""
        total = np.zeros_like(epochs)
        for v, stop in zip(self.versions, self._stop_epochs(), strict=True):
            clipped = np.clip(epochs, v.since_epoch, stop)
            if self.global_batch_order is not None:
                total += (clipped - v.since_epoch) * self.global_batch_order.shard_row_counts(shards, v.num_rows)
                continue
            since = np.full_like(epochs, v.since_epoch)
            total += rows_before(shards, clipped, *self.range_args(v)) - rows_before(shards, since, *self.range_args(v))
        return total

    def range_args(self, version: DataVersion) -> tuple[int, int, int]:
        """Return the arguments common to the functions of `rescale_data.rounds`: rows, logical shards and seed."""
        return version.num_rows, self.shard.num_logical_shards, self.shard.seed

    def _stop_epochs(self) -> list[int]:
        """Return, for each `DataVersion`, the first epoch after it."""
        return [*self.version_starts[1:], int(np.iinfo(np.int64).max)]
