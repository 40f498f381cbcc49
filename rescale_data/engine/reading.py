"""The methods of `DataLoader` over a stream: iterators, states and counters."""

from __future__ import annotations

import logging
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

import numpy as np

from rescale_data.engine.cursor import Cursor
from rescale_data.engine.report import NAMES, Report, report
from rescale_data.engine.setup import Setup
from rescale_data.engine.skip import require_countable
from rescale_data.engine.states.load import load_state_dict
from rescale_data.engine.states.statedict import local_state_dict, state_dict
from rescale_data.engine.stream import Stream
from rescale_data.engine.watch import Watch, describe, waits
from rescale_data.errors import checks_kinds

_logger = logging.getLogger("rescale_data")
_WAITS = 1000
"""The number of last waits from which percentiles are computed."""


class Batches(Iterator[Any]):
    """An iterator over the batches of a loader, to the end of the epoch in which it was made."""

    def __init__(self, epoch: int, number: int, next_batch: Callable[[Batches], Any]) -> None:
        self.epoch, self.number, self._next_batch = epoch, number, next_batch

    def __next__(self) -> Any:
        return self._next_batch(self)


class Reading:
    """The methods that `DataLoader` documents, over a stream of this process.

    Args:
        slow_after: Seconds after which a wait for a batch is logged as a warning.
    """

    def __init__(
        self,
        stream: Stream,
        *,
        slow_after: float = math.inf,
    ) -> None:
        self.stream = stream
        self._num_iterators = 0  # only the newest one is valid
        self._last_taken = (-1, 0)  # the iterator and the thread of the last batch
        self._wait_seconds = 0.0
        self._waits: deque[float] = deque(maxlen=_WAITS)
        say_slow = weakref.WeakMethod(self._say_slow)  # an unreferenced loader is freed at once, with its workers
        self.watch = Watch(slow_after, lambda seconds, frame: (say := say_slow()) and say(seconds, frame))
        self.last_batch_samples = 0

    @property
    def setup(self) -> Setup:
        return self.stream.setup

    @property
    def _cursor(self) -> Cursor:
        return self.stream.cursor

    @property
    def _steps(self) -> int | None:
        return self.setup.steps_per_epoch

    def __iter__(self) -> Batches:
        if self.ended and not self._cursor.resumed:
            self._move_on()
        self.is_over()
        self.invalidate()
        return Batches(self.epoch, self._num_iterators, self._next)

    def __len__(self) -> int:
        if self._steps is not None:
            return self._steps * self.setup.layout.gradient_accumulation_steps
        return self._known(self.stream.num_micro_batches() if not self.setup.recipe.repeat else None)

    @property
    def batches_left(self) -> int:
        if self.ended:
            return 0
        in_step = self.setup.layout.gradient_accumulation_steps
        if self._steps is not None:
            left = (self._steps - self.step % self._steps) * in_step - self.stream.begun
        else:
            left = self._known(self.stream.num_micro_batches_left() if self.setup.counts_are_known else None)
        return left

    def _known(self, num_batches: int | None) -> int:
        if num_batches is None:
            why = "repeat=True has no end"
            if not self.setup.recipe.repeat:
                nodes = self.setup.schema.uncounted(self.stream.table)
                why = f"only reading tells how many samples come out of {' and '.join(nodes)}"
            raise TypeError(
                f"The loader has no number of batches: {why}. Give it steps_per_epoch=, or iterate without len(). A torch "
                f"DataLoader over it asks for len(): leave that out, rd.DataLoader makes the batches itself."
            )
        return num_batches

    @property
    def gradient_accumulation_steps(self) -> int:
        return self.setup.layout.gradient_accumulation_steps

    def start(self) -> None:
        if not self.is_over():
            self.stream.start()
            if not self.stream.feed.is_ahead:
                self.stream.peek()

    def peek(self) -> Any:
        if self.is_over():
            raise StopIteration
        return self.stream.peek().batch

    @checks_kinds
    def skip(self, num_samples: int) -> None:
        whole = self.setup.layout.micro_step_samples
        if num_samples < 0 or num_samples % whole:
            raise ValueError(
                f"skip(num_samples={num_samples}): give a multiple of dp_world_size * micro_batch_size = {whole}, counted over "
                f"all ranks."
            )
        n, stop = self.setup.layout.num_logical_shards, self.stream.clock.samples + num_samples
        require_countable(f"skip(num_samples={num_samples})", stop, n)
        self._require_whole_steps(num_samples // whole)
        if num_samples:
            self.stream.skip(num_samples // whole)

    def _require_whole_steps(self, num_micro_batches: int) -> None:
        """Raise ``ValueError`` if steps are balanced, and a skip would begin or end within a step."""
        at, in_step = self._cursor, self.setup.layout.gradient_accumulation_steps
        if self.setup.balance is None or not num_micro_batches:
            return
        if at.counted != at.u or (at.u + num_micro_batches) % in_step:
            raise ValueError(
                f"skip() with balance= begins and ends with a step: {self.stream.begun} of its {in_step} micro batches have "
                f"been taken, and {num_micro_batches} are to be left out."
            )

    @checks_kinds
    def set_epoch(self, epoch: int) -> None:
        at = self.epoch
        if epoch == at + 1 and self.is_over():
            self._move_on()
        elif self._cursor.resumed and not self.stream.clock.in_step and 0 <= epoch == at - 1 and self._is_multiple():
            self.stream.cursor = self._cursor._replace(seen=epoch)  # a state there does not say if the end was seen
        elif epoch != at:
            raise ValueError(
                f"set_epoch({epoch}): the loader is in epoch {at}, and moves on to {at + 1} when its last batch has been "
                f"taken. Count the trainer's epochs from loader.epoch, or load the state that was saved with that count."
            )

    def reset(self) -> None:
        self.stream.reset()
        self.invalidate()

    def close(self) -> None:
        self.watch.stop()
        self.stream.close()

    @property
    def step(self) -> int:
        return self.stream.step

    @property
    def epoch(self) -> int:
        steps = self._steps
        return self._cursor.clock.epoch if steps is None else self.step // steps - self.ended

    @property
    def ended(self) -> bool:
        """True if the last batch of the epoch was consumed, and the end of the epoch has not been seen yet."""
        steps = self._steps
        if steps is None:
            return self._cursor.ended
        return self._is_multiple() and self.step // steps > self._cursor.seen

    def progress(self) -> dict[str, float]:
        p50, p99 = np.quantile(self._waits or [0.0], [0.5, 0.99]).tolist()
        waits = {"wait_seconds": self._wait_seconds, "wait_p50_seconds": p50, "wait_p99_seconds": p99}
        return {**waits, **self.stream.progress()}

    def report(self) -> Report:
        mine, ranks = self.progress(), self.stream.ranks
        return report(NAMES, ranks.numbers([mine[name] for name in NAMES]), ranks.rank if ranks.simulated else 0)

    def _say_slow(self, seconds: float, frame: FrameType | None) -> None:
        what = self.stream.feed.doing() if waits(frame) else ""
        _logger.warning(
            "Rank %d has waited %.0f s for a batch: %s.",
            self.stream.ranks.rank,
            seconds,
            what or describe(frame),
        )

    def state_dict(self) -> dict[str, Any]:
        self._warn_of_threads()
        return state_dict(self._cursor, self.stream.ends)

    def local_state_dict(self) -> dict[str, Any]:
        self._warn_of_threads()
        return local_state_dict(self._cursor, self.stream.ends)

    def load_state_dict(self, state: Mapping[str, Any], delivered: int = 0) -> None:
        self.stream.rewind()
        load_state_dict(self.stream, state, delivered)
        self.invalidate()

    def reopen(
        self,
        open_reading: Callable[..., Reading],
        state: Mapping[str, Any] | None,
        delivered: int,
        changed: Mapping[str, Any],
    ) -> None:
        """Go on with another stream, from a state or from here; if that fails, nothing has changed.

        Without a state, the ranks have to stay the same.

        Args:
            open_reading: Returns another `Reading`, with these arguments of `DataLoader` changed.
        """
        layout = self.setup.layout
        kept: dict[str, Any] = {"num_logical_shards": layout.num_logical_shards}
        kept |= {"micro_batch_size": layout.micro_batch_size} if state is None else {}
        other = open_reading(**{**kept, **changed})
        if state is None:
            if delivered:
                raise ValueError(f"reopen(delivered={delivered}): samples that came after a state, so give that, too.")
            self._require_same_ranks(other)
            self._require_whole_step(other)
        other.load_state_dict(self.state_dict() if state is None else state, delivered)
        if state is None:  # keep whether the end of the epoch was seen here
            unseen = self._steps is not None and self.ended and other._is_multiple()
            cursor = other._cursor
            other.stream.cursor = cursor._replace(resumed=self._cursor.resumed, seen=cursor.seen - unseen)
        self.close()
        self.stream, self.watch.seconds = other.stream, other.watch.seconds
        if state is not None:
            self.invalidate()

    def _require_same_ranks(self, other: Reading) -> None:
        was, now = self.stream.ranks, other.stream.ranks
        if (was.rank, was.world_size, was.circle) != (now.rank, now.world_size, now.circle):
            raise ValueError(
                f"reopen() as rank {now.rank} of {now.world_size}, which was rank {was.rank} of {was.world_size} of other "
                f"processes or an earlier process group: give state=, one state_dict() of the old ranks, the same on all new "
                f"ones."
            )

    def _require_whole_step(self, other: Reading) -> None:
        was, now, begun = self.setup.layout, other.setup.layout, self.stream.begun
        sizes = (was.global_batch_size, was.micro_batch_size) != (now.global_batch_size, now.micro_batch_size)
        if begun and (sizes or self.setup.balance is not None or other.setup.balance is not None):
            in_step = was.gradient_accumulation_steps
            raise ValueError(
                f"reopen() within a step, with another global batch or micro batch: {begun} of its {in_step} micro batches "
                f"have been taken. Call it when loader.step is {self.step + 1}, after {in_step - begun} more."
            )

    def invalidate(self) -> None:
        """Invalidate all iterators: the ranks or the position have changed."""
        self._num_iterators += 1

    def _warn_of_threads(self) -> None:
        """Warn if another thread takes the batches, perhaps into a queue, whose batches a checkpoint would lose."""
        iterator, thread = self._last_taken
        if iterator == self._num_iterators and thread != threading.get_ident():
            _logger.warning(
                "Another thread takes the batches of this loader, perhaps ahead of training: its state describes what that "
                "thread has taken, and a checkpoint leaves out for good what training has not received by then. Take the "
                "state in that thread, or let the loader itself read ahead, whose state stays that of training: "
                "num_workers= or prefetch=, and transfer= to devices."
            )

    def _next(self, batches: Batches) -> Any:
        if batches.number != self._num_iterators:
            raise RuntimeError(
                "This iterator is no longer valid: a newer iter(loader), a reset or a load took its place. Use the newest."
            )
        stream = self.stream
        at, ranks, steps = stream.cursor, stream.ends.ranks, stream.ends.setup.steps_per_epoch
        if ranks.found_alone:
            ranks.require_no_group()
        if (at.clock.epoch if steps is None else self.epoch) != batches.epoch:
            raise StopIteration
        thread, watch, started = threading.get_ident(), self.watch, time.perf_counter()
        if watch.began is not None:  # no call between this line and the next statement: two threads cannot both pass
            raise RuntimeError(
                "Another thread is within next() of this loader: one at a time takes its batches. Let one thread take them and "
                "fill a queue for the others, or hold a lock around next(); num_workers= makes batches in parallel."
            )
        watch.began = started
        try:
            if watch.thread != thread:
                watch.start()
            if (steps is not None or at.leg is None or at.u >= at.leg.calm_until) and self.is_over():
                self._move_on()
                raise StopIteration
            micro_batch = stream.take()
            self._last_taken = (batches.number, thread)
            self.last_batch_samples = micro_batch.num_real
            return micro_batch.batch
        finally:
            watch.began = None
            waited = time.perf_counter() - started
            self._wait_seconds += waited
            self._waits.append(waited)

    def is_over(self) -> bool:
        """True if no batch is left in the epoch; the next segment is planned if it has not begun."""
        if self._steps is None:
            return self.stream.begin() is None
        while not self.ended and self.stream.begin() is None:
            self.stream.move_on()  # the end of the data does not end an epoch of steps
        return self.ended

    def _move_on(self) -> None:
        if self._steps is None:
            self.stream.move_on()
        else:
            self.stream.cursor = self._cursor._replace(seen=self.step // self._steps, resumed=False)

    def _is_multiple(self) -> bool:
        return self._steps is not None and not self.stream.begun and self.step % self._steps == 0
