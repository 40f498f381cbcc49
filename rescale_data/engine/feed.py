"""Where micro batches are made: the part of the loader that differs with and without worker processes."""

from __future__ import annotations

import os
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Container
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from math import inf
from typing import Any

from rescale_data.engine.collate import pin
from rescale_data.engine.leg import Leg
from rescale_data.engine.micro_batch import MicroBatch
from rescale_data.engine.ranks.ranks import Ranks
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

    def stop(self) -> None:  # noqa: B027 - where nothing is made ahead there is nothing to stop
        """Make no more in this process, whose runner and sources are the caller's from here on; `start` goes on."""

    def close(self) -> None:  # noqa: B027
        """Stop the processes or the thread; `start` goes on."""


class InProcess(Feed):
    """Makes each micro batch when it is asked for, in the trainer's process."""

    def __init__(self, runner: Runner, collate: Collate | None, *, pin_memory: bool = False) -> None:
        self.runner, self._pin = runner, pin_memory
        self._draw: Callable[[Turn], MicroBatch] = partial(runner.take, collate=collate)
        self._turns: Turns | None = None
        self._u, self._pads = 0, False
        self._seconds = self._counted = 0.0  # that making took, and of these those that `counts` has

    def start(self, leg: Leg, table: Ints, first: int) -> None:
        self.runner.load(table, leg.histories, leg.layout.owned(leg.rank))
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
        if turns is None:
            raise Exhausted
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
        self._made: deque[Future[MicroBatch]] = deque()
        self._left = 0.0

    def start(self, leg: Leg, table: Ints, first: int) -> None:
        self.stop()
        self._feed.start(leg, table, first)
        self._thread = ThreadPoolExecutor(1, "rescale_data-ahead")
        self._left = inf if leg.stop is None else leg.stop - first
        self._ask()

    def take(self) -> MicroBatch:
        if not self._made:
            raise Exhausted
        micro_batch = self._made.popleft().result()
        self._ask()
        return micro_batch

    def progress(self) -> dict[str, float]:
        ready = sum(made.done() for made in self._made)
        return {**self._feed.progress(), "batches_ready": float(ready)}

    def doing(self) -> str:
        return self._feed.doing() or f"waiting for the thread ahead, {describe(frames().get(self._thread_id))}"

    def stop(self) -> None:
        self._made.clear()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.shutdown(cancel_futures=True)

    def close(self) -> None:
        self.stop()
        self._feed.close()

    def _ask(self) -> None:
        while self._thread is not None and self._left > 0 and len(self._made) < self._num_batches:
            self._made.append(self._thread.submit(self._make))
            self._left -= 1

    def _make(self) -> MicroBatch:
        self._thread_id = threading.get_ident()
        made = self._feed.take()
        return made if self._then is None else made._replace(batch=self._then(made.batch))


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

    def make(self, count: int, ranks: Ranks) -> int:
        """Have so many in hand, if no shard ends before; how many there are."""
        while len(self.made) < count and self._make_one(ranks):
            pass
        return len(self.made)

    def next(self, ranks: Ranks) -> MicroBatch | None:
        """The oldest, made now where there is none; `None` where the feed has not begun, or a shard has ended.

        It stays in hand: who takes it counts it first, so that Ctrl-C comes before or after the two and not between them.
        """
        if self.made or (self.is_started and self._make_one(ranks)):
            return self.made[0]
        return None

    def _make_one(self, ranks: Ranks) -> bool:
        """Make one more; whether there was one."""
        if self._is_exhausted:
            return False
        if self.feed.is_ahead:
            self._refuse_fork()
        try:
            if ranks.circle is None:
                self.made.append(self.feed.take())
            else:
                with ranks.reading():
                    self.made.append(self.feed.take())
        except Exhausted:
            self._is_exhausted = True
        except BaseException:
            self.forget()  # the runner is past what was taken: whoever goes on begins from the table
            raise
        return not self._is_exhausted

    def _refuse_fork(self) -> None:
        if self._process not in (0, os.getpid()):
            raise RuntimeError(
                f"This DataLoader reads ahead in process {self._process}, of which this one is a fork: the workers and threads "
                f"are not its own. Make another loader here, and load the state into it."
            )

    def forget(self) -> None:
        """No more is made until `start`."""
        self.feed.stop()
        self.made = deque()
        self.is_started = self._is_exhausted = False

    def progress(self) -> dict[str, float]:
        made = self.feed.progress()
        return {**made, "batches_ready": made.get("batches_ready", 0.0) + len(self.made)}
