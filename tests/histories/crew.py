"""Ranks as threads of one process that run one at a time, so that a history of a run costs no processes.

A collective waits for the others by letting them run. Where none of them can go on, that is a hang, and said at once. Worker
processes are objects, as far ahead as they may be.
"""

import contextlib
import pickle
import queue
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

import rescale_data.engine.pool as pool_module
import rescale_data.engine.setup as setup_module
from rescale_data.engine.board import Board
from rescale_data.engine.message import from_bytes
from rescale_data.engine.processes import Work
from rescale_data.engine.ranks.communicator import Call
from rescale_data.engine.ranks.ranks import Ranks
from rescale_data.engine.states.codec import has_remainder
from rescale_data.engine.stream import Stream


class Hang(BaseException):
    """Others wait in a collective for a rank that does not come."""


_BATON = threading.Lock()
_here = threading.local()


class Round:
    """One call on some threads, of which each runs, waits or has returned."""

    def __init__(self, num_threads: int) -> None:
        self.left, self.changed, self.hang = num_threads, threading.Condition(), ""

    def step_aside(self, num: int = 1) -> None:
        self.left -= num
        if not self.left:
            self.hang = "no rank can go on"
            self.changed.notify_all()


class Hub:
    """What the ranks of a communicator have said, by collective."""

    def __init__(self, w: int) -> None:
        self.w, self.said, self.waiting = w, defaultdict[Any, dict[int, Any]](dict), Counter[Any]()

    def put(self, key: Any, me: int, value: Any) -> None:
        with _here.round.changed:
            self.said[key][me] = value
            if len(self.said[key]) == self.w:
                _here.round.left += self.waiting.pop(key, 0)
                _here.round.changed.notify_all()

    def wait(self, key: Any) -> list[Any]:
        now: Round = _here.round
        with now.changed:
            if len(self.said[key]) < self.w:
                self.waiting[key] += 1
                now.left -= 1
                if not now.left:
                    now.hang = f"{key}: only {sorted(self.said[key])} of {self.w} came"
                    now.changed.notify_all()
                else:
                    _BATON.release()
                    now.changed.wait_for(lambda: now.hang or len(self.said[key]) == self.w)
                    now.changed.release()
                    _BATON.acquire()
                    now.changed.acquire()
            if len(self.said[key]) < self.w:
                raise Hang(now.hang)
            return [self.said[key][i] for i in range(self.w)]


class InThread:
    """What `Ranks` asks of a communicator."""

    def __init__(self, hub: Hub, me: int) -> None:
        self.hub, self.me, self.turns, self.num_loaders = hub, me, Counter[Any](), 0

    def _put(self, call: Call, value: Any) -> Any:
        self.turns[call.name, call.num_loads] += 1
        key = call.name, call.num_loads, self.turns[call.name, call.num_loads]
        self.hub.put(key, self.me, value)
        return key

    def agree(self, call: Call, values: Any) -> Callable[[], Any]:
        assert all(type(value) is int for value in values), values
        key = self._put(call, list(values))
        return lambda: np.array(self.hub.wait(key), dtype=np.int64)

    def gather(self, call: Call, tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack(self.hub.wait(self._put(call, tensor.clone())))


@dataclass(frozen=True)
class ThreadRanks(Ranks):
    """Ranks that are threads of one process."""


class InOneProcess:
    """A `Crew` whose workers are objects of this process, which are as far ahead as they may be."""

    failure = None

    def __init__(self, _: Any, worker: Any, num_workers: int, *__: Any) -> None:
        given = pickle.dumps(worker)
        self.board = Board(num_workers)
        self.free_slabs = [threading.Semaphore(0) for _ in range(num_workers)]
        self.workers = [pickle.loads(given) for _ in range(num_workers)]
        for number, copied in enumerate(self.workers):
            copied.attach(number, self.board)

    def begin(self, segment: Work) -> None:
        begin = from_bytes(*segment.command)
        self.board.wanted_begin = segment.number
        segment.messages = [Messages(worker, begin) for worker in self.workers]

    def end(self, *_: Any) -> None:
        self.board.wanted_begin = -1


class Messages:
    """The messages of one worker, all but one made ahead."""

    def __init__(self, worker: Any, begin: Any) -> None:
        self.left = worker.messages(begin, lambda: None)
        self.ready = deque(islice(self.left, begin.num_slabs - 1))

    def get(self, timeout: float) -> Any:
        del timeout
        message = self.ready.popleft()
        self.ready.extend(islice(self.left, 1))
        return message


class Process:
    """A thread that is a rank of one run after another."""

    def __init__(self) -> None:
        self.todo: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.communicator: InThread | None = None
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        while True:
            now, fn, done = self.todo.get()
            _here.round, _here.process = now, self
            with _BATON:
                try:
                    result = True, fn()
                except BaseException as error:
                    result = False, error
            with now.changed:
                now.step_aside()
            done.put((self, result))
            del fn, result


_idle: list[Process] = []


def run(calls: list[tuple[Process, Callable[[], Any]]]) -> list[Any]:
    """Each function in its process; the first error of any, with a note where others waited for that rank."""
    now, done = Round(len(calls)), queue.SimpleQueue[Any]()
    for process, fn in calls:
        process.todo.put((now, fn, done))
    found = dict(done.get() for _ in calls)
    errors = [found[process][1] for process, _ in calls if not found[process][0]]
    real = [error for error in errors if not isinstance(error, Hang)] or errors
    if real:
        if len(real) < len(calls) or isinstance(real[0], Hang):
            real[0].add_note(f"ALONE: on {len(real)} of {len(calls)} ranks, {[repr(e) for e in errors]}")
        raise real[0]
    return [found[process][1] for process, _ in calls]


class Crew:
    """W ranks."""

    def __init__(self, w: int, of: list[Process] | None = None) -> None:
        self.w, self.processes = w, list(of or ())
        while len(self.processes) < w:
            self.processes.append(_idle.pop() if _idle else Process())
        hub = Hub(w)
        self.communicators = [InThread(hub, i) if w > 1 else None for i in range(w)]

    def enter(self) -> None:
        for process, communicator in zip(self.processes, self.communicators, strict=True):
            process.communicator = communicator

    def all(self, fn: Callable[..., Any], *given: Any) -> list[Any]:
        self.enter()
        return run([(process, lambda i=i: fn(i, *given)) for i, process in enumerate(self.processes)])

    def close(self) -> None:
        _idle.extend(self.processes)
        self.processes = []


def _find_ranks(mesh: Any, dp_rank: Any, dp_world_size: Any, timeout: float) -> Ranks:
    communicator = _here.process.communicator
    if communicator is None:
        return Ranks()
    mesh: Any = object()
    w = communicator.hub.w
    return ThreadRanks(communicator.me, w, communicator, mesh, timeout)  # type: ignore[arg-type]


def _take(self: Stream) -> Any:
    self.peek()
    in_remainder = has_remainder(self.table)
    micro_batch = _real_take(self)
    if hasattr(self, "taken"):
        self.taken.append((micro_batch, self.clock.epoch, in_remainder))
    return micro_batch


_real_take = Stream.take


@contextlib.contextmanager
def in_threads() -> Iterator[None]:
    """Loaders that are built within have the ranks of the thread's crew, and workers that are objects."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setup_module, "find_ranks", _find_ranks)
        patch.setattr(pool_module, "Crew", InOneProcess)
        patch.setattr(pool_module, "require_pickle", lambda *_, **__: None)
        patch.setattr(Stream, "take", _take)
        yield
