"""`ShardRows`: which rows of the source one logical shard reads, in the order of each epoch."""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol
from weakref import ref

import numpy as np

from rescale_data.nodes.reading.gather import rows_around
from rescale_data.nodes.reading.proof import running_sums
from rescale_data.nodes.reading.share import ShardShare
from rescale_data.order import FragmentOrder, ShardOrder, Steps, encipher, fragments_in_order, some_fragments_order
from rescale_data.rounds import next_epoch_with_rows, range_of, ranges_of, rows_before, shard_sizes
from rescale_data.shard import Shard
from rescale_data.sources.decoded.cache import Evicted, cache, owner_of
from rescale_data.sources.source import Source
from rescale_data.state import Ints

DEFAULT_WINDOW = 1024
_NO_SUMS = memoryview(b"")
_ENTRY = 900  # bytes of a plan in the cache beside its numbers, with what its reader keeps as long
_SINCE_EVER = [0]
numbers = itertools.count()
"""Of those who read alike."""


@dataclass(frozen=True, slots=True)
class View:
    """What a source consists of, from an epoch on: some of its fragments, or all of it.

    Args:
        since: The first epoch.
        num_rows: Of those fragments.
        fragments: ``int64[G]``, which, in the order of the source; `None` for all.
    """

    since: int
    num_rows: int
    fragments: Ints | None = None


class Leaving(Protocol):
    def leave_order(self) -> None:
        """Keep nothing that can be computed again."""
        ...


@dataclass(frozen=True, slots=True)
class Plan(Evicted):
    """Rows of the source for the shard's rows ``first ..`` of an epoch, in the order in which they are read.

    Args:
        sums: Their `running_sums`, where `Shard.verify` asks for them.
        reader: Told when the cache has no room for it, if it is still there: the cache keeps no reader, nor its source.
    """

    epoch: int
    first: int
    rows: Ints
    sums: memoryview
    reader: ref[Leaving] | None

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes + self.sums.nbytes + _ENTRY

    def evicted(self) -> None:
        reader = None if self.reader is None else self.reader()
        if reader is not None:
            reader.leave_order()


