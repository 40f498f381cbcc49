"""Feeds: produce the micro batches of a segment in this process, in a background thread, or from another feed.

    InThread(FunctionFeed(InProcess(runner, collate), pin), 4)      made and pinned in a thread, 4 ahead

A micro batch carries the rows of the table that it advanced. So the micro batch itself gives the position, and feeds above need
no state. Other modules have more feeds: worker processes (`rescale_data.engine.pool`), balanced steps
(`rescale_data.engine.balanced`).
"""

from __future__ import annotations

import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Container
from functools import partial
from math import inf
from queue import SimpleQueue
from typing import Any

from rescale_data.engine.collate import with_valid_mask
from rescale_data.engine.micro_batch import MicroBatch
from rescale_data.engine.runner import Collate, NoSamplesLeft, ShardRunner
from rescale_data.engine.segment import EpochSegment, LookAhead
from rescale_data.engine.threads import TaskThread, call_at_exit
from rescale_data.engine.watch import describe, stacks
from rescale_data.layout.batch_shards import BatchShards, BatchShardsFunction
from rescale_data.sources.counts import MAKE_SECONDS, by_name, read_counters
from rescale_data.state import Ints


class BatchFeed(ABC):
    """Base class of feeds: a feed produces the micro batches of a segment in order.

    Attributes:
        is_prefetching: True if the feed makes them in the background, from `begin` on.
    """

    is_prefetching = False

    @abstractmethod
    def begin(self, segment: EpochSegment, table: Ints, first_batch: int) -> None:
        """Begin to produce micro batches of a segment from number ``first_batch`` on, from the positions in ``table``."""

    @abstractmethod
    def next(self) -> MicroBatch:
        """Return the next micro batch of the segment; after an error or `stop`, call `begin` first.

        Raises:
            NoSamplesLeft: A shard has no sample left for the micro batch, or the segment is over.
        """

    def progress(self) -> dict[str, float]:
        """Return counters for a logger, by name: about reads, and the number of batches that are ready."""
        return {}

    def activity(self) -> str:
        """Return a text that says what `next` is waiting for; empty if batches are made in the calling thread."""
        return ""

    def stop(self, *, wait: bool = True) -> None:  # noqa: B027 - where nothing is made ahead there is nothing to stop
        """Stop making micro batches in this process; a `next` in another thread raises an error, if it waits for other ranks.

        Args:
            wait: True to return only when the caller may use the runner and the sources. Otherwise the caller may use them only
                after another `stop`.
        """

    def close(self) -> None:  # noqa: B027
        """End the worker processes or the thread of the feed; `begin` starts them again."""


class InProcessFeed(BatchFeed):
    """A feed that makes each micro batch in the calling process, when `next` is called."""

    def __init__(self, runner: ShardRunner, collate: Collate | None) -> None:
        self.runner = runner
        self._make: Callable[[BatchShards, Collate | None], MicroBatch] = runner.make_micro_batch
        self._collate, self._draw = collate, self._make
        self._shards_of_batch: BatchShardsFunction | None = None
        self._segment: EpochSegment | None = None
        self._u, self._micro_batch_stride, self._pads_tail = 0, 1, False
        self._make_seconds = self._counted_seconds = 0.0  # spent on making; the part that is already in `counts`

    def begin(self, segment: EpochSegment, table: Ints, first_batch: int, micro_batch_stride: int = 1) -> None:
        """Begin to produce every ``micro_batch_stride``-th micro batch of a segment from number ``first_batch`` on."""
        self.runner.load(table, segment.histories)
        self._segment, self._u, self._micro_batch_stride = segment, first_batch, micro_batch_stride
        self._shards_of_batch, self._pads_tail = segment.batch_shards_function(table), segment.pads
        self._draw = partial(self._look_ahead, segment.num_samples) if isinstance(segment, LookAhead) else self._make

    def next(self) -> MicroBatch:
        start_time, u = time.perf_counter(), self._u
        # After an error the rows are past what was delivered
        batch_shards, self._shards_of_batch = self._shards_of_batch, None
        if batch_shards is None or self._segment is None:
            raise NoSamplesLeft
        if not self.runner.is_serving:  # the number of the first micro batch determines the shards of a worker
            self.runner.serve_shards(self._segment.served_shards(u))
        batch = self._draw(batch_shards(u), self._collate)
        if self._pads_tail:
            batch = batch._replace(batch=with_valid_mask(batch.batch, batch.num_real, len(batch.shards)))
        self._shards_of_batch, self._u = batch_shards, u + self._micro_batch_stride
        self._make_seconds += time.perf_counter() - start_time
        return batch

    def progress(self) -> dict[str, float]:
        seconds = self._make_seconds
        read_counters().add(MAKE_SECONDS, seconds - self._counted_seconds)
        self._counted_seconds = seconds
        return {"batches_ready": 0.0, **by_name(read_counters().values)}

    def close(self) -> None:
        self._shards_of_batch = None

    def _look_ahead(self, num_samples: int, shard: Any, _: Collate | None) -> Any:
        return *self.runner.look_ahead(shard, num_samples), self.runner.table[shard].copy()


