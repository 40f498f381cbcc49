"""`Shuffle`: permutes the samples of any node in windows."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np

from rescale_data.errors import DataStateError, checks_argument_types
from rescale_data.nodes.abilities import FillsBatch
from rescale_data.nodes.base import BaseNode, Node, View, bind_once, count_until_end, go_to
from rescale_data.nodes.batch_buffer import BatchBuffer, ColumnFormats, written_sample
from rescale_data.nodes.below import columns_of, epoch_end, num_nodes_below, sample_id_slots, shard_of, skip
from rescale_data.nodes.cache_check import CacheCheck
from rescale_data.nodes.changing import apply_changes, is_node_change_due
from rescale_data.nodes.sample_format import BAD_STATE_MESSAGE
from rescale_data.order import permutation
from rescale_data.shard import Shard
from rescale_data.sources.decoded.cache import CostlyValue, cache, owner_id
from rescale_data.sources.decoded.sizes import memory_bytes_of
from rescale_data.state import COUNT_LIMITS, Field, Ints, copy_of

_EMITTED_SLOT = 0


class Window(CostlyValue):
    """Samples that are permuted together; each is kept until it is yielded.

    Args:
        samples: Samples as the node yields them, or a buffer of one for each if the node writes.
        locations: The location of each sample, for messages.
        order: ``int64[window]``, the order in which they are yielded.
        next_position: The position of the node after all of them.
    """

    def __init__(self, samples: list[Any], locations: list[str], order: Ints, next_position: View) -> None:
        self.samples: list[Any] = samples
        self.locations, self.order, self.next_position = locations, order.tolist(), next_position
        self.nbytes = sum(
            memory_bytes_of((s.arrays, s.list_columns) if isinstance(s, BatchBuffer) else s) for s in samples
        )

    def __len__(self) -> int:
        return len(self.order)


class Shuffle(Node[Any]):
    """Permutes a node's samples within windows, for example after packing, where a long document fills several samples.

    The order follows from the seed, the logical shard and the position of the node at the beginning of the window. The state
    is that position and the number of samples yielded from the window. A resume makes the samples of the window again, at most
    ``window`` of them. The process's cache holds the samples of the open windows of all logical shards. If they do not fit,
    windows are made again at each draw, and a warning names a ``window`` that fits. The warning comes when the loader
    is built (over a packer), else with the first full window, or when the cache has evicted windows.
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

    FIELDS = (Field(("emitted",), limits=COUNT_LIMITS),)
    READS_AHEAD: ClassVar[bool] = True
    epochs_are_equal = True
    RESUME_UNIT = "window"
    written_columns: ColumnFormats = MappingProxyType({})

    @checks_argument_types
    def __init__(self, source: BaseNode[Any], window: int, *, shard: Shard | None = None) -> None:
        if window < 1:
            raise ValueError(f"window={window}: give the samples that are permuted among themselves, at least 1.")
        super().__init__(source=source)
        self.window = window
        self._source = self.children["source"]
        self.written_columns = columns_of(self._source)
        shard = shard_of(self, shard)
        self._shard_index, self._order_key = shard.index, (shard.seed, shard.index, num_nodes_below(self, Shuffle))
        self._sample_id_slots = sample_id_slots(self._source)
        self._inner_nodes = [node for _, node in self._source.walk() if node.reads is None and not node.is_reread]
        self._cache_key, self._cache_room_warner = (owner_id(self), "window"), CacheCheck(self, "window", window)
        self._is_unpermuted, self._location = True, ""
        self._set_unpermuted(False)

    def seek(self) -> None:
        self._bookmark = self.position[self._slots("source")]
        self._is_window_cached = self._is_epoch_over = False
        self._is_source_bound = True  # false if the source has ended, and has to be bound again

    def next(self) -> Any:
        return written_sample(self) if self.written_columns else self._draw_sample()

    def write(self, buffer: BatchBuffer, row_index: int) -> None:
        sample: BatchBuffer = self._draw_sample()
        for name, array in sample.arrays.items():
            buffer.arrays[name][row_index] = array[0]
        for name, [value] in sample.list_columns.items():
            buffer.add(name, value)

    def check_cache(self, num_shards: int, num_workers: int) -> None:
        # Only samples that are written have a size that is known before they are made
        sample_bytes = sum(length * dtype.itemsize for length, dtype in self.written_columns.values())
        self._cache_room_warner.warn_if_too_small(sample_bytes, num_shards, num_workers)

    def skip(self, num_samples: int) -> int:
        """Skip samples: whole windows by `skip` of the source if it knows how many are left, the others by drawing them."""
        bind_once(self)
        num_left = num_samples
        while num_left:
            is_between = not (self.position[_EMITTED_SLOT] or self._is_epoch_over)
            num_windows = min(num_left, self._num_samples_left()) // self.window if is_between else 0
            if num_windows and not self._is_node_change_due():
                apply_changes(self)
                self._seek_source_to_window(unpermuted=False)
                num_left -= skip(self._source, num_windows * self.window)
                self._bookmark[:] = self._source.position
                self._is_window_cached = False
            elif count_until_end(self._draw_sample, 1):
                num_left -= 1
            else:
                break
        return num_samples - num_left

    def epoch_end(self, rows: Ints, shards: Ints) -> tuple[Ints, Ints] | None:
        source_end = epoch_end(self._source, rows[:, 1:], shards)
        if source_end is None:
            return None
        next_rows = rows.copy()
        next_rows[:, _EMITTED_SLOT], next_rows[:, 1:] = 0, source_end[1]
        return source_end[0] - rows[:, _EMITTED_SLOT], next_rows

    def locate(self) -> str:
        return self._location

    def parameters(self) -> dict[str, Any]:
        return {"window": self.window}

    def _draw_sample(self) -> Any:
        """Return the next sample, or a batch buffer that holds it; raise `StopIteration` at the end of the epoch."""
        window: Window | None = cache().get(self._cache_key) if self._is_window_cached else None
        if window is None:
            window = self._make_window()
            self._cache_room_warner.warn_if_full(window.nbytes, len(window), was_evicted=self._is_window_cached)
            if self.position[_EMITTED_SLOT] >= len(window):
                raise DataStateError(BAD_STATE_MESSAGE)
            cache().put(self._cache_key, window)
            self._is_window_cached = True
        order_index = self.position[_EMITTED_SLOT]
        chosen = window.order[order_index]
        sample, window.samples[chosen], self._location = window.samples[chosen], None, window.locations[chosen]
        if order_index + 1 < len(window):
            self.position[_EMITTED_SLOT] = order_index + 1
        else:
            self._bookmark[:] = window.next_position
            self.position[_EMITTED_SLOT], self._is_window_cached = 0, False
            cache().forget(self._cache_key)
        return sample

    def _make_window(self) -> Window:
        """Draw the samples of a new window from the source, and the order in which to yield them."""
        if self._is_epoch_over:
            raise StopIteration
        apply_changes(self)
        unpermuted = self._is_node_change_due()
        key_values = [self._bookmark[slot] for slot in self._sample_id_slots]
        self._seek_source_to_window(unpermuted=unpermuted)
        samples: list[Any] = []
        locations: list[str] = []
        position = copy_of(self._bookmark)
        try:
            while len(samples) < (1 if unpermuted else self.window):
                samples.append(self._draw_from_source())
                locations.append(self._source.locate())
                position[:] = self._source.position
        except StopIteration:
            self._is_source_bound = False
            if not samples:
                self._is_epoch_over = True
                self._bookmark[:] = self._source.position
                raise
        return Window(samples, locations, permutation(len(samples), "shuffle", *self._order_key, *key_values), position)

    def _draw_from_source(self) -> Any:
        if not (self.written_columns and isinstance(self._source, FillsBatch)):
            return next(self._source)
        buffer = BatchBuffer(self.written_columns, 1)
        self._source.write(buffer, 0)
        return buffer

    def _num_samples_left(self) -> int:
        """Return the number of samples from the beginning of the window to the end of the epoch; 0 if unknown."""
        source_end = epoch_end(self._source, np.array(self._bookmark)[None], np.array([self._shard_index]))
        return 0 if source_end is None else int(source_end[0][0])

    # Weights that change below

    def _is_node_change_due(self) -> bool:
        """True if samples pass unpermuted for now, because a node below must finish a document before a change applies."""
        return not (self.is_reread or self.position[_EMITTED_SLOT]) and is_node_change_due(self._source, self._bookmark)

    def _seek_source_to_window(self, *, unpermuted: bool) -> None:
        """Move the source to the window's beginning, unless it is there; ``unpermuted`` is as in `_set_unpermuted`."""
        if unpermuted != self._is_unpermuted or not self._is_source_bound or self._source.position != self._bookmark:
            self._set_unpermuted(unpermuted)
            go_to(self._source, self._bookmark)
            self._is_source_bound = True

    def _set_unpermuted(self, is_unpermuted: bool) -> None:
        self._is_unpermuted = is_unpermuted
        for node in self._inner_nodes:
            node.is_reread = not is_unpermuted