class ShardRows:
    """The rows of one logical shard, or of any other of the same source where one is named.

    Args:
        source: The source.
        shard: The logical shard.
        shuffle, by_global_batch: See `Reader`.
        views: What the source consists of, in the order of their first epochs; default: all of it.
        reader: Who keeps this, as long as the cache has room for where the shard reads.
        number: Of those who read the same so, a logical shard each; default: of this alone.
    """

    __slots__ = (
        "_epoch", "_plan", "_plan_key", "_reader", "_shard", "_since", "_size", "_source", "_source_key", "_views", "farthest",
        "is_full", "steps", "window",
    )  # fmt: skip

    def __init__(
        self,
        source: Source,
        shard: Shard,
        shuffle: bool | int,
        by_global_batch: bool = False,
        views: Sequence[View] | None = None,
        reader: Leaving | None = None,
        number: int = -1,
    ) -> None:
        self._source, self._shard = source, shard
        self.steps = Steps(**_sizes_of(shard, shuffle)) if by_global_batch else None
        self.is_full = shuffle is True and source.fragments is None
        self.window = 0 if self.is_full else _window(shuffle)
        self._source_key = owner_of(source)
        self._plan_key = (self._source_key, "plan", next(numbers) if number < 0 else number, shard.index)
        self._views = views = views or _whole(source.num_rows)
        self._since = _SINCE_EVER if len(views) == 1 else [view.since for view in views]
        self._epoch, self._size = -1, 0  # whose size was asked for last, and that
        self.farthest = 0  # the last epoch that was read
        self._plan: Plan | None = None
        self._reader = None if reader is None else ref(reader)

    @property
    def grows(self) -> bool:
        """Whether the source consists of something else in later epochs."""
        return len(self._views) > 1

    @property
    def alike_from(self) -> int:
        """The epoch from which on it consists of the same."""
        return self._since[-1]

    @property
    def is_small(self) -> bool:
        """Whether there are fewer rows than logical shards, in some epochs at least."""
        return any(view.num_rows < self._shard.num_logical_shards for view in self._views)

    @property
    def width(self) -> int:
        """Rows whose order is computed together."""
        return self.order(0).width

    def order(self, epoch: int, shard: int = -1) -> ShardOrder:
        part = self.range_of(epoch, self._shard.index if shard < 0 else shard)
        return _order(*self._args(self.view(epoch)), part, self.window, self.is_full, self.steps)

    def range_of(self, epoch: int, shard: int) -> int:
        """Number of the range of rows that a shard reads in an epoch."""
        view = self.view(epoch)
        if self.steps is not None or view.num_rows >= self._shard.num_logical_shards:
            return shard
        return range_of(shard, epoch, *self._args(view))

    def next_epoch(self, epoch: int, shard: int = -1) -> int:
        """The epoch that follows; of an endless stream, the next one in which the shard has a row."""
        epoch, shard = epoch + 1, self._shard.index if shard < 0 else shard
        if not self._shard.repeat:
            return epoch
        for view, stop in zip(self._views, self._stops(), strict=True):
            if epoch < stop:
                found = next_epoch_with_rows(shard, max(epoch, view.since), *self._args(view))
                if found < stop:
                    return found
        raise AssertionError

    def goes_on(self, epoch: int) -> bool:
        """Whether the end of an epoch is none for whoever reads: it has a row or none, and others of its round follow."""
        n = self._shard.num_logical_shards
        is_small = self._shard.repeat and self.view(epoch).num_rows < n
        return is_small and self.next_epoch(epoch) // n == epoch // n

    def _shuffle(self, epoch: int) -> int:
        """The epoch whose shuffle holds: of few rows that of a round, so that a shard reads each of them once in it."""
        n = self._shard.num_logical_shards
        return epoch if self.view(epoch).num_rows >= n else epoch // n

    def size(self, epoch: int) -> int:
        """Rows of the shard in an epoch."""
        if epoch != self._epoch:
            self._epoch, self._size = epoch, self.order(epoch).size
            self.farthest = max(self.farthest, epoch)
        return self._size

    def num_rows(self, first: int, stop: int, shard: int) -> int:
        """Rows of a shard in the epochs ``first .. stop - 1``."""
        return int(np.diff(self.sizes_before(np.array([first, max(first, stop)]), np.full(2, shard)))[0])

    def epoch_ends(self, epochs: Ints, shards: Ints) -> tuple[Ints, Ints]:
        """Rows of shards from the beginning of epochs up to what is an end for who reads, and the epochs that follow."""
        if not (self._shard.repeat and self.is_small):
            return self.sizes(epochs, shards), epochs + 1
        found = [self.end_of(epoch, shard) for epoch, shard in zip(epochs.tolist(), shards.tolist(), strict=True)]
        left, following = np.array(found, dtype=np.int64).reshape(-1, 2).T
        return left, following

    def end_of(self, epoch: int, shard: int) -> tuple[int, int]:
        """The same of one shard, see `goes_on`."""
        n, size = self._shard.num_logical_shards, self.num_rows(epoch, epoch + 1, shard)
        if not (self._shard.repeat and size):
            return size, self.next_epoch(epoch, shard)
        large = [
            v.since for v, stop in zip(self._views, self._stops(), strict=True) if v.num_rows >= n and stop > epoch
        ]
        stop = min(epoch - epoch % n + n, *(max(epoch, since) + 1 for since in large), epoch + n)
        return self.num_rows(epoch, stop, shard), self.next_epoch(stop - 1, shard)

    def epoch_after(self, epoch: int, num_rows: int, shard: int) -> tuple[int, int]:
        """The epoch in which the last of so many rows of a shard from the beginning of another on is read, and the rows before
        it; that other one where epochs have none and are ends, which somebody counts."""
        num = 1
        if self.is_small and not (self._shard.repeat and self._views[-1].num_rows):
            return epoch, 0
        while self.num_rows(epoch, epoch + num, shard) < num_rows:
            num *= 2
        num = bisect_left(range(num), num_rows, key=lambda n: self.num_rows(epoch, epoch + n + 1, shard))
        return epoch + num, self.num_rows(epoch, epoch + num, shard)

    def sizes(self, epochs: Ints, shards: Ints) -> Ints:
        """Rows of shards in epochs, ``int64[M]`` each."""
        of_view = np.stack([self._sizes(epochs, shards, view) for view in self._views])
        return of_view[np.searchsorted(self._since, epochs, side="right") - 1, np.arange(len(shards))]

    def sizes_before(self, epochs: Ints, shards: Ints) -> Ints:
        """Rows of shards in all earlier epochs, ``int64[M]`` each."""
        total = np.zeros_like(epochs)
        for view, stop in zip(self._views, self._stops(), strict=True):
            until = np.clip(epochs, view.since, stop)
            if self.steps is not None:
                total += (until - view.since) * self.steps.sizes(shards, view.num_rows)
                continue
            since = np.full_like(epochs, view.since)
            total += rows_before(shards, until, *self._args(view)) - rows_before(shards, since, *self._args(view))
        return total

    def _sizes(self, epochs: Ints, shards: Ints, view: View) -> Ints:
        if self.steps is not None:
            return self.steps.sizes(shards, view.num_rows)
        parts = ranges_of(shards, epochs, *self._args(view))
        return shard_sizes(parts, view.num_rows, self._shard.num_logical_shards)

    def _args(self, view: View) -> tuple[int, int, int]:
        return view.num_rows, self._shard.num_logical_shards, self._shard.seed

    def _stops(self) -> list[int]:
        """The epoch at which each view ends."""
        return [*self._since[1:], int(np.iinfo(np.int64).max)]

    def plan(self, epoch: int, row: int) -> tuple[Plan, bool]:
        """Which rows of the source the shard reads around ``row``, and whether that was computed now."""
        plan = self.kept(epoch, row)
        if plan is not None:
            return plan, False
        rows = self.around(epoch, row)
        sums = running_sums(self.numbered(epoch, rows)) if self._shard.verify else _NO_SUMS
        plan = Plan(epoch, self.order(epoch).span(row)[0], rows, sums, self._reader)
        cache().put(self._plan_key, plan)
        self._plan = plan  # as long as the cache has room: without it, the reader keeps none of this
        return plan, True

    def kept(self, epoch: int, row: int) -> Plan | None:
        """What `plan` would say, if that need not be computed."""
        plan = self._plan
        if plan is not None and plan.epoch == epoch and 0 <= row - plan.first < len(plan.rows):
            return plan
        return None

    @property
    def plan_bytes(self) -> int:
        """About what the plan of a shard takes in the cache."""
        return _ENTRY + min(self.width, self.order(0).size) * 8 * (1 + self._shard.verify)

    def around(self, epoch: int, row: int, shard: int = -1) -> Ints:
        """Rows of the source that are permuted together around a row of a shard."""
        order, num_rows = self.order(epoch, shard), self.view(epoch).num_rows
        if self.is_full and num_rows < self._shard.num_logical_shards:
            return self._few(num_rows, self._shuffle(epoch))[order.virtual(*order.span(row))]
        return rows_around(order, self._shuffle(epoch), row, self.fragments(epoch))

    def _few(self, num_rows: int, number: int) -> Ints:
        """All rows as a round permutes them, of which a shard reads one in this epoch and one in that."""
        key = (self._source_key, "few", self._shard.seed, num_rows, number)
        every = np.arange(num_rows, dtype=np.int64)
        return cache().make(key, lambda: encipher(every, num_rows, "full", self._shard.seed, number))

    def fragments_around(self, epoch: int, row: int, shard: int = -1) -> list[int]:
        """Fragments of the source in which the rows lie that are permuted together around a row of a shard."""
        fragments, order = self._source.fragments, self.order(epoch, shard)
        here = order.virtual(*order.span(row))
        if fragments is None or not len(here):
            return []
        first, stop = int(here[0]), int(here[-1]) + 1
        permuted = self.fragments(epoch)
        if permuted is not None:
            return (np.searchsorted(fragments, permuted.between(first, stop), side="right") - 1).tolist()
        ends = np.searchsorted(fragments, [first, stop - 1], side="right")
        return list(range(int(ends[0]) - 1, int(ends[1])))

    def after(self, epoch: int, row: int) -> tuple[int, int]:
        """Epoch and row at which the next window begins."""
        stop = self.order(epoch).span(row)[1]
        return (epoch, stop) if stop < self.size(epoch) else (self.next_epoch(epoch), 0)

    def ends(self, epoch: int, row: int) -> list[int]:
        """The two ends of what the window behind the one at ``row`` permutes, if there is one."""
        order = self.order(epoch)
        return order.ends(order.span(row)[1], self.fragments(epoch))

    def owned(self, epoch: int, first: int, stop: int, shard: int = -1) -> Ints:
        """Rows of the source that the shard's rows ``first .. stop - 1`` are, windows not permuted."""
        return self.order(epoch, shard).owned(self._shuffle(epoch), first, stop, self.fragments(epoch))

    def numbered(self, epoch: int, rows: Ints) -> Ints:
        """Rows of the source as the view of an epoch numbers them, whatever has joined since."""
        fragments, view = self._source.fragments, self.view(epoch)
        if fragments is None or view.fragments is None:
            return rows
        starts, lengths = fragments[:-1][view.fragments], np.diff(fragments)[view.fragments]
        at = np.searchsorted(starts, rows, side="right") - 1
        return rows - starts[at] + (np.cumsum(lengths) - lengths)[at]

    def places(self, rows: Ints, epoch: int) -> list[tuple[int, int]]:
        """Where in an epoch the shards read some rows of the source: each shard and the number of its row, by both."""
        shards = np.arange(self._shard.num_logical_shards, dtype=np.int64)
        sizes, found = self.sizes(np.full_like(shards, epoch), shards), list[tuple[int, int]]()
        for shard in np.flatnonzero(sizes).tolist():
            here = np.flatnonzero(np.isin(self.owned(epoch, 0, int(sizes[shard]), shard), rows))
            for first in sorted({self.order(epoch, shard).span(row)[0] for row in here.tolist()}):
                within = np.flatnonzero(np.isin(self.around(epoch, first, shard), rows))
                found += [(shard, first + row) for row in within.tolist()]
        return found

    def share(self, epoch: int, shard: int = -1) -> ShardShare | None:
        """How fragments are cut up for a shard; `None` where there are none."""
        if self._source.fragments is None or self.steps is not None:
            return None
        shard = self._shard.index if shard < 0 else shard
        moved = self.range_of(epoch, shard) - shard
        return ShardShare(
            self._shard, epoch, self._source.fragments, self.fragments(epoch), self._source_key, shard, moved
        )

    def fragments(self, epoch: int) -> FragmentOrder | None:
        """The fragments as the epoch permutes them; `None` where rows are as they are in the source."""
        fragments, view = self._source.fragments, self.view(epoch)
        if fragments is None or (not self.window and view.fragments is None):
            return None
        epoch = self._shuffle(epoch) if self.window else view.since
        key = (self._source_key, "order", self.window > 0, self._shard.seed, epoch, view.num_rows)
        return cache().make(key, lambda: self._in_order(fragments, view, epoch))

    def _in_order(self, fragments: Ints, view: View, epoch: int) -> FragmentOrder:
        starts, lengths = fragments[:-1], np.diff(fragments)
        if view.fragments is not None:
            starts, lengths = starts[view.fragments], lengths[view.fragments]
        if not self.window:
            return fragments_in_order(starts, lengths)
        return some_fragments_order(starts, lengths, self._shard.seed, epoch)

    def view(self, epoch: int) -> View:
        """What the source consists of in an epoch."""
        return self._views[0] if len(self._views) == 1 else self._views[bisect_right(self._since, epoch) - 1]


