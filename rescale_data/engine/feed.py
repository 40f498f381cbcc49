"""Where micro batches are made: the part of the loader that differs with and without worker processes."""

from __future__ import annotations

import os
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Container
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import inf
from queue import SimpleQueue
from typing import Any

from rescale_data.engine.collate import pin
from rescale_data.engine.leg import Leg
from rescale_data.engine.micro_batch import MicroBatch
from rescale_data.engine.runner import Collate, Exhausted, Runner
from rescale_data.engine.watch import describe, frames
from rescale_data.layout.turns import Turn, Turns
from rescale_data.sources.counts import MAKE_SECONDS, counts, told
from rescale_data.state import Ints


class Feed(ABC):
    """Makes the micro batches of a leg in order."""

    is_ahead = False
    """Whether it makes them in the background, from `start` on."""

    @abstractmethod
    def start(self, leg: Leg, table: Ints, first: int) -> None:
        """Go on in a leg with micro batch ``first`` at the positions of ``table``; forget what was made before."""

    @abstractmethod
    def take(self) -> MicroBatch:
        """The next micro batch of the leg; `Exhausted` where a shard has no sample left for it. Not asked beyond `stop`."""

    def progress(self) -> dict[str, float]:
        """What was read and made so far, for a logger."""
        return {}

    def doing(self) -> str:
        """What is waited for, where other processes make the batches."""
        return ""

    def stop(self, *, wait: bool = True) -> None:  # noqa: B027 - where nothing is made ahead there is nothing to stop
        """Make no more in this process; `start` goes on.

        Args:
            wait: Until the runner and the sources are the caller's. Else they are only after another `stop`.
        """

    def close(self) -> None:  # noqa: B027
        """Stop the processes or the thread; `start` goes on."""


class InProcess(Feed):
    """Makes each micro batch when it is asked for, in the trainer's process."""

    def __init__(self, runner: Runner, collate: Collate | None, *, pin_memory: bool = False) -> None:
        self.runner, self._pin = runner, pin_memory
        self._draw: Callable[[Turn], MicroBatch] = partial(runner.take, collate=collate)
        self._turns: Turns | None = None
        self._leg: Leg | None = None
        self._u, self._pads, self._is_served = 0, False, False
        self._seconds = self._counted = 0.0  # that making took, and of these those that `counts` has

    def start(self, leg: Leg, table: Ints, first: int) -> None:
        self.runner.load(table, leg.histories)
        self._leg, self._is_served = leg, False
        self._turns, self._u, self._pads = leg.turns(table), first, leg.pads

    def take(self) -> MicroBatch:
        started = time.perf_counter()
        micro_batch = self.make(self._u)
        self._u += 1
        self._seconds += time.perf_counter() - started
        return micro_batch

    def make(self, u: int) -> MicroBatch:
        """Micro batch u of the leg, behind those that were made; else as `take`."""
        turns, self._turns = self._turns, None  # after an error the rows are past what was delivered
        if turns is None or self._leg is None:
            raise Exhausted
        if not self._is_served:  # which micro batches a worker makes is known with its first
            self._is_served = True
            self.runner.serve(self._leg.served(u))
        made = self._draw(turns.turn(u))
        if self._pads:
            made = made.with_valid()
        if self._pin:
            made = made._replace(batch=pin(made.batch))
        self._turns = turns
        return made

    def progress(self) -> dict[str, float]:
        seconds = self._seconds
        counts().add(MAKE_SECONDS, seconds - self._counted)
        self._counted = seconds
        return {"batches_ready": 0.0, **told(counts().values)}

    def close(self) -> None:
        self._turns = None


