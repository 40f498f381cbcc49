"""`Shuffle`: permutes the samples of any node in windows."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from rescale_data.errors import DataStateError, checks_kinds
from rescale_data.nodes.abilities import Writes
from rescale_data.nodes.base import BaseNode, Node, View, bind_once, copy_of, go_to
from rescale_data.nodes.below import columns_of, epoch_end, num_below, place, shard_of, skip
from rescale_data.nodes.changing import is_pending, take_effect
from rescale_data.nodes.form import CHANGED
from rescale_data.nodes.room import Room
from rescale_data.nodes.tray import Tray, written
from rescale_data.order import permutation
from rescale_data.shard import Shard
from rescale_data.sources.decoded.cache import Made, cache, owner_of
from rescale_data.sources.decoded.sizes import size_of
from rescale_data.state import COUNT, Field, Ints

_EMITTED = 0


class Window(Made):
    """Samples that were drawn together; each stays until it is yielded.

    Args:
        samples: Samples as the node yields them, or a tray of one for each if the node writes.
        where: The place of each sample, for messages.
        order: ``int64[window]``, the order in which they are yielded.
        after: The position of the node after all of them.
    """

    def __init__(self, samples: list[Any], where: list[str], order: Ints, after: View) -> None:
        self.samples: list[Any] = samples
        self.where, self.order, self.after = where, order.tolist(), after
        self.nbytes = sum(size_of((s.arrays, s.lists) if isinstance(s, Tray) else s) for s in samples)

    def __len__(self) -> int:
        return len(self.order)


class Shuffle(Node[Any]):
    """Permutes the samples of a node in windows, such as packed sequences: one long document would fill several in a row.

    The order follows from the seed, the logical shard and the position of the node at the beginning of the window. The state
    is that position and the number of samples yielded from the window. A resume makes the samples of the window again, at most
    ``window`` of them. The process's cache holds the samples of the open windows of all logical shards. If they do not fit,
    windows are made again at each draw, and a warning names a ``window`` that fits. The warning comes when the loader is opened
    (over a packer), or when the first windows have been dropped.
    The last window of an epoch is shorter. After weights below a packer have changed, samples pass unpermuted until the packer
    begins a document with the new weights.

    Args:
        source: A node.
        window: Number of samples that are permuted together.
        shard: The logical shard. Default: the shard of the `Reader` below.

    Raises:
        ValueError: ``window`` is less than 1, or no node below reads a logical shard and none is given.

    Example:
        >>> import rescale_data as rd
        >>> list(rd.Shuffle(rd.Reader(range(8), rd.Shard(), shuffle=False), window=4))
        [0, 1, 2, 3, 4, 6, 7, 5]
    """

    FIELDS = (Field(("emitted",), limits=COUNT),)
    READS_AHEAD: ClassVar[bool] = True
    repeats_itself = True
    WITHIN = "window"

    @checks_kinds
    def __init__(self, source: BaseNode[Any], window: int, *, shard: Shard | None = None) -> None:
        if window < 1:
            raise ValueError(f"window={window}: give the samples that are permuted among themselves, at least 1.")
        super().__init__(source=source)
        self.window = window
        self._source = self.children["source"]
        self.writes = columns_of(self._source)
        shard = shard_of(self, shard)
        self._shard, self._order_key = shard.index, (shard.seed, shard.index, num_below(self, Shuffle))
        self._places = place(self._source)
        self._below = [node for _, node in self._source.walk() if node.reads is None and not node.reread]
        self._key, self._room = (owner_of(self), "window"), Room(self, "window", window)
        self._passes, self._where = True, ""
        self._let_pass(False)

    def seek(self) -> None:
        self._bookmark = self.position[self._slots("source")]
        self._read = self._over = False
        self._stands = True  # false if the source has ended, and has to be bound again

    def next(self) -> Any:
        return written(self) if self.writes else self._draw()

    def write(self, tray: Tray, place: int) -> None:
        drawn: Tray = self._draw()
        for name, array in drawn.arrays.items():
            tray.arrays[name][place] = array[0]
        for name, [value] in drawn.lists.items():
            tray.add(name, value)

    def prepare(self, rows: Ints, shards: Ints) -> None:
        if self.writes:  # then all samples have the same size
            self._room.expect(sum(length * dtype.itemsize for length, dtype in self.writes.values()))

    def skip(self, num_samples: int) -> None:
        """Skip whole windows by a call of the source's `skip`, if it knows how many samples are left; draw the others."""
        bind_once(self)
        while num_samples:
            whole = 0 if self.position[_EMITTED] or self._over else min(num_samples, self._left()) // self.window
            if whole and not self._is_pending():
                take_effect(self)
                self._aim(passes=False)
                skip(self._source, whole * self.window)
                self._bookmark[:] = self._source.position
                self._read = False
                num_samples -= whole * self.window
            else:
                self._draw()
                num_samples -= 1

    def epoch_end(self, rows: Ints, shards: Ints) -> tuple[Ints, Ints] | None:
        end = epoch_end(self._source, rows[:, 1:], shards)
        if end is None:
            return None
        after = rows.copy()
        after[:, _EMITTED], after[:, 1:] = 0, end[1]
        return end[0] - rows[:, _EMITTED], after

    def locate(self) -> str:
        return self._where

    def parameters(self) -> dict[str, Any]:
        return {"window": self.window}

    def _draw(self) -> Any:
        """Return the next sample, or a tray with it; raise `StopIteration` at the end of the epoch."""
        window: Window | None = cache().get(self._key) if self._read else None
        if window is None:
            window = self._make()
            if self._read:
                self._room.dropped(window.nbytes, len(window))
            if self.position[_EMITTED] >= len(window):
                raise DataStateError(CHANGED)
            cache().put(self._key, window)
            self._read = True
        number = self.position[_EMITTED]
        chosen = window.order[number]
        sample, window.samples[chosen], self._where = window.samples[chosen], None, window.where[chosen]
        if number + 1 < len(window):
            self.position[_EMITTED] = number + 1
        else:
            self._bookmark[:] = window.after
            self.position[_EMITTED], self._read = 0, False
            cache().forget(self._key)
        return sample

    def _make(self) -> Window:
        """Draw the window at the bookmark from the source."""
        if self._over:
            raise StopIteration
        take_effect(self)
        passes = self._is_pending()
        at = [self._bookmark[slot] for slot in self._places]
        self._aim(passes=passes)
        samples: list[Any] = []
        where: list[str] = []
        after = copy_of(self._bookmark)
        try:
            while len(samples) < (1 if passes else self.window):
                samples.append(self._draw_below())
                where.append(self._source.locate())
                after[:] = self._source.position
        except StopIteration:
            self._stands = False
            if not samples:
                self._over = True
                self._bookmark[:] = self._source.position
                raise
        return Window(samples, where, permutation(len(samples), "shuffle", *self._order_key, *at), after)

    def _draw_below(self) -> Any:
        if not (self.writes and isinstance(self._source, Writes)):
            return next(self._source)
        tray = Tray(self.writes, 1)
        self._source.write(tray, 0)
        return tray

    def _left(self) -> int:
        """Return the number of samples left in the epoch from the bookmark on; 0 if it is not known."""
        end = epoch_end(self._source, np.array(self._bookmark)[None], np.array([self._shard]))
        return 0 if end is None else int(end[0][0])

    # Weights that change below

    def _is_pending(self) -> bool:
        """True if samples pass one by one, until a node below that is within a document has let a change take effect."""
        return not (self.reread or self.position[_EMITTED]) and is_pending(self._source, self._bookmark)

    def _aim(self, *, passes: bool) -> None:
        """Move the source to the bookmark, unless it stands there; ``passes`` is as in `_let_pass`."""
        if passes != self._passes or not self._stands or self._source.position != self._bookmark:
            self._let_pass(passes)
            go_to(self._source, self._bookmark)
            self._stands = True

    def _let_pass(self, passes: bool) -> None:
        self._passes = passes
        for node in self._below:
            node.reread = not passes
