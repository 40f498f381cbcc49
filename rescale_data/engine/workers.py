"""The work of a worker process: makes every K-th micro batch of a segment, and packs several into each message.

With each micro batch, a message carries the rows of the table that it advanced. So the trainer's process knows the exact
position of every shard after the batches that it has received. Workers are never asked for their state.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

from rescale_data.engine.feed import InProcessFeed
from rescale_data.engine.message import MAX_MESSAGE_VALUES, Message, PackedValue, Slabs
from rescale_data.engine.micro_batch import MicroBatch
from rescale_data.engine.options import Options
from rescale_data.engine.recipe import Recipe
from rescale_data.engine.runner import NoSamplesLeft, ShardRunner
from rescale_data.engine.schema import Schema
from rescale_data.engine.segment import Segment
from rescale_data.engine.status import WorkerStatus
from rescale_data.engine.watch import SLOW_SECONDS, Watch, describe
from rescale_data.errors import to_picklable
from rescale_data.sources.counts import MADE_BATCHES, MAKE_SECONDS, read_counters
from rescale_data.state import Ints

_MESSAGE_BYTES = 4 * 2**20  # large enough to make messages cheap, small enough to keep little in flight
_MESSAGE_SECONDS = 0.05


@dataclass(frozen=True)
class BeginCommand:
    """A command to workers: make the micro batches of a segment, from a given micro batch on.

    Args:
        command_id: The number of the command, counted by the pool; a segment may be begun several times.
        first_batch: The first micro batch; worker i makes ``first_u + i``, ``first_u + i + K``, ...
        num_slabs: The number of slabs that a worker uses in turn.
        table: ``int64[N, columns]``, the positions of all logical shards at the first micro batch.
    """

    command_id: int
    segment: Segment
    first_batch: int
    num_slabs: int
    table: Ints


class Worker:
    """Makes micro batches in a worker process, in the same way as the trainer's process makes them without workers."""

    def __init__(self, recipe: Recipe, options: Options) -> None:
        self.recipe, self._collate, self._init_fn = recipe, options.collate_fn, options.worker_init_fn
        self._report_after_seconds, self.is_attached = SLOW_SECONDS / 2, False  # before the trainer warns
        self._feed: InProcessFeed | None = None

    def attach(self, worker_number: int, status: WorkerStatus) -> None:
        """Set the number of this worker, and the shared memory in which it reports work that takes long."""
        if self._init_fn is not None:
            self._init_fn(worker_number)
        self.is_attached = True
        self._worker_number, self._status = worker_number, status
        self.watch = Watch(
            self._report_after_seconds, lambda _, frame: status.write_activity(worker_number, describe(frame))
        )

    def messages(self, command: BeginCommand, await_slab: Callable[[], object]) -> Iterator[Message]:
        """Yield messages with the micro batches of a segment, until other work is wanted or an error occurs.

        An error, or `NoSamplesLeft`, is the last value.

        The first messages are small, so that the first batch does not wait for more batches.

        Args:
            await_slab: Returns when the next slab is free.
        """
        slabs, slab, max_batches = Slabs(), 0, 1
        packed_values = self._values(command)
        while True:
            await_slab()
            start_time, message_values, num_bytes = time.perf_counter(), list[PackedValue](), 0
            for value in islice(packed_values, max_batches):
                message_values.append(value)
                num_bytes += value.num_bytes
                if num_bytes >= _MESSAGE_BYTES or time.perf_counter() - start_time >= _MESSAGE_SECONDS:
                    break
            if not message_values or not self._is_wanted(command):
                return
            message = slabs.pack(slab, message_values)
            read_counters().add(MAKE_SECONDS, time.perf_counter() - start_time)
            yield message
            slab, max_batches = (slab + 1) % command.num_slabs, min(2 * max_batches, MAX_MESSAGE_VALUES)

    def _is_wanted(self, command: BeginCommand) -> bool:
        return self._status.wanted_command_id == command.command_id

    def _values(self, command: BeginCommand) -> Iterator[PackedValue]:
        stop_batch = sys.maxsize if command.segment.stop is None else command.segment.stop
        try:
            feed = self._begin_feed(command)
            for _ in range(
                command.first_batch + self._worker_number, stop_batch, command.segment.layout.workers_per_rank
            ):
                if not self._is_wanted(command):
                    return
                packed_micro_batch = PackedValue(self._make(feed))
                read_counters().add(MADE_BATCHES, 1)
                yield packed_micro_batch
        except NoSamplesLeft as error:
            yield PackedValue(error)
        except Exception as error:
            sendable_error = to_picklable(error)
            sendable_error.add_note(f"In worker process {self._worker_number}:\n{traceback.format_exc()}")
            yield PackedValue(sendable_error)

    def _begin_feed(self, begin: BeginCommand) -> InProcessFeed:
        self._status.write_activity(self._worker_number, "")
        read_counters().values[MADE_BATCHES] = 0
        feed = self._feed
        if feed is None:
            schema = Schema(self.recipe.build(0))  # as in the trainer's process
            feed = self._feed = InProcessFeed(ShardRunner(self.recipe, schema), self._collate)
        first_batch, num_workers = begin.first_batch + self._worker_number, begin.segment.layout.workers_per_rank
        feed.begin(begin.segment, begin.table, first_batch, num_workers)
        return feed

    def _make(self, feed: InProcessFeed) -> MicroBatch:
        watch = self.watch
        watch.start_time = time.perf_counter()
        try:
            micro_batch = feed.next()
        finally:
            watch.start_time = None
        if watch.report_made:
            watch.report_made = False
            self._status.write_activity(self._worker_number, "")
        return micro_batch