class InThread(Feed):
    """What a feed makes, in a thread and ahead of who takes it; an error is raised where its micro batch is due.

    Between `start` and `stop` the feed is the thread's. What ranks do together stays with who takes.

    Args:
        num_batches: How far ahead.
        then: What becomes of each batch, in the thread.
    """

    is_ahead = True

    def __init__(self, feed: Feed, num_batches: int, then: Callable[[Any], Any] | None = None) -> None:
        self._feed, self._num_batches, self._then = feed, num_batches, then
        self._thread_id = 0
        self._thread: ThreadPoolExecutor | None = None  # ends with `stop`, or with this object
        self._lock, self._makes = threading.Lock(), False
        self._made: SimpleQueue[MicroBatch | BaseException] = SimpleQueue()
        self._to_make = self._to_take = 0.0
        self._process = os.getpid()  # whose thread it is

    def start(self, leg: Leg, table: Ints, first: int) -> None:
        self.stop()
        self._process = os.getpid()
        self._feed.start(leg, table, first)
        self._thread, self._makes, self._made = ThreadPoolExecutor(1, "rescale_data-ahead"), False, SimpleQueue()
        self._to_make = self._to_take = inf if leg.stop is None else leg.stop - first
        self._ask()

    def take(self) -> MicroBatch:
        if not self._to_take:
            raise Exhausted
        made = self._made.get()
        self._to_take -= 1
        if isinstance(made, BaseException):
            self._to_take = 0
            try:
                raise made
            finally:
                del made  # the traceback holds this frame
        self._ask()
        return made

    def progress(self) -> dict[str, float]:
        return {**self._feed.progress(), "batches_ready": float(self._made.qsize())}

    def doing(self) -> str:
        return self._feed.doing() or f"waiting for the thread ahead, {describe(frames().get(self._thread_id))}"

    def stop(self, *, wait: bool = True) -> None:
        if self._process != os.getpid():  # a fork has no thread, and the locks may have been held
            self._lock, self._thread, self._to_make, self._to_take = threading.Lock(), None, 0, 0
            return
        with self._lock:
            self._to_make = self._to_take = 0
        if self._thread is not None:
            self._thread.shutdown(wait)
            if wait:  # else, or where Ctrl-C has come, the thread may still be in a read, and is waited for later
                self._thread = None
        self._feed.stop(wait=wait)  # it may have a thread of its own, which uses the runner

    def close(self) -> None:
        self.stop()
        self._feed.close()

    def _ask(self) -> None:
        """Let the thread make one more, where it makes none and there is room.

        The thread asks itself for each but the first, so that at most one is on its way when the interpreter exits.
        """
        with self._lock:
            if self._thread is None or self._makes or not self._to_make or self._made.qsize() >= self._num_batches:
                return
            self._makes, self._to_make = True, self._to_make - 1
            self._thread.submit(self._make)

    def _make(self) -> None:
        self._thread_id = threading.get_ident()
        try:
            made = self._feed.take()
            self._made.put(made if self._then is None else made._replace(batch=self._then(made.batch)))
        except BaseException as error:
            self._made.put(error)
            return
        self._makes = False
        self._ask()


class Traced(InProcess):
    """In place of samples, where they come from: of those of some shards (`Runner.trace`)."""

    def __init__(self, runner: Runner, shards: Container[int]) -> None:
        super().__init__(runner, None)
        self._draw = lambda turn: runner.trace(turn, shards)


class Ahead:
    """In hand, in order, what a feed has made of a leg and nobody has taken.

    Attributes:
        made: Oldest first; whoever takes one takes it from here.
        is_started: Whether the feed has begun.
    """

    def __init__(self, feed: Feed) -> None:
        self.feed = feed
        self.made: deque[MicroBatch] = deque()
        self.is_started = self._is_exhausted = False
        self._process = 0  # in which the feed has begun

    def start(self, leg: Leg, table: Ints, u: int) -> None:
        """Let the feed begin with a micro batch."""
        if self.feed.is_ahead:
            self._refuse_fork()
        self._process = os.getpid()
        self.feed.start(leg, table, u)
        self.is_started = True

    def make(self, count: int) -> int:
        """Have so many in hand, if no shard ends before; how many there are."""
        while len(self.made) < count and self._make_one():
            pass
        return len(self.made)

    def next(self) -> MicroBatch | None:
        """The oldest, made now where there is none; `None` where the feed has not begun, or a shard has ended.

        It stays in hand: who takes it counts it first, so that Ctrl-C comes before or after the two and not between them.
        """
        if self.made or (self.is_started and self._make_one()):
            return self.made[0]
        return None

    def _make_one(self) -> bool:
        """Make one more; whether there was one."""
        if self._is_exhausted:
            return False
        if self.feed.is_ahead:
            self._refuse_fork()
        try:
            self.made.append(self.feed.take())
        except Exhausted:
            self._is_exhausted = True
        except BaseException as error:
            # The runner is past what was taken: whoever goes on begins from the table. Ctrl-C does not wait for a read.
            self.forget(wait=isinstance(error, Exception))
            raise
        return not self._is_exhausted

    def _refuse_fork(self) -> None:
        if self._process not in (0, os.getpid()):
            raise RuntimeError(
                f"This DataLoader reads ahead in process {self._process}, of which this one is a fork: the workers and threads "
                f"are not its own. Make another loader here, and load the state into it."
            )

    def forget(self, *, wait: bool = True) -> None:
        """No more is made until `start`."""
        self.feed.stop(wait=wait)
        self.made = deque()
        self.is_started = self._is_exhausted = False

    def progress(self) -> dict[str, float]:
        made = self.feed.progress()
        return {**made, "batches_ready": made.get("batches_ready", 0.0) + len(self.made)}
