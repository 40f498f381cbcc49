"""Ranks as threads of one process that run one at a time, so that a history of a run costs no processes.

A collective waits for the others by letting them run. Where none of them can go on, that is a hang, and said at once. Worker
processes are objects, as far ahead as they may be.
"""

import contextlib
import pickle
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, cast

import numpy as np
import pytest

import rescale_data.engine.pool as pool_module
import rescale_data.engine.setup as setup_module
from rescale_data.engine.message import from_bytes
from rescale_data.engine.processes import WorkerRun
from rescale_data.engine.ranks.communicator import Call
from rescale_data.engine.ranks.ranks import Ranks
from rescale_data.engine.stream import Stream
from rescale_data.engine.workers import WorkerStatus


class Hang(BaseException):
    """Others wait in a collective for a rank that does not come."""


_baton = threading.Condition()
"""Held by the rank that runs."""
_here = threading.local()


class Round:
    """One call on all ranks, of which each runs, waits or has returned."""

    def __init__(self, num_ranks: int) -> None:
        self.left, self.hang = num_ranks, ""

    def step_aside(self, why: str) -> None:
        self.left -= 1
        if not self.left:
            self.hang = why
            _baton.notify_all()


class Hub:
    """What the ranks of a communicator have said, by collective."""

    def __init__(self, w: int) -> None:
        self.w, self.said, self.waiting = w, defaultdict[Any, dict[int, Any]](dict), Counter[Any]()

    def put(self, key: Any, me: int, value: Any) -> None:
        self.said[key][me] = value
        if len(self.said[key]) == self.w:
            _here.round.left += self.waiting.pop(key, 0)
            _baton.notify_all()

    def wait(self, key: Any) -> list[Any]:
        now: Round = _here.round
        if len(self.said[key]) < self.w:
            self.waiting[key] += 1
            now.step_aside(f"{key}: only {sorted(self.said[key])} of {self.w} came")
            _baton.wait_for(lambda: now.hang or len(self.said[key]) == self.w)
        if len(self.said[key]) < self.w:
            raise Hang(now.hang)
        return [self.said[key][i] for i in range(self.w)]


class InThread:
    """What `Ranks` asks of a communicator."""

    def __init__(self, hub: Hub, me: int) -> None:
        self.hub, self.me, self.turns, self.num_loaders = hub, me, Counter[Any](), 0

    def _put(self, call: Call, value: Any) -> Any:
        self.turns[call.name] += 1
        key = call.name, self.turns[call.name]
        self.hub.put(key, self.me, value)
        return key

    def begin_gather(self, call: Call, values: Any) -> Callable[[], Any]:
        key = self._put(call, values.copy())
        return lambda: np.stack(self.hub.wait(key))


@dataclass(frozen=True)
class ThreadRanks(Ranks):
    """Ranks that are threads of one process."""


class InOneProcess:
    """A `Crew` whose workers are objects of this process, which are as far ahead as they may be."""

    failure = None

    def __init__(self, _: Any, worker: Any, num_workers: int, *__: Any) -> None:
        given = pickle.dumps(worker)
        self.status = WorkerStatus(num_workers)
        self.free_slabs = [threading.Semaphore(0) for _ in range(num_workers)]
        self.workers = [pickle.loads(given) for _ in range(num_workers)]
        for number, copied in enumerate(self.workers):
            copied.attach(number, self.status)

    def wait_started(self) -> None:
        pass

    def begin(self, segment: WorkerRun) -> None:
        begin = from_bytes(*segment.packed_command)
        self.status.wanted_command_id = segment.command_id
        for inbox, worker in zip(segment.inboxes, self.workers, strict=True):
            inbox.messages = cast(Any, Messages(worker, begin))

    def end(self, *_: Any) -> None:
        self.status.wanted_command_id = -1


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


class Crew:
    """W ranks: in each call a thread each, which holds the baton while it runs."""

    def __init__(self, w: int) -> None:
        hub = Hub(w)
        self.communicators = [InThread(hub, i) if w > 1 else None for i in range(w)]

    def all(self, fn: Callable[..., Any], *given: Any) -> list[Any]:
        """Return what a function of the rank gives on each; or raise the first error, with a note if others had none."""
        w, results, errors = len(self.communicators), dict[int, Any](), list[BaseException]()
        if w == 1:
            _here.communicator = None
            return [fn(0, *given)]
        now = Round(w)

        def work(rank: int) -> None:
            _here.round, _here.communicator = now, self.communicators[rank]
            with _baton:
                try:
                    results[rank] = fn(rank, *given)
                except BaseException as error:
                    errors.append(error)
                now.step_aside("no rank can go on")

        threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(w)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        real = [error for error in errors if not isinstance(error, Hang)] or errors
        if real and (len(real) < w or isinstance(real[0], Hang)):
            real[0].add_note(f"ALONE: on {len(real)} of {w} ranks, {errors}")
        if real:
            raise real[0]
        return [results[rank] for rank in range(w)]


def _find_ranks(mesh: Any, dp_rank: Any, dp_world_size: Any, timeout: float) -> Ranks:
    communicator = _here.communicator
    if communicator is None:
        return Ranks()
    mesh: Any = object()
    w = communicator.hub.w
    return ThreadRanks(communicator.me, w, communicator, mesh, timeout)  # type: ignore[arg-type]


def _take(self: Stream) -> Any:
    """Take a micro batch, and look at nothing that writes rows of the table: a state is to find them unwritten."""
    if self.is_epoch_over():
        raise StopIteration
    segment: Any = self.cursor.segment
    in_remainder = segment.remainder is not None
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
        patch.setattr(pool_module, "WorkerProcesses", InOneProcess)
        patch.setattr(pool_module, "require_pickle", lambda *_, **__: None)
        patch.setattr(Stream, "take", _take)
        yield
