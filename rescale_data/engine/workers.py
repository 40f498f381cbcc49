"""The work of a worker process: makes every K-th micro batch of a segment, and packs several into each message.

With each micro batch, a message carries the rows of the table that it advanced. So the trainer's process knows the exact
position of every shard after the batches that it has received. Workers are never asked for their state.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info

from rescale_data.engine.feed import InProcessFeed
from rescale_data.engine.message import MAX_MESSAGE_VALUES, Message, PackedValue, Slabs, from_bytes
from rescale_data.engine.micro_batch import MicroBatch
from rescale_data.engine.options import Options
from rescale_data.engine.recipe import Recipe
from rescale_data.engine.runner import NoSamplesLeft, ShardRunner
from rescale_data.engine.schema import Schema
from rescale_data.engine.segment import EpochSegment
from rescale_data.engine.watch import SLOW_SECONDS, Watchdog, describe
from rescale_data.errors import to_picklable
from rescale_data.sources.counts import COUNTER_INDICES, MADE_BATCHES, MAKE_SECONDS, read_counters
from rescale_data.sources.decoded.cache import share_budget_with
from rescale_data.state import Ints

_TARGET_MESSAGE_BYTES = 4 * 2**20  # large enough to make messages cheap, small enough to keep little in flight
_MAX_SECONDS_PER_MESSAGE = 0.05
_CHECK_SECONDS = 1.0  # interval at which a worker checks that the trainer's process lives
_MAX_TRACEBACK_CHARS = 2000
_TEXT_BYTES = 512


@dataclass(frozen=True)
class BeginCommand:
    """A command to workers: make the micro batches of a segment, from a given micro batch on.

    Args:
        command_id: The number of the command, counted by the pool; a segment may be begun several times.
        first_batch: The first micro batch; worker i makes ``first_batch + i``, ``first_batch + i + K``, ...
        num_slabs: The number of slabs that a worker uses in turn.
        table: ``int64[N, columns]``, the positions of all logical shards at the first micro batch.
    """

    command_id: int
    segment: EpochSegment
    first_batch: int
    num_slabs: int
    table: Ints


class WorkerStatus:
    """Memory shared by the trainer and its workers: counts and a text of each worker, and the number of the current command.

    Attributes:
        counts: The counters of each worker, ``float64[num_workers, len(COUNTER_INDICES)]``.
    """

    def __init__(self, num_workers: int) -> None:
        self._wanted_command_id = torch.zeros(1, dtype=torch.int64, device="cpu").share_memory_()
        self.counts = torch.zeros(num_workers, len(COUNTER_INDICES), dtype=torch.float64, device="cpu").share_memory_()
        self._activity_texts = torch.zeros(num_workers, _TEXT_BYTES, dtype=torch.uint8, device="cpu").share_memory_()

    @property
    def wanted_command_id(self) -> int:
        """The number of the `BeginCommand` that the trainer wants; workers stop making micro batches for any other."""
        return int(self._wanted_command_id.item())

    @wanted_command_id.setter
    def wanted_command_id(self, number: int) -> None:
        self._wanted_command_id.fill_(number)

    def write_activity(self, worker: int, text: str) -> None:
        """Write a text that says what a worker is doing; the text is empty unless the work takes long."""
        text_bytes = np.frombuffer(text.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0"), dtype=np.uint8)
        self._activity_texts[worker].numpy()[:] = text_bytes

    def read_activity(self, worker: int) -> str:
        return self._activity_texts[worker].numpy().tobytes().rstrip(b"\0").decode(errors="replace")


class Worker:
    """Makes micro batches in a worker process, in the same way as the trainer's process makes them without workers."""

    def __init__(self, recipe: Recipe, options: Options) -> None:
        self.recipe, self._collate, self._init_fn = recipe, options.collate_fn, options.worker_init_fn
        self._report_after_seconds, self.has_status = SLOW_SECONDS / 2, False  # before the trainer warns
        self._feed: InProcessFeed | None = None

    def attach(self, worker_number: int, status: WorkerStatus) -> None:
        """Set the number of this worker, and the shared memory in which it reports work that takes long."""
        if self._init_fn is not None:
            self._init_fn(worker_number)
        self.has_status = True
        self._worker_number, self._status = worker_number, status
        self.watch = Watchdog(
            self._report_after_seconds, lambda _, frame: status.write_activity(worker_number, describe(frame))
        )

    def run(
        self, worker_number: int, num_workers: int, pipe: Connection, slabs: Any, status: WorkerStatus, seed: list[int]
    ) -> None:
        """Run the commands of the trainer, in a worker process, until one is `None` or the trainer is gone.

        Args:
            slabs: A semaphore, released for each slab that is free.
            seed: The seed of random numbers that the user's functions draw.
        """
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer decides whether to end its workers, or to go on
        threading.Thread(target=_exit_after_parent, args=(multiprocessing.parent_process(),), daemon=True).start()
        _set_worker_info(worker_number, num_workers, _seed_generators(seed), self.recipe.pipeline)
        torch.set_num_threads(1)
        share_budget_with(os.getppid(), num_workers)  # the trainer's process and the other workers
        with suppress(EOFError, ConnectionError):  # the trainer is gone
            while (packed_command := pipe.recv()) is not None:
                command: BeginCommand = from_bytes(*packed_command)
                try:
                    if not self.has_status:
                        self.attach(worker_number, status)
                        read_counters().move_values_to(status.counts[worker_number].numpy())
                        self.watch.start()
                    _reset_semaphore(slabs, command.num_slabs)
                    for message in self.messages(command, slabs.acquire):
                        pipe.send((command.command_id, message))
                except Exception:
                    traceback_text = traceback.format_exc()[-_MAX_TRACEBACK_CHARS:]
                    error = RuntimeError(f"Worker process {worker_number} failed:\n{traceback_text}")
                    pipe.send((command.command_id, error))
                pipe.send((command.command_id, None))

    def messages(self, command: BeginCommand, await_slab: Callable[[], object]) -> Iterator[Message]:
        """Yield messages with the micro batches of a segment, until other work is wanted or an error occurs.

        An error, or `NoSamplesLeft`, is the last value.

        The first messages are small, so that the first batch does not wait for more batches.

        Args:
            await_slab: Returns when the next slab is free.
        """
        slabs, slab, max_batches = Slabs(), 0, 1
        packed_values = self._packed_batches(command)
        while True:
            await_slab()
            start_time, message_values, num_bytes = time.perf_counter(), list[PackedValue](), 0
            for value in islice(packed_values, max_batches):
                message_values.append(value)
                num_bytes += value.num_bytes
                if num_bytes >= _TARGET_MESSAGE_BYTES or time.perf_counter() - start_time >= _MAX_SECONDS_PER_MESSAGE:
                    break
            if not message_values or not self._is_wanted(command):
                return
            message = slabs.pack(slab, message_values)
            read_counters().add(MAKE_SECONDS, time.perf_counter() - start_time)
            yield message
            slab, max_batches = (slab + 1) % command.num_slabs, min(2 * max_batches, MAX_MESSAGE_VALUES)

    def _is_wanted(self, command: BeginCommand) -> bool:
        return self._status.wanted_command_id == command.command_id

    def _packed_batches(self, command: BeginCommand) -> Iterator[PackedValue]:
        stop_batch = sys.maxsize if command.segment.stop is None else command.segment.stop
        try:
            feed = self._begin_feed(command)
            for _ in range(
                command.first_batch + self._worker_number, stop_batch, command.segment.layout.workers_per_rank
            ):
                if not self._is_wanted(command):
                    return
                packed_micro_batch = PackedValue(self._make_watched(feed))
                read_counters().add(MADE_BATCHES, 1)
                yield packed_micro_batch
        except NoSamplesLeft as error:
            yield PackedValue(error)
        except Exception as error:
            sendable_error = to_picklable(error)
            sendable_error.add_note(f"In worker process {self._worker_number}:\n{traceback.format_exc()}")
            yield PackedValue(sendable_error)

    def _begin_feed(self, command: BeginCommand) -> InProcessFeed:
        self._status.write_activity(self._worker_number, "")
        read_counters().values[MADE_BATCHES] = 0
        feed = self._feed
        if feed is None:
            schema = Schema(self.recipe.build(0))  # as in the trainer's process
            feed = self._feed = InProcessFeed(ShardRunner(self.recipe, schema), self._collate)
        first_batch, num_workers = command.first_batch + self._worker_number, command.segment.layout.workers_per_rank
        feed.begin(command.segment, command.table, first_batch, num_workers)
        return feed

    def _make_watched(self, feed: InProcessFeed) -> MicroBatch:
        watch = self.watch
        watch.thread_id, watch.start_time = threading.get_ident(), time.perf_counter()
        try:
            micro_batch = feed.next()
        finally:
            watch.start_time = None
        if watch.report_made:
            watch.report_made = False
            self._status.write_activity(self._worker_number, "")
        return micro_batch