@lru_cache(maxsize=1024)
def _order(
    num_rows: int, num_logical_shards: int, seed: int, part: int, window: int, full: bool, steps: Steps | None
) -> ShardOrder:
    return ShardOrder(
        num_rows=num_rows,
        shard=part,
        num_logical_shards=num_logical_shards,
        seed=seed,
        window=window,
        full=full,
        steps=steps,
    )


def check_order(shard: Shard, shuffle: bool | int, by_global_batch: bool) -> None:
    """``ValueError`` where `ShardRows` would raise it."""
    if by_global_batch:
        _sizes_of(shard, shuffle)
    _window(shuffle)


@lru_cache(maxsize=1024)
def _whole(num_rows: int) -> Sequence[View]:
    return (View(0, num_rows),)


def _sizes_of(shard: Shard, shuffle: bool | int) -> dict[str, int]:
    if shuffle is not False or shard.repeat:
        raise ValueError(
            f"by_global_batch=True with shuffle={shuffle!r}, repeat={shard.repeat}: the order of the source is that of one "
            f"epoch, not shuffled. Give shuffle=False and repeat=False."
        )
    return {"num_logical_shards": shard.num_logical_shards, "global_batch_size": shard.global_batch_size}


def _window(shuffle: bool | int) -> int:
    if isinstance(shuffle, bool):
        return DEFAULT_WINDOW if shuffle else 0
    if not isinstance(shuffle, int | np.integer) or shuffle < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(
            f"shuffle={shuffle!r}: give True, False for the files' order, or the window in rows (at least 1)."
        )
    return int(shuffle)
