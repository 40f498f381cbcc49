"""Micro batches from worker processes: torch's DataLoader as the pool, our commands as its sampler.

torch deals the items of a sampler to its workers in turn, beginning with worker 0, and hands the results back in that
order. The items here are commands, without an end; each leg has these:

    Begin, ..., Begin,   micro batches u0, u0+K, u0+2K, ...   u0+1, u0+1+K, ...   ...   None, None, ...
      one a worker       n of one worker in one message       of the next worker        nothing to do

When a leg begins, workers see in shared memory that what is left of the one before is not wanted, and answer that at once, but
for a micro batch that they are within. These answers are received, and dropped, before any of the new leg.

A message carries, with each micro batch, the rows of the table that it advanced; of a mixture, whose rows are long, the slots.
So the trainer's process knows exactly where the batches it has received leave every shard, and workers are never asked for
state.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from multiprocessing.context import BaseContext
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler, get_worker_info

from rescale_data.engine.feed import Feed, InProcess
from rescale_data.engine.leg import Leg
from rescale_data.engine.message import Inbox, Message, Part, Slabs
from rescale_data.engine.micro_batch import MicroBatch
from rescale_data.engine.processes import (
    LOOK_SECONDS,
    Board,
    begin_worker,
    context_of,
    is_death,
    is_timeout,
    require_pickle,
)
from rescale_data.engine.recipe import Recipe
from rescale_data.engine.runner import Collate, Exhausted, Runner
from rescale_data.engine.schema import Schema
from rescale_data.engine.watch import Watch, describe
from rescale_data.sources.counts import MADE, MAKE_SECONDS, counts, told
from rescale_data.state import Ints

_MESSAGE_BYTES = 4 * 2**20  # enough to make what a message costs small, little enough to keep few in flight
_MESSAGE_SECONDS = 0.05
_MESSAGE_LIMIT = 64


@dataclass(frozen=True)
class Begin:
    """Go on in a leg.

    Args:
        number: Of the leg, in the life of a pool.
        shards: Whose positions are told: those that the rank may serve in this leg.
        rows: The row of the table of each.
        num_logical_shards: N.
    """

    number: int
    leg: Leg
    shards: slice
    rows: Ints
    num_logical_shards: int

    @classmethod
    def of(cls, number: int, leg: Leg, table: Ints) -> Begin:
        owned = leg.layout.owned(leg.rank) if leg.deal is None else range(len(table))
        shards = slice(owned.start, owned.stop)
        return cls(number, leg.for_a_worker(), shards, table[shards].copy(), len(table))

    @property
    def table(self) -> Ints:
        """The table, in which the rows of other ranks are zero."""
        table = np.zeros((self.num_logical_shards, self.rows.shape[1]), dtype=np.int64)
        table[self.shards] = self.rows
        return table


@dataclass(frozen=True)
class Make:
    """Make these micro batches and pack them into a slab that is free."""

    micro_batches: range
    slab: int


@dataclass(frozen=True)
class Made:
    """A packed micro batch for each that was asked for, `None` from where a shard had no sample left; fewer before an error,
    which is the next answer."""

    message: Message
    seconds: float


_OF_PARENTS: list[Iterator[Any]] = []
"""Kept in a forked child: where it is collected, torch's iterator ends the workers, and they are the parent's."""


class Worker(Dataset[Any]):
    """The loader's part in a worker process: a "dataset" whose items are the answers to commands."""

    def __init__(self, recipe: Recipe, collate: Collate | None, slow_after: float) -> None:
        self._recipe, self._collate, self._slow_after = recipe, collate, slow_after
        self.board: Board | None = None
        self._leg = 0
        self._failure: Exception | None = None
        self._watch: Watch | None = None
        self._say: Callable[[str], None] = _nothing
        self._feed: InProcess | None = None
        self._told: Ints | None = None  # of a mixture, whose rows are long: the table as the trainer's process has it
        self._slabs = Slabs()

    def __getitem__(self, command: Begin | Make | None) -> Made | None:
        if isinstance(command, Begin):
            self._leg, self._failure = command.number, None
        if not self._is_wanted:
            return None
        if self._failure is not None:
            raise self._failure
        if not isinstance(command, Make):
            return None if command is None else self._begin(command)
        started = time.perf_counter()
        made: list[MicroBatch | None] = []
        try:
            for u in command.micro_batches:
                made.append(self._make_watched(u))
        except Exception as error:
            if not made:
                raise
            self._failure = error
        message = self._slabs.pack(command.slab, made)
        seconds = time.perf_counter() - started
        counts().add(MAKE_SECONDS, seconds)
        return Made(message, seconds)

    @property
    def _is_wanted(self) -> bool:
        return self.board is None or self.board.leg == self._leg

    def _make_watched(self, u: int) -> MicroBatch | None:
        if not self._is_wanted:
            return None
        watch = self._watch
        if watch is None:
            return self._make(u)
        watch.began = time.perf_counter()
        made = self._make(u)
        watch.began = None
        if watch.said:
            watch.said = False
            self._say("")
        counts().add(MADE, 1)
        return made

    def _begin_watch(self) -> None:
        """What this process counts, and what it is about where that takes long, are for the trainer's to see."""
        board, info = self.board, get_worker_info()
        if board is None or info is None:
            return
        if self._watch is None:
            counts().keep_in(board.line(info.id))
            self._say = say = partial(board.write, info.id)
            self._watch = Watch(self._slow_after / 2, lambda _, frame: say(describe(frame)))
            self._watch.start()
        counts().values[MADE] = 0
        self._say("")

    def _begin(self, command: Begin) -> None:
        self._begin_watch()
        if self._feed is None:
            schema = Schema(self._recipe.build(0))  # as in the trainer's process
            self._feed = InProcess(Runner(self._recipe, schema), self._collate)
        self._feed.begin(command.leg, command.table, 0)
        # In a deal another worker may have changed a slot that this one changes back.
        tells_slots = command.leg.deal is None and self._feed.runner.schema.is_mixture
        self._told = command.table if tells_slots else None
        self._slabs = Slabs()  # messages that nobody received may have held the old ones

    def _make(self, u: int) -> MicroBatch | None:
        if self._feed is None:
            return None
        try:
            made = self._feed.make(u)
        except Exhausted:
            return None
        return made if self._told is None else made.since(self._told)