def _set_worker_info(worker_number: int, num_workers: int, seed: int, pipeline: Any) -> None:
    """Make ``torch.utils.data.get_worker_info()``, which datasets call, return the given values in this process.

    Torch has no public way to set them: this is the only use of a private name of torch.
    """
    module: Any = sys.modules[get_worker_info.__module__]
    module._worker_info = module.WorkerInfo(id=worker_number, num_workers=num_workers, seed=seed, dataset=pipeline)


def _reset_semaphore(semaphore: Any, num_slabs: int) -> None:
    """Set the semaphore to `num_slabs` free slabs (shared buffers), whatever its value was before."""
    while semaphore.acquire(block=False):
        pass
    for _ in range(num_slabs):
        semaphore.release()


def _seed_generators(seed_numbers: list[int]) -> int:
    """Seed the random number generators of this process, and return the seed."""
    seed = int(np.random.SeedSequence(seed_numbers).generate_state(1, np.uint64)[0])
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    return seed


def _exit_after_parent(parent: Any) -> None:
    """End this process once the trainer's process has ended; otherwise workers and their fork server would live on."""
    while not wait([parent.sentinel], _CHECK_SECONDS) and _process_exists(parent.pid):
        pass
    os._exit(1)


def _process_exists(pid: int) -> bool:
    """True if the process exists. Its sentinel may hide its end: processes that were forked from it may hold the pipe open."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
