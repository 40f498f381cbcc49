"""`Pool`: a feed with K worker processes that make micro batches in turn."""

from __future__ import annotations

import weakref
from queue import Empty

import torch

from rescale_data.engine.feed import Feed
from rescale_data.engine.micro_batch import MicroBatch
from rescale_data.engine.options import Options
from rescale_data.engine.processes import Crew, Work, context_of, require_pickle
from rescale_data.engine.recipe import Recipe
from rescale_data.engine.runner import Exhausted
from rescale_data.engine.segment import Segment
from rescale_data.engine.workers import BeginCommand, Worker
from rescale_data.sources.counts import MADE_BATCHES, by_name, read_counters
from rescale_data.state import Ints


class Pool(Feed):
    """A feed that makes micro batches in K worker processes; `begin` starts the processes.

    Args:
        pin_memory: True if batches are to arrive in page-locked memory.

    Attributes:
        uses_fork: True if worker processes are forks of this one.
    """

    is_ahead = True

    def __init__(self, recipe: Recipe, options: Options, *, pin_memory: bool) -> None:
        self._worker = Worker(recipe, options)
        functions = {name: getattr(options, name) for name in ("collate_fn", "worker_init_fn")}
        require_pickle(self._worker, pipeline=recipe.pipeline, **functions)
        self._context = context_of(options.multiprocessing_context)
        self.uses_fork = self._context.get_start_method() == "fork"
        self._num_workers, self._num_slabs = options.num_workers, options.ahead + 1
        self._pin, self._timeout = pin_memory, options.timeout
        self._crew: Crew | None = None
        self._num_crews = self._num_begin_commands = self._num_taken_batches = 0
        self._work: Work | None = None
        self._num_micro_batches: int | None = 0

    def begin(self, segment: Segment, table: Ints, first_u: int) -> None:
        self._num_begin_commands += 1
        begin = BeginCommand(self._num_begin_commands, segment, first_u, self._num_slabs, table)
        work, self._num_taken_batches = Work(begin, self._num_workers, pin_memory=self._pin), 0
        self._num_micro_batches = None if segment.stop is None else segment.stop - first_u
        if self._crew is not None and self._crew.failure is not None:
            self.close()
        if self._crew is None:
            self._num_crews += 1
            seed = [torch.initial_seed(), self._num_crews]
            crew = Crew(self._context, self._worker, self._num_workers, seed)
            self._crew, self._finalizer = crew, weakref.finalize(self, crew.end)
        self._crew.wait_started()
        self._crew.begin(work)
        self._work = work

    def next(self) -> MicroBatch:
        if self._work is None or self._crew is None or self._num_taken_batches == self._num_micro_batches:
            raise Exhausted
        work, self._work = self._work, None  # after an error or Ctrl-C, `begin` has to be called
        worker = self._num_taken_batches % self._num_workers
        try:
            value, is_slab_free = work.inboxes[worker].next_value(self._timeout)
        except Empty:
            self._end_crew(0)
            raise TimeoutError(
                f"Worker processes made no batch within timeout={self._timeout:g} s. Give a longer one to DataLoader, or "
                f"look for what the pipeline waits for."
            ) from None
        if is_slab_free:
            self._crew.free_slabs[worker].release()
        if isinstance(value, Exception):
            raise value
        self._work, self._num_taken_batches = work, self._num_taken_batches + 1
        return value

    def progress(self) -> dict[str, float]:
        if self._crew is None:
            return {"batches_ready": 0.0, **by_name(read_counters().values)}
        board = self._crew.board
        num_ready = max(0, board.num_made - self._num_taken_batches)
        return {"batches_ready": float(num_ready), **by_name(board.counts.sum(dim=0).numpy() + read_counters().values)}

    def activity(self) -> str:
        default_text = "which does not say what it does: it is starting, has ended, or is stopped"
        worker = self._num_taken_batches % self._num_workers
        activity_text = "" if self._crew is None else self._crew.board.read_activity(worker)
        return f"waiting for worker {worker}, {activity_text or default_text}"

    def close(self) -> None:
        self._end_crew()

    def _end_crew(self, *seconds: float) -> None:
        """End the worker processes, and add their counts to the counts of this process."""
        self._work = None
        crew, self._crew = self._crew, None
        if crew is None:
            return
        self._finalizer.detach()  # the finalizer holds the crew
        crew.end(*seconds)
        for field_index, value in enumerate(crew.board.counts.sum(dim=0).tolist()):
            read_counters().add(field_index, 0 if field_index == MADE_BATCHES else value)