class WrappedFeed(BatchFeed):
    """Base class of feeds that wrap another feed: passes all calls on to it."""

    def __init__(self, feed: BatchFeed) -> None:
        self.feed, self.is_prefetching = feed, feed.is_prefetching

    def begin(self, segment: EpochSegment, table: Ints, first_batch: int) -> None:
        self.feed.begin(segment, table, first_batch)

    def next(self) -> MicroBatch:
        return self.feed.next()

    def progress(self) -> dict[str, float]:
        return self.feed.progress()

    def activity(self) -> str:
        return self.feed.activity()

    def stop(self, *, wait: bool = True) -> None:
        self.feed.stop(wait=wait)

    def close(self) -> None:
        self.feed.close()


class FunctionFeed(WrappedFeed):
    """A feed that applies a function to each batch of another feed."""

    def __init__(self, feed: BatchFeed, function: Callable[[Any], Any]) -> None:
        super().__init__(feed)
        self._function = function

    def next(self) -> MicroBatch:
        micro_batch = self.feed.next()
        return micro_batch._replace(batch=self._function(micro_batch.batch))


class InThreadFeed(WrappedFeed):
    """A feed that calls another feed in a background thread, up to some micro batches ahead of the caller.

    An error is raised when its micro batch is due.

    Between `begin` and `stop` the feed below belongs to the thread. Collectives stay in the caller's thread. The thread is a
    daemon, which the interpreter does not wait for, and `atexit` interrupts it: otherwise a thread that waits for other ranks
    would keep the process alive.

    Args:
        max_batches_ahead: The number of micro batches that the thread may be ahead.
    """

    def __init__(self, feed: BatchFeed, max_batches_ahead: int) -> None:
        super().__init__(feed)
        self.is_prefetching, self._max_batches_ahead = True, max_batches_ahead
        self._thread_id = 0
        self._thread: TaskThread | None = None
        self._is_stopped = True
        self._finished_batches: SimpleQueue[MicroBatch | BaseException] = SimpleQueue()
        self._num_to_request = self._num_untaken = 0.0
        self._process_id = os.getpid()  # the process that has the thread

    def begin(self, segment: EpochSegment, table: Ints, first_batch: int) -> None:
        self.stop()
        self._process_id = os.getpid()
        self.feed.begin(segment, table, first_batch)
        self._is_stopped = False
        self._thread = TaskThread("ahead")
        call_at_exit(self, lambda feed: feed.stop(wait=False))
        self._num_to_request = self._num_untaken = inf if segment.stop is None else segment.stop - first_batch
        for _ in range(int(min(self._max_batches_ahead, self._num_to_request))):
            self._request_one()

    def next(self) -> MicroBatch:
        finished_batches = self._finished_batches  # before the check: `stop` changes both in the other order
        if self._num_untaken <= 0:
            raise NoSamplesLeft
        micro_batch_or_error = finished_batches.get()
        self._num_untaken -= 1
        if isinstance(micro_batch_or_error, BaseException):
            self._num_untaken = 0
            try:
                raise micro_batch_or_error
            finally:
                del micro_batch_or_error  # its traceback holds this frame
        self._request_one()
        return micro_batch_or_error

    def progress(self) -> dict[str, float]:
        return {**self.feed.progress(), "batches_ready": float(self._finished_batches.qsize())}

    def activity(self) -> str:
        return self.feed.activity() or f"waiting for the thread ahead, {describe(stacks().get(self._thread_id))}"

    def stop(self, *, wait: bool = True) -> None:
        if self._process_id != os.getpid():  # a forked process has no thread
            return
        self._is_stopped, self._num_untaken = True, 0
        self._finished_batches.put(NoSamplesLeft())  # for a thread that waits for a batch that is not made any more
        self._finished_batches = SimpleQueue()
        if self._thread is not None:
            self.feed.stop(wait=False)
            if wait:  # otherwise, or after Ctrl-C, the thread may still be in a read: a later `stop` waits
                self._thread.end()
                self._thread = None
        self.feed.stop(wait=wait)  # the feed below may have a thread of its own, which uses the runner

    def close(self) -> None:
        self.stop()
        self.feed.close()

    def _request_one(self) -> None:
        if self._thread is not None and self._num_to_request:
            self._num_to_request -= 1
            self._thread.put(self._make_one_batch)

    def _make_one_batch(self) -> None:
        """Make one micro batch in the background thread, unless the feed has stopped or has failed before."""
        # Before the check, as in `next`: the error of a stopped read is nobody's
        finished_batches = self._finished_batches
        if self._is_stopped:
            return
        self._thread_id = threading.get_ident()
        try:
            finished_batches.put(self.feed.next())
        except BaseException as error:
            self._is_stopped = True
            finished_batches.put(error)


class SampleOriginFeed(InProcessFeed):
    """A feed whose micro batches hold the origins (source rows) of the samples of some shards, in place of the samples."""

    def __init__(self, runner: ShardRunner, shards: Container[int]) -> None:
        super().__init__(runner, None)
        self._make = lambda batch_shards, _collate: runner.make_origin_batch(batch_shards, shards)