class Commands(Sampler[Any]):
    """The commands of one leg after the other, and `None` where there is nothing to do.

    Torch keeps ``prefetch_factor`` commands of a worker in flight, and issues one more when a message of it is taken. A
    message is taken when all of the one before have been unpacked, so one slab more than that is enough.
    """

    def __init__(self, num_workers: int, prefetch_factor: int) -> None:
        self._k, self._num_slabs = num_workers, prefetch_factor + 1
        self._leg: Iterator[Begin | Make | None] = iter(())
        self.num_issued = 0
        self.per_message = 1

    def begin(self, begin: Begin, u: int) -> None:
        """Leave out what is left of the leg before, and begin another one with micro batch u."""
        self._leg = self._of_leg(begin, u)

    def __iter__(self) -> Iterator[Begin | Make | None]:
        while True:
            command = next(self._leg, None)
            self.num_issued += 1
            yield command

    def _of_leg(self, begin: Begin, u: int) -> Iterator[Begin | Make | None]:
        yield from [None] * (-self.num_issued % self._k)  # each leg begins with worker 0
        yield from [begin] * self._k
        stop, slab = sys.maxsize if begin.leg.stop is None else begin.leg.stop, 0
        while u < stop:
            n = self.per_message
            for first in range(u, min(u + self._k, stop)):
                yield Make(range(first, min(first + n * self._k, stop), self._k), slab)
            u += n * self._k
            slab = (slab + 1) % self._num_slabs


