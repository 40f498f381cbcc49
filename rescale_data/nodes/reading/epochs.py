"""`ShardEpochs`: the number of rows of a source that one logical shard has in each epoch, and the epoch that follows."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from rescale_data.order import Steps
from rescale_data.rounds import next_epoch_with_rows, range_of, ranges_of, rows_before, shard_sizes
from rescale_data.shard import Shard
from rescale_data.state import Ints


@dataclass(frozen=True, slots=True)
class View:
    """Contents of a source from an epoch on: some of its fragments, or all of them.

    Args:
        since: The first epoch.
        num_rows: Number of rows in those fragments.
        fragments: ``int64[G]``, numbers of the fragments, in the order of the source; `None` for all.
    """

    since: int
    num_rows: int
    fragments: Ints | None = None


@lru_cache(maxsize=1024)
def whole(num_rows: int) -> Sequence[View]:
    return (View(0, num_rows),)


_SINCE_EVER = [0]


class ShardEpochs:
    """Epochs of one logical shard, or of another shard of the same source if a call names one.

    Args:
        shard: The logical shard.
        views: Contents of the source, in the order of their first epochs.
        steps: Given if the order is the order of the source, global batch by global batch.
    """

    __slots__ = ("shard", "since", "steps", "views")

    def __init__(self, shard: Shard, views: Sequence[View], steps: Steps | None = None) -> None:
        self.shard, self.views, self.steps = shard, views, steps
        self.since = _SINCE_EVER if len(views) == 1 else [view.since for view in views]

    @property
    def grows(self) -> bool:
        """True if the source has other contents in later epochs."""
        return len(self.views) > 1

    @property
    def is_small(self) -> bool:
        """True if there are fewer rows than logical shards, in some epochs at least."""
        return any(view.num_rows < self.shard.num_logical_shards for view in self.views)

    def view(self, epoch: int) -> View:
        """Return the contents of the source in an epoch."""
        return self.views[0] if len(self.views) == 1 else self.views[bisect_right(self.since, epoch) - 1]

    def range_of(self, epoch: int, shard: int) -> int:
        """Return the number of the range of rows that a shard reads in an epoch."""
        view = self.view(epoch)
        if self.steps is not None or view.num_rows >= self.shard.num_logical_shards:
            return shard
        return range_of(shard, epoch, *self.args(view))

    def next_epoch(self, epoch: int, shard: int = -1) -> int:
        """Return the epoch that follows; in an endless stream, the next one in which the shard has a row."""
        epoch, shard = epoch + 1, self.shard.index if shard < 0 else shard
        if not self.shard.repeat:
            return epoch
        for view, stop in zip(self.views, self._stops(), strict=True):
            if epoch < stop:
                found = next_epoch_with_rows(shard, max(epoch, view.since), *self.args(view))
                if found < stop:
                    return found
        raise AssertionError

    def goes_on(self, epoch: int) -> bool:
        """True if reading goes on over the end of an epoch: the shard has one row or none in it, and its round goes on."""
        n = self.shard.num_logical_shards
        is_small = self.shard.repeat and self.view(epoch).num_rows < n
        return is_small and self.next_epoch(epoch) // n == epoch // n

    def shuffled_as(self, epoch: int) -> int:
        """Return the number that keys the shuffle of an epoch.

        It is the epoch itself, or the number of its round if there are fewer rows than logical shards: then a shard reads each
        row once in a round.
        """
        n = self.shard.num_logical_shards
        return epoch if self.view(epoch).num_rows >= n else epoch // n

    def num_rows(self, first: int, stop: int, shard: int) -> int:
        """Return the number of rows of a shard in the epochs ``first .. stop - 1``."""
        return int(np.diff(self.sizes_before(np.array([first, max(first, stop)]), np.full(2, shard)))[0])

    def epoch_ends(self, epochs: Ints, shards: Ints) -> tuple[Ints, Ints]:
        """Return the rows of shards from the beginning of epochs up to the end that a reader sees, and the epochs that follow.

        Reading may go on over the ends of some epochs (`goes_on`).
        """
        if not (self.shard.repeat and self.is_small):
            return self.sizes(epochs, shards), epochs + 1
        found = [self.end_of(epoch, shard) for epoch, shard in zip(epochs.tolist(), shards.tolist(), strict=True)]
        left, following = np.array(found, dtype=np.int64).reshape(-1, 2).T
        return left, following

    def end_of(self, epoch: int, shard: int) -> tuple[int, int]:
        """Return `epoch_ends` of one epoch and shard."""
        n, size = self.shard.num_logical_shards, self.num_rows(epoch, epoch + 1, shard)
        if not (self.shard.repeat and size):
            return size, self.next_epoch(epoch, shard)
        large = [v.since for v, stop in zip(self.views, self._stops(), strict=True) if v.num_rows >= n and stop > epoch]
        stop = min(epoch - epoch % n + n, *(max(epoch, since) + 1 for since in large), epoch + n)
        return self.num_rows(epoch, stop, shard), self.next_epoch(stop - 1, shard)

    def epoch_after(self, epoch: int, num_rows: int, shard: int) -> tuple[int, int]:
        """Return the epoch in which a shard reads the last of its next rows, and the number of these rows before that epoch.

        If epochs may have no row and their ends count, this is ``epoch`` itself.

        Args:
            epoch: The epoch at whose beginning the shard stands.
            num_rows: Number of rows to read.
            shard: Index of the shard.
        """
        num = 1
        if self.is_small and not (self.shard.repeat and self.views[-1].num_rows):
            return epoch, 0
        while self.num_rows(epoch, epoch + num, shard) < num_rows:
            num *= 2
        num = bisect_left(range(num), num_rows, key=lambda n: self.num_rows(epoch, epoch + n + 1, shard))
        return epoch + num, self.num_rows(epoch, epoch + num, shard)

    def sizes(self, epochs: Ints, shards: Ints) -> Ints:
        """Return the number of rows of shards in epochs, ``int64[M]``."""
        of_view = np.stack([self._sizes(epochs, shards, view) for view in self.views])
        return of_view[np.searchsorted(self.since, epochs, side="right") - 1, np.arange(len(shards))]

    def sizes_before(self, epochs: Ints, shards: Ints) -> Ints:
        """Return the number of rows of shards in all epochs before the given ones, ``int64[M]``."""
        total = np.zeros_like(epochs)
        for view, stop in zip(self.views, self._stops(), strict=True):
            until = np.clip(epochs, view.since, stop)
            if self.steps is not None:
                total += (until - view.since) * self.steps.sizes(shards, view.num_rows)
                continue
            since = np.full_like(epochs, view.since)
            total += rows_before(shards, until, *self.args(view)) - rows_before(shards, since, *self.args(view))
        return total

    def _sizes(self, epochs: Ints, shards: Ints, view: View) -> Ints:
        if self.steps is not None:
            return self.steps.sizes(shards, view.num_rows)
        parts = ranges_of(shards, epochs, *self.args(view))
        return shard_sizes(parts, view.num_rows, self.shard.num_logical_shards)

    def args(self, view: View) -> tuple[int, int, int]:
        """Return the arguments that the functions of `rescale_data.rounds` share."""
        return view.num_rows, self.shard.num_logical_shards, self.shard.seed

    def _stops(self) -> list[int]:
        """Return the epoch at which each view ends."""
        return [*self.since[1:], int(np.iinfo(np.int64).max)]
