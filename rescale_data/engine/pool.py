"""`WorkerFeed`: a feed with K worker processes that make micro batches in turn."""

from __future__ import annotations

import weakref
from queue import Empty
from typing import Any

import torch

from rescale_data.engine.feed import BatchFeed
from rescale_data.engine.micro_batch import MicroBatch
from rescale_data.engine.options import Options
from rescale_data.engine.processes import WorkerProcesses, WorkerRun, multiprocessing_context, require_pickle
from rescale_data.engine.recipe import Recipe
from rescale_data.engine.runner import NoSamplesLeft
from rescale_data.engine.segment import EpochSegment, LookAhead
from rescale_data.engine.workers import BeginCommand, Worker
from rescale_data.sources.counts import MADE_BATCHES, by_name, read_counters
from rescale_data.state import Ints


class WorkerFeed(BatchFeed):
    """A feed that makes micro batches in K worker processes; `begin` starts the processes.

    Args:
        pin_memory: True if batches are to arrive in page-locked memory.

    Attributes:
        uses_fork: True if worker processes are forks of this one.
    """

    is_prefetching = True

    def __init__(self, recipe: Recipe, options: Options, *, pin_memory: bool) -> None:
        self._worker = Worker(recipe, options)
        user_functions = {name: getattr(options, name) for name in ("collate_fn", "worker_init_fn")}
        require_pickle(self._worker, pipeline=recipe.pipeline, **user_functions)
        self._context = multiprocessing_context(options.multiprocessing_context)
        self.uses_fork = self._context.get_start_method() == "fork"
        self._num_workers, self._num_slabs = options.num_workers, options.batches_ahead + 1
        self._pin_memory, self._timeout = pin_memory, options.timeout
        self._processes: WorkerProcesses | None = None
        self._num_starts = self._num_begin_commands = self._num_taken_batches = 0
        self._worker_run: WorkerRun | None = None
        self._num_micro_batches: int | None = 0

    def begin(self, segment: EpochSegment, table: Ints, first_batch: int) -> None:
        self._num_begin_commands += 1
        begin = BeginCommand(self._num_begin_commands, segment, first_batch, self._num_slabs, table)
        run, self._num_taken_batches = WorkerRun(begin, self._num_workers, pin_memory=self._pin_memory), 0
        self._num_micro_batches = None if segment.stop is None else segment.stop - first_batch
        if self._processes is not None and self._processes.failure is not None:
            self.close()
        if self._processes is None:
            self._num_starts += 1
            seed = [torch.initial_seed(), self._num_starts]
            processes = WorkerProcesses(self._context, self._worker, self._num_workers, seed)
            self._processes, self._finalizer = processes, weakref.finalize(self, processes.end)
        self._processes.wait_started()
        self._processes.begin(run)
        self._worker_run = run

    def next(self) -> MicroBatch:
        if self._worker_run is None or self._processes is None or self._num_taken_batches == self._num_micro_batches:
            raise NoSamplesLeft
        run, self._worker_run = self._worker_run, None  # after an error or Ctrl-C, `begin` has to be called
        worker = self._num_taken_batches % self._num_workers
        try:
            value, is_slab_free = run.inboxes[worker].next_value(self._timeout)
        except Empty:
            self._end_processes(0)
            raise TimeoutError(
                f"Worker processes made no batch within timeout={self._timeout:g} s. Give a longer one to DataLoader, or "
                f"look for what the pipeline waits for."
            ) from None
        if is_slab_free:
            self._processes.free_slabs[worker].release()
        if isinstance(value, Exception):
            raise value
        self._worker_run, self._num_taken_batches = run, self._num_taken_batches + 1
        return value

    def look_ahead(self, work: LookAhead, table: Ints) -> list[Any]:
        """Return the results of a `LookAhead` from the positions in ``table``, one for each of its shards."""
        self.begin(work, table, 0)
        return [self.next() for _ in work.shards]

    def progress(self) -> dict[str, float]:
        if self._processes is None:
            return {"batches_ready": 0.0, **by_name(read_counters().values)}
        status = self._processes.status
        num_ready = max(0, int(status.counts[:, MADE_BATCHES].sum()) - self._num_taken_batches)
        return {"batches_ready": float(num_ready), **by_name(status.counts.sum(dim=0).numpy() + read_counters().values)}

    def activity(self) -> str:
        default_text = "which does not say what it does: it is starting, has ended, or is stopped"
        worker = self._num_taken_batches % self._num_workers
        activity_text = "" if self._processes is None else self._processes.status.read_activity(worker)
        return f"waiting for worker {worker}, {activity_text or default_text}"

    def close(self) -> None:
        self._end_processes()

    def _end_processes(self, *seconds: float) -> None:
        """End the worker processes, and add their counts to the counts of this process."""
        self._worker_run = None
        processes, self._processes = self._processes, None
        if processes is None:
            return
        self._finalizer.detach()  # the finalizer holds the processes
        processes.end(*seconds)
        for field_index, value in enumerate(processes.status.counts.sum(dim=0).tolist()):
            read_counters().add(field_index, 0 if field_index == MADE_BATCHES else value)
