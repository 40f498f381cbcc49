"""`BaseLoader`: the iterators, states and counters of a loader, over its stream."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any, TypeVar

import numpy as np

from rescale_data.engine.feed import InProcessFeed
from rescale_data.engine.peers import (
    BATCH_MESSAGE,
    PEEKED_MESSAGE,
    RESULT,
    BatchCounts,
    CallsSharedWithPeers,
    on_first_peer,
)
from rescale_data.engine.report import COUNTER_NAMES, Report, report_over_ranks
from rescale_data.engine.states.load import load_state_dict
from rescale_data.engine.states.statedict import local_state_dict, mark_unsavable, state_and_unsavable_reason
from rescale_data.engine.stream import Stream, stream_of
from rescale_data.engine.watch import SLOW_SECONDS, Watchdog, describe, outer_frames, stacks, waits_for_batches
from rescale_data.errors import checks_argument_types

R = TypeVar("R")
_logger = logging.getLogger("rescale_data")
_BATCHES_PER_GROUP_CHECK = 16
"""The number of batches after which an iterator asks again if there is a process group younger than its loader."""
_NUM_RECENT_WAITS = 1000
"""The number of most recent waits for a batch, from which percentiles are computed."""


class BatchIterator(Iterator[Any]):
    """An iterator over the batches of a loader, to the end of the epoch in which it was made."""

    def __init__(self, iterator_number: int, next_batch: Callable[[BatchIterator], Any]) -> None:
        self.number, self._next_batch = iterator_number, next_batch

    def __next__(self) -> Any:
        return self._next_batch(self)


class BaseLoader:
    """Reads a stream: the base class of `DataLoader`, with all methods that do not depend on its arguments.

    Args:
        peer_calls: Makes each call together with the peers of this process, of which the first one alone has a stream.
    """

    def __init__(self, peer_calls: CallsSharedWithPeers | None) -> None:
        self._own_stream: Stream | None = None  # the subclass opens it; peers of the process that reads have none
        self._peer_calls = peer_calls
        self._num_iterators = self._iterator_epoch = 0  # only the newest one is valid, up to the end of this epoch
        self._last_taker = (-1, 0)  # the iterator and the thread of the last batch
        self._wait_seconds = 0.0
        self._recent_wait_seconds: deque[float] = deque(maxlen=_NUM_RECENT_WAITS)
        # An unreferenced loader is freed at once, with its workers
        weak_warn_slow = weakref.WeakMethod(self._warn_slow)
        self._watch = Watchdog(SLOW_SECONDS, lambda seconds, frame: (warn := weak_warn_slow()) and warn(seconds, frame))

    @property
    def _stream(self) -> Stream:
        """The stream of micro batches of this rank (`HasStream`).

        Raises:
            AttributeError: Another peer reads for this process.
            RuntimeError: The process group is younger than the loader.
        """
        if self._own_stream is None:
            raise AttributeError("This process reads nothing: the first of its peers= does.")
        self._own_stream.ranks.require_no_group()
        return self._own_stream

    @property
    def _counts(self) -> Stream | BatchCounts:
        """The loader's counts: on the first peer of a dp rank its stream, on other peers a copy that the first one sent."""
        counts_from_first_peer = None if self._peer_calls is None else self._peer_calls.counts
        return self._stream if counts_from_first_peer is None else counts_from_first_peer

    # Batches

    def __iter__(self) -> BatchIterator:
        """Return an iterator from the current position on, or over the next epoch if the last batch of this one was taken.

        After a load of a state that was saved there iterators are empty until ``next`` of one has raised
        ``StopIteration``. Older iterators are invalid.
        """
        self._begin_iteration()
        return BatchIterator(
            self._num_iterators, self._take_batch if self._peer_calls is None else self._take_shared_batch
        )

    @on_first_peer(RESULT)
    def _begin_iteration(self) -> None:
        stream = self._stream
        if stream.epoch_ended and not stream.cursor.resumed:
            stream.begin_next_epoch()
        stream.is_epoch_over()
        self._invalidate()
        self._iterator_epoch = self.epoch

    def __len__(self) -> int:
        """Return the number of micro batches in the whole epoch; ``TypeError`` if it has no end, or only reading finds it."""
        return _require_count(self._counts.num_batches)

    @property
    def batches_left(self) -> int:
        """The number of micro batches until the iterator ends, 0 after the last one; ``TypeError`` as for `len`."""
        return _require_count(self._counts.batches_left)

    @property
    def gradient_accumulation_steps(self) -> int:
        """A, the number of batches of this rank in one optimizer step."""
        return self._counts.gradient_accumulation_steps

    @property
    def last_batch_samples(self) -> int:
        """The number of real samples in the newest batch of this rank; padding, only with ``tail="pad"``, comes after them."""
        return self._counts.last_batch_samples

    @on_first_peer(RESULT)
    def start(self) -> None:
        """Start to read, so that the first batch is ready when training begins: call it before the model is loaded.

        Worker processes, or the thread of ``prefetch``, go ahead in the background; else the first batch is made now.
        A later load begins anew.
        """
        if not self._stream.is_epoch_over():
            self._stream.start()
            if not self._stream.feed.is_prefetching:
                self._stream.peek()

    @on_first_peer(PEEKED_MESSAGE)
    def peek(self) -> Any:
        """Return the next batch without consuming it; do not change it, since ``next`` may return the same memory.

        At the end of an epoch ``StopIteration``.

        Like iterating, collective over the dp ranks where an epoch's end is found by reading (``repeat=False`` with packing
        or filters): all ranks call it, or none. So are `start` and `skip`.
        """
        return self._stream.peek().batch

    @on_first_peer(RESULT)
    @checks_argument_types
    def skip(self, num_samples: int) -> None:
        """Skip samples as if they had been delivered, also across the ends of epochs.

        At a constant cost where the pipeline allows it; a whole epoch costs less than a millisecond where its number of samples
        is known. Else rows are read for it; where that fails, nothing has moved. The state keeps what was left out, as ranges.
        Collective over the dp ranks: each of them calls it, with the same number.

        Args:
            num_samples: Over all ranks, a multiple of ``W * b``.
        """
        self._stream.skip(num_samples)

    @on_first_peer(RESULT)
    @checks_argument_types
    def set_epoch(self, epoch: int) -> None:
        """Begin epoch ``epoch`` if the previous one has ended; do nothing if the loader is already in ``epoch``.

        Collective as iterating.

        Raises:
            ValueError: It is another epoch.
        """
        stream, current = self._stream, self._stream.epoch
        is_resumed_at_end = stream.is_at_end_of_steps and stream.cursor.resumed and not stream.clock.in_step
        if epoch == current + 1 and stream.is_epoch_over():
            stream.begin_next_epoch()
        elif is_resumed_at_end and 0 <= epoch == current - 1:
            stream.cursor = stream.cursor._replace(end_of_steps_seen=False)  # a state there does not say if it was
        elif epoch != current:
            raise ValueError(
                f"set_epoch({epoch}): the loader is in epoch {current}, and moves on to {current + 1} when its last batch has "
                f"been taken. Count the trainer's epochs from loader.epoch, or load the state that was saved with that count."
            )

    @on_first_peer(RESULT)
    def reset(self) -> None:
        """Go back to the beginning of the run."""
        self._stream.reset()
        self._invalidate()

    def close(self) -> None:
        """Stop the worker processes, or the thread; the position stays, and the next batch starts them again."""
        self._watch.stop()
        if self._own_stream is not None:
            self._own_stream.close()

    # Step, epoch and counters

    @property
    def step(self) -> int:
        """The number of global batches delivered."""
        return self._counts.step

    @property
    def epoch(self) -> int:
        """The number of the current epoch; it rises at ``StopIteration``, or when ``iter`` begins the next epoch without one.

        0 with ``repeat=True`` and no ``steps_per_epoch``; each shard has its own there (see `progress`).
        """
        return self._counts.epoch

    def progress(self) -> dict[str, float]:
        """Return counters for a logger, by name: of the run, of rows drawn by this rank's shards, and of waits and reads.

        ``dropped_samples`` and ``padded_samples`` count from the beginning of the run; they are in the state.
        """
        if isinstance(self._counts, BatchCounts):
            return {"global_step": float(self.step)}
        p50, p99 = np.quantile(self._recent_wait_seconds or [0.0], [0.5, 0.99]).tolist()
        wait_counters = {"wait_seconds": self._wait_seconds, "wait_p50_seconds": p50, "wait_p99_seconds": p99}
        return {**wait_counters, **self._stream.progress()}

    @on_first_peer(RESULT)
    def report(self) -> Report:
        """Return numbers of `progress` over all dp ranks (collective), for a log line: which rank waits, and for what.

        Returns:
            By name ``(minimum, median, maximum, worst)``, the last a dp rank; ``str`` makes a line of it.
        """
        counters, ranks = self.progress(), self._stream.ranks
        values = ranks.gather_floats([counters[name] for name in COUNTER_NAMES])
        return report_over_ranks(values, ranks.rank if ranks.simulated else 0)

    def _warn_slow(self, seconds: float, frame: FrameType | None) -> None:
        activity = self._stream.feed.activity() if waits_for_batches(frame) else ""
        _logger.warning(
            "Rank %d has waited %.0f s for a batch: %s.", self._stream.ranks.rank, seconds, activity or describe(frame)
        )

    # State

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the batches delivered so far: a copy, and the same on every rank.

        Collective over the dp ranks: all of them call it, before any ``if rank == 0``. It pickles, and loads on any topology.

        Returns:
            ``{"table": int64[N, columns], "header": str}``: see docs/design.md, 8.

        Raises:
            ValueError: Ranks are simulated, see `rescale_data.testing.full_state_dict`.
            RuntimeError: Another rank did not call it within ``timeout``.
            DataStateError: The ranks stand at different batches, and the state is pickled. It can be loaded into.
        """
        return mark_unsavable(*self._state_dict())

    @on_first_peer(RESULT)
    def _state_dict(self) -> tuple[dict[str, Any], str]:
        self._warn_of_other_thread()
        return state_and_unsavable_reason(self._stream.cursor, self._stream.ends)

    @on_first_peer(RESULT)
    def local_state_dict(self) -> dict[str, Any]:
        """Return the state as this rank knows it, without communication, for snapshots that are taken often and seldom needed.

        It does not pickle. `rd.whole_state` makes it what `state_dict` would have returned (collective).

        Raises:
            TypeError: The loader has ``peers=`` and several dp ranks: the first peer alone has the rows.
        """
        self._warn_of_other_thread()
        num_dp_ranks = self._stream.layout.dp_world_size
        if self._peer_calls is not None and num_dp_ranks > 1:
            raise TypeError(
                f"local_state_dict() of a loader with peers= and {num_dp_ranks} dp ranks: the rows of a dp rank "
                f"stay on the first of its peers. Call loader.state_dict() on all ranks, which returns the whole state."
            )
        return local_state_dict(self._stream.cursor, self._stream.ends)

    @on_first_peer(RESULT)
    @checks_argument_types
    def load_state_dict(self, state_dict: Mapping[str, Any], delivered: int = 0) -> None:
        """Load a state that was saved on any topology, and continue from it.

        Collective over the dp ranks where it is one rank's own, and with ``delivered``, for which they read as for `skip`.

        Args:
            state_dict: What `state_dict` returned, or DCP loaded into it.
            delivered: Samples that were delivered after the state, over all ranks of the topology that it names, and that are
                in the model: a multiple of its ``W * b``. They count as served, and the run goes on behind them. ``repeat``,
                ``tail`` and ``balance`` are those with which they were delivered.

        Raises:
            DataStateError: It belongs to another seed, N, dataset or pipeline, or is incomplete. Nothing has changed then.
            ValueError: ``delivered`` is not a multiple of that, or further than a state can count.

        Example:
            >>> import rescale_data as rd
            >>> loader = rd.DataLoader(range(12), shuffle=False, global_batch_size=4)
            >>> state = loader.state_dict()
            >>> _ = next(iter(loader))  # and then the process dies
            >>> loader = rd.DataLoader(range(12), shuffle=False, global_batch_size=4)
            >>> loader.load_state_dict(state, delivered=4)
            >>> next(iter(loader))
            tensor([4, 5, 6, 7])
        """
        self._stream.rewind()
        load_state_dict(self._stream, state_dict, delivered)
        self._invalidate()

    def _invalidate(self) -> None:
        """Invalidate all iterators, because the ranks or the position have changed."""
        self._num_iterators += 1

    def _warn_of_other_thread(self) -> None:
        """Warn if another thread takes the batches: a checkpoint would lose the batches that it has queued."""
        iterator_number, thread_id = self._last_taker
        if iterator_number == self._num_iterators and thread_id != threading.get_ident():
            _logger.warning(
                "Another thread takes the batches of this loader, perhaps ahead of training: its state describes what that "
                "thread has taken, and a checkpoint leaves out for good what training has not received by then. Take the "
                "state in that thread, or let the loader itself read ahead, whose state stays that of training: "
                "num_workers= or prefetch=, and transfer= to devices."
            )

    def _take_batch(self, iterator: BatchIterator) -> Any:
        if iterator.number != self._num_iterators:
            raise RuntimeError(
                "This iterator is no longer valid: a newer iter(loader), a reset or a load took its place. Use the newest."
            )
        stream = self._own_stream
        if stream is None or iterator.number != self._last_taker[0] or not stream.cursor.u % _BATCHES_PER_GROUP_CHECK:
            stream = self._stream  # asks torch for a process group, which for each batch would cost 2 %
        if stream.epoch != self._iterator_epoch:
            raise StopIteration
        thread_id, watch, start_time = threading.get_ident(), self._watch, time.perf_counter()
        # Of two threads here, the second one sees a time, or the frame of the first one
        is_second = watch.start_time is not None and self._has_other_call_of_next()
        if is_second or (thread_id != self._last_taker[1] and self._is_making_batches()):
            raise RuntimeError(
                "Another thread, or a call around this one, is within next() of this loader: one at a time takes its batches. "
                "Let one thread take them and fill a queue for the others, or hold a lock around next(); num_workers= makes "
                "batches in parallel."
            )
        watch.thread_id = thread_id
        watch.start_time = start_time
        try:
            if not watch.is_running:
                watch.start()
            micro_batch = stream.take()
            self._last_taker = (iterator.number, thread_id)
            stream.last_batch_samples = micro_batch.num_real
            return micro_batch.batch
        except StopIteration:
            stream.begin_next_epoch()
            raise
        finally:
            watch.start_time = None
            wait_seconds = time.perf_counter() - start_time
            self._wait_seconds += wait_seconds
            self._recent_wait_seconds.append(wait_seconds)

    def _is_making_batches(self) -> bool:
        """True if this thread makes batches of the loader, ahead of the trainer: a function of the pipeline calls."""
        code, own_id = InProcessFeed.next.__code__, threading.get_ident()
        feeds = [frame.f_locals["self"] for frame in outer_frames(stacks()[own_id]) if frame.f_code is code]
        return any(feed.runner is self._stream.setup.runner for feed in feeds)

    _take_shared_batch = on_first_peer(BATCH_MESSAGE)(_take_batch)

    def _has_other_call_of_next(self) -> bool:
        """True if some thread is within `_take_batch`, apart from the present call; Ctrl-C may leave a time without one."""
        own_code = BaseLoader._take_batch.__code__
        calls = [frame for stack in map(outer_frames, stacks().values()) for frame in stack if frame.f_code is own_code]
        return sum(method_frame.f_locals.get("self") is self for method_frame in calls) > 1


@on_first_peer(RESULT)
def call_with_stream(loader: BaseLoader, function: Callable[[Stream], R]) -> R:
    """Return ``function(stream)``, computed by the loader's first peer for all peers (collective over the peers)."""
    return function(stream_of(loader))


def _require_count(number: int | str) -> int:
    """Return a count of batches; raise ``TypeError`` with the reason, a text, if it is not known."""
    if isinstance(number, str):
        raise TypeError(number)
    return number