class Pool(Feed):
    """Makes micro batches in K worker processes.

    Args:
        prefetch_factor: Messages that each worker may be ahead.
        pin_memory: Whether messages arrive in page-locked memory.
        context: How worker processes start: "forkserver", "spawn", or a multiprocessing context.
        timeout: Seconds that a message may take.
        slow_after: Seconds after which it is said what a worker is about.
        init_fn: Called with the number of the worker in each, when it starts.
    """

    is_ahead = True

    def __init__(
        self,
        recipe: Recipe,
        collate: Collate | None,
        num_workers: int,
        *,
        prefetch_factor: int,
        pin_memory: bool,
        context: str | BaseContext,
        timeout: float,
        slow_after: float,
        init_fn: Callable[[int], object] | None = None,
    ) -> None:
        worker = Worker(recipe, collate, slow_after)
        require_pickle(worker, pipeline=recipe.pipeline, collate_fn=collate, worker_init_fn=init_fn)
        self._worker, self._board = worker, Board(num_workers)
        self._num_received = self._taken = 0  # answers, and batches of this leg
        self._k = self.num_workers = num_workers
        commands = self._commands = Commands(num_workers, prefetch_factor)
        # Without a generator of its own torch seeds workers with a number that it draws from the trainer's.
        generator = torch.Generator("cpu").manual_seed(torch.initial_seed())
        start_method = context_of(context)
        self.forks = start_method.get_start_method() == "fork"
        self._timeout = timeout
        self._new_answers: Callable[[], Iterator[Any]] = lambda: iter(
            DataLoader(
                worker,
                batch_size=None,
                sampler=commands,
                num_workers=num_workers,
                collate_fn=_as_it_is,
                prefetch_factor=prefetch_factor,
                multiprocessing_context=start_method,
                timeout=min(LOOK_SECONDS, timeout),
                generator=generator,
                worker_init_fn=partial(begin_worker, init_fn),
            )
        )
        self._answers: Iterator[Any] | None = None
        self._process = os.getpid()
        self._pin = pin_memory
        self._inboxes: list[Inbox] = []
        self._made: Iterator[MicroBatch | None] = iter(())

    def begin(self, leg: Leg, table: Ints, first: int) -> None:
        self._made, self._taken = iter(()), 0
        self._inboxes = [Inbox(self._pin) for _ in range(self._k)]
        begin = Begin.of(self._board.leg + 1, leg, table)
        self._board.leg = begin.number
        num_before = self._commands.num_issued - self._num_received
        self._commands.begin(begin, first)
        try:
            if not self._drop(num_before):
                self._worker.board, self._board.leg = self._board, begin.number
                self._commands.begin(begin, first)
                with torch.device("cpu"):  # of the generator, by which torch draws
                    self._answers, self._process = self._new_answers(), os.getpid()
        except BaseException:
            self.close()
            raise
        self._made = islice(self._receive(), None if leg.stop is None else leg.stop - first)

    def _drop(self, num_before: int) -> bool:
        """Receive the answers to commands of earlier legs; True if there are workers, which are then in the new leg."""
        try:
            for _ in range(num_before):
                self._answer()
        except Exception:  # of a leg that nobody wants any more: its pipeline failed, or a worker died or hangs
            self.close()
        return self._answers is not None

    def next(self) -> MicroBatch:
        try:
            micro_batch = next(self._made, None)
        except BaseException as error:
            self.close()  # torch's workers do not go on after an error or Ctrl-C: the next leg starts new ones
            if is_timeout(error):
                raise TimeoutError(
                    f"Worker processes made no batch within timeout={self._timeout:g} s. Give a longer one to DataLoader, or "
                    f"look for what the pipeline waits for."
                ) from error
            if not is_death(error):
                raise
            raise RuntimeError(
                f"A worker process exited unexpectedly ({error}). If none ever started, the script needs an `if __name__ == "
                f"'__main__':` guard, because workers import it; else look for its traceback above, or for a process killed "
                f"for want of memory."
            ) from error
        if micro_batch is None:
            raise Exhausted
        self._taken += 1
        return micro_batch

    def progress(self) -> dict[str, float]:
        ready = max(0, self._board.made - self._taken)
        return {"batches_ready": float(ready), **told(self._board.counts.sum(dim=0).numpy() + counts().values)}

    def doing(self) -> str:
        silent = "which does not say what it is about: it is starting, has ended, or is stopped"
        worker = self._num_received % self._k
        return f"waiting for worker {worker}, {self._board.read(worker) or silent}"

    def close(self) -> None:
        """Stop the worker processes; what they have counted is this process's from here on."""
        self._made = iter(())
        if self._answers is None:
            return
        if self._process != os.getpid():
            _OF_PARENTS.append(self._answers)
            self._answers = None
            return
        self._board.leg += 1
        self._answers, self._num_received, self._commands.num_issued = None, 0, 0
        for field, value in enumerate(self._board.counts.sum(dim=0).tolist()):
            counts().add(field, 0 if field == MADE else value)
        self._board, self._taken = Board(self._k), 0

    def _answer(self) -> Made | None:
        """The next answer. Torch looks only when its timeout ends whether workers live, so it is asked again until ours does.

        It would hear of a child process that dies, but workers are children of a fork server.
        """
        asked = time.monotonic()
        while self._answers is not None:
            try:
                answer = next(self._answers)
            except RuntimeError as error:
                if not is_timeout(error) or time.monotonic() - asked >= self._timeout:
                    raise
            else:
                self._num_received += 1
                return answer
        return None

    def _receive(self) -> Iterator[MicroBatch | None]:
        while self._answers is not None:
            made = self._answer()
            if made is not None:
                yield from self._round(made)

    def _round(self, made: Made) -> Iterator[MicroBatch | None]:
        """The micro batches of one message of each worker, in the order of u; messages are awaited when they are due."""
        received = [self._open(0, made)]
        for i in range(len(received[0])):
            for worker in range(self._k):
                if worker == len(received):
                    due = self._answer()
                    received.append([] if due is None else self._open(worker, due))
                while i >= len(received[worker]):
                    self._answer()  # until that of this worker raises why it made no more
                yield self._inboxes[worker].unpack(*received[worker][i])

    def _open(self, worker: int, made: Made) -> list[tuple[torch.Tensor, Part]]:
        parts = made.message.parts
        num_bytes = parts[-1].stop + sum(len(part.rest) for part in parts)
        by_size = _MESSAGE_BYTES * len(parts) // max(num_bytes, 1)
        by_time = int(_MESSAGE_SECONDS * len(parts) / max(made.seconds, 1e-6))
        self._commands.per_message = max(1, min(by_size, by_time, _MESSAGE_LIMIT))
        return self._inboxes[worker].open(made.message)


def _nothing(text: str) -> None:
    del text


def _as_it_is(value: Any) -> Any:
    return value
