"""`Stream`: the micro batches of one rank, and the position after the ones that were consumed."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Protocol, runtime_checkable

from rescale_data.engine.cursor import Cursor
from rescale_data.engine.ends import EpochEndFinder
from rescale_data.engine.feed import BatchFeed
from rescale_data.engine.micro_batch import MicroBatch
from rescale_data.engine.moves import next_segment, require_micro_batches, skip
from rescale_data.engine.ranks.ranks import Ranks
from rescale_data.engine.runner import NoSamplesLeft
from rescale_data.engine.segment import EpochSegment
from rescale_data.engine.setup import LoaderSetup
from rescale_data.errors import DataStateError
from rescale_data.layout.clock import Clock
from rescale_data.state import Ints

STOP_ITERATION_MESSAGE = (
    "collate_fn, transfer= or a function of rd.Balance raised StopIteration, which would end the epoch: return a value, or "
    "raise another error."
)


@runtime_checkable
class HasStream(Protocol):
    """Protocol of a `DataLoader` or `LogicalShards`: an object with a stream of micro batches (`stream_of`)."""

    @property
    def _stream(self) -> Stream: ...


def stream_of(loader: HasStream) -> Stream:
    """Return the stream of micro batches of a `DataLoader` or `LogicalShards`, for other modules of this package."""
    return loader._stream  # pyright: ignore[reportPrivateUsage]


class MicroBatchQueue:
    """The micro batches of a segment that a feed has made, by number; numbers before the cursor's are consumed.

    Args:
        segment: The segment; `None` if the feed has not begun.
        first_batch: The number of the first micro batch that the feed makes.
    """

    __slots__ = ("is_exhausted", "micro_batches", "next_batch", "segment")

    def __init__(self, segment: EpochSegment | None = None, first_batch: int = 0) -> None:
        self.segment, self.next_batch, self.is_exhausted = segment, first_batch, False
        self.micro_batches: dict[int, MicroBatch] = {}


class Stream:
    """The micro batches of one rank: a cursor, and the queue of micro batches made ahead of the cursor.

    An interrupt may come at any time: the cursor is then either the old one or the new one. The queue and the feed follow the
    cursor: micro batches that do not belong to it are dropped, and made again.

    Args:
        feed: Makes the micro batches.

    Attributes:
        last_batch_samples: The number of real samples in the newest batch.
    """

    def __init__(self, setup: LoaderSetup, feed: BatchFeed) -> None:
        self.feed, self.ends, self.last_batch_samples = feed, EpochEndFinder(setup), 0
        self.schema, self.layout, self._steps_per_epoch = setup.schema, setup.layout, setup.options.steps_per_epoch
        self._pid = 0  # the process in which the feed has begun
        self.reset()

    # The place of the run

    @property
    def setup(self) -> LoaderSetup:
        return self.ends.setup

    @property
    def ranks(self) -> Ranks:
        return self.ends.ranks

    @property
    def table(self) -> Ints:
        """The positions of all logical shards, ``int64[N, columns]``; only the rows that this rank owns are up to date."""
        return self.cursor.positions

    @property
    def clock(self) -> Clock:
        return self.cursor.clock_now(self.layout)

    @property
    def step(self) -> int:
        """The number of global batches delivered in the run."""
        return self.clock.global_step(self.layout.global_batch_size)

    @property
    def gradient_accumulation_steps(self) -> int:
        return self.layout.gradient_accumulation_steps

    @property
    def num_in_step(self) -> int:
        """The number of micro batches consumed in the current step, which is not complete."""
        return self.cursor.u % self.gradient_accumulation_steps

    def progress(self) -> dict[str, float]:
        """Return numbers for a logger, by name: of the feed, of the run, and of rows drawn by the shards of this rank."""
        clock, feed_counters = self.clock, self.feed.progress()
        num_queued = sum(u >= self.cursor.u for u in self._queue.micro_batches)
        run_counters = {
            "batches_ready": feed_counters.get("batches_ready", 0.0) + num_queued,
            "global_samples": float(clock.samples),
            "global_step": float(clock.global_step(self.layout.global_batch_size)),
            "filtered_rows": 0.0,
            "skipped_rows": 0.0,
            "dropped_samples": float(clock.dropped_samples),
            "padded_samples": float(clock.padded_samples),
        }
        drawn_counters = self.schema.progress(self.cursor.copy().table, self.ends.owned)  # a copy, for any thread
        return {**feed_counters, **run_counters, **drawn_counters}

    def has_short_tail(self) -> bool:
        """True if the epoch is known to have less than one global batch left, which will be dropped."""
        return not self.cursor.epoch_ended and self.setup.is_short_tail(self.ends.samples_left_in_epoch(self.table))

    # The epoch of the loader: an epoch of the data, or `steps_per_epoch` steps

    @property
    def epoch(self) -> int:
        """The number of the current epoch; it moves with `begin_next_epoch`."""
        steps = self._steps_per_epoch
        return self.cursor.clock.epoch if steps is None else self.step // steps - self.epoch_ended

    @property
    def epoch_ended(self) -> bool:
        """True if the last batch of the epoch was consumed, and the next epoch has not begun."""
        if self._steps_per_epoch is None:
            return self.cursor.epoch_ended
        return self.is_at_end_of_steps and not self.cursor.end_of_steps_seen

    @property
    def is_at_end_of_steps(self) -> bool:
        """True if an epoch of ``steps_per_epoch`` steps ends here; False without such epochs."""
        steps = self._steps_per_epoch
        return steps is not None and not self.num_in_step and self.step % steps == 0

    @property
    def num_batches(self) -> int | str:
        """The number of micro batches in the whole epoch, or a text that says why it is not known."""
        steps, is_endless = self._steps_per_epoch, self.setup.recipe.repeat
        epoch_size = None if is_endless or steps is not None else self.schema.samples_per_epoch(self.table)
        if epoch_size is not None:
            steps, num_leftover = divmod(epoch_size, self.layout.global_batch_size)
            steps += self.setup.options.tail == "pad" and num_leftover > 0
        return self._why_count_unknown() if steps is None else steps * self.gradient_accumulation_steps

    @property
    def batches_left(self) -> int | str:
        """The number of micro batches left in the epoch, or a text that says why it is not known."""
        if self.epoch_ended:
            return 0
        if (steps := self._steps_per_epoch) is not None:
            return (steps - self.step % steps) * self.gradient_accumulation_steps - self.num_in_step
        if not self.setup.epoch_size_is_known:
            return self._why_count_unknown()
        segment = self.begin_segment()
        num_left = 0 if segment is None else segment.micro_batches_left_at(self.cursor.u)
        return self._why_count_unknown() if num_left is None else num_left

    def _why_count_unknown(self) -> str:
        reason = "repeat=True has no end"
        if not self.setup.recipe.repeat:
            unsized_nodes = " and ".join(self.schema.unsized_nodes(self.table))
            reason = f"only reading tells how many samples come out of {unsized_nodes}"
        return (
            f"The loader has no number of batches: {reason}. Give it steps_per_epoch=, or iterate without len(). A torch "
            f"DataLoader over it asks for len(): leave that out, rd.DataLoader makes the batches itself."
        )

    def is_epoch_over(self) -> bool:
        """True if no batch is left in the epoch; plans the segment of the next batch if there is no plan."""
        if self._steps_per_epoch is None:
            return self.begin_segment() is None
        while not self.epoch_ended and self.begin_segment() is None:
            self._begin_next_data_epoch()  # the end of the data does not end an epoch of steps
        return self.epoch_ended

    def begin_next_epoch(self) -> None:
        """Begin the next epoch, if the last micro batch of the current epoch was consumed."""
        if self._steps_per_epoch is None:
            self._begin_next_data_epoch()
        else:
            self.cursor = self.cursor._replace(end_of_steps_seen=True, resumed=False)

    def _begin_next_data_epoch(self) -> None:
        if self.cursor.epoch_ended:
            self.cursor = self._move_to_next_segment(self.cursor)

    # Moving to another place

    def reset(self) -> None:
        """Go back to the beginning of the run, with the data files as they are now."""
        self.rewind()
        self.schema.use_histories({})
        self.load(self.schema.fresh_table(self.layout.num_logical_shards), Clock(), resumed=False)

    def load(self, table: Ints, clock: Clock, *, resumed: bool = True) -> None:
        """Continue from a table whose N rows are all up to date; after `steps_per_epoch` steps, count the epoch as over."""
        self.rewind()
        self.setup.runner.release_cache()
        self.ends = EpochEndFinder(replace(self.setup, ranks=self.ranks.with_load_counted))
        cursor = Cursor.from_clock(clock, table, self.ends.owners, self.layout)
        self.cursor = cursor._replace(end_of_steps_seen=True, resumed=resumed)

    def skip(self, num_samples: int) -> None:
        """Skip samples of all ranks as if they were consumed, also across epochs; on failure, the position does not change."""
        call, is_balanced = f"skip(num_samples={num_samples})", self.setup.options.balance is not None
        num_micro_batches = require_micro_batches(call, num_samples, self.layout, self.clock, whole_steps=is_balanced)
        if not num_micro_batches:
            return
        if self.cursor.first_unsaved_batch != self.cursor.u:
            raise ValueError(
                f"{call} with balance= begins within a step: {self.num_in_step} of its "
                f"{self.gradient_accumulation_steps} micro batches have been taken. Take the others first."
            )
        if self.ends.verify_error:
            raise DataStateError(self.ends.verify_error)
        self.rewind()
        samples_before, ends = self.clock.samples, EpochEndFinder(self.setup)
        cursor = skip(self.cursor.copy(), ends, num_micro_batches)
        clock = cursor.clock_now(self.layout).with_skipped(samples_before)
        self.ends = ends
        self.cursor = cursor._replace(clock=clock)

    def rewind(self, *, wait: bool = True) -> None:
        """Drop micro batches that were made but not consumed; make no more until the next one is requested."""
        self._queue = MicroBatchQueue()
        self._deferred_error: BaseException | None = None
        self.feed.stop(wait=wait)

    # Finding the segment

    def begin_segment(self) -> EpochSegment | None:
        """Return the segment of the next micro batch, and plan it if needed; `None` at the end of the epoch."""
        segment = self.cursor.segment
        if segment is not None and self.cursor.u < segment.end_check_u:
            return segment
        if self.ends.verify_error:
            raise DataStateError(self.ends.verify_error)
        if self._deferred_error is not None:
            failure, self._deferred_error = self._deferred_error, None
            raise failure
        if self.cursor.segment is None and not self.cursor.epoch_ended:
            self.cursor = self._move_to_next_segment(self.cursor)
        self.cursor = self._enter_segment(self.cursor)
        self.cursor = self._end_epoch_if_over(self.cursor)
        return self.cursor.segment

    def _enter_segment(self, cursor: Cursor) -> Cursor:
        """Return the cursor in the segment of its next micro batch: moved on if its present segment is over."""
        while cursor.segment is not None and not cursor.segment.is_last:
            current = cursor
            if not self.ends.is_segment_over(current, lambda u, current=current: self._make_batches_until(current, u)):
                break
            cursor = self._move_to_next_segment(current)
        return cursor

    def _end_epoch_if_over(self, cursor: Cursor) -> Cursor:
        """Return the cursor moved to the end of the epoch if the last micro batch of the epoch was consumed, else unchanged."""
        if cursor.segment is None or not cursor.segment.is_last or cursor.segment.stop != cursor.u:
            return cursor
        ended_cursor = self._move_to_next_segment(cursor)
        self.setup.runner.release_cache()
        return ended_cursor

    def _move_to_next_segment(self, cursor: Cursor) -> Cursor:
        self.rewind()  # after this, the feed no longer uses the runner
        return next_segment(cursor.copy(), self.ends)

    # Consuming

    def take(self) -> MicroBatch:
        """Return the next micro batch and consume it: states count it as delivered from here on.

        If the search for the segment after it fails, the next call raises the error. If the end of the epoch fails, this call
        raises the error, in place of the micro batch.

        Raises:
            StopIteration: At the end of the epoch.
        """
        micro_batch = self.peek()
        queue, u, cursor = self._queue, self.cursor.u, self.cursor.advanced(micro_batch)
        if cursor.segment is None or cursor.u >= cursor.segment.end_check_u:
            try:
                cursor = self._enter_segment(cursor)
            except BaseException as error:  # also Ctrl-C: it is raised after this batch has arrived
                self._deferred_error = error
            else:
                cursor = self._end_epoch_if_over(cursor)
        self.cursor = cursor
        queue.micro_batches.pop(u, None)
        if self._steps_per_epoch is not None and self.epoch_ended and not self.feed.is_prefetching:
            self.setup.runner.release_cache()
        return micro_batch

    def peek(self) -> MicroBatch:
        """Return the next micro batch without consuming it; raise `StopIteration` at the end of the epoch."""
        segment, steps = self.cursor.segment, self._steps_per_epoch
        if (segment is None or steps is not None or self.cursor.u >= segment.end_check_u) and self.is_epoch_over():
            raise StopIteration
        u = self.cursor.u
        self._make_batches_until(self.cursor, u + 1)
        micro_batch = self._queue.micro_batches.get(u)
        if micro_batch is None:
            raise DataStateError(
                "A logical shard ended before its pipeline's epoch_end() said that it would. Return None there if the "
                "number of samples is not certain."
            )
        return micro_batch

    # Making ahead

    def start(self) -> None:
        """Start the feed at the next micro batch, if it has not started."""
        if self.begin_segment() is not None:
            self._make_batches_until(self.cursor, self.cursor.u)

    def _make_batches_until(self, cursor: Cursor, stop: int) -> int:
        """Make micro batches of a segment up to ``stop``, or until a shard ends; return the number of the next micro batch.

        The feed starts at the cursor if it has not started there.
        """
        segment, queue = cursor.segment, self._queue
        if segment is None:
            return cursor.u
        if self.feed.is_prefetching and self._pid not in (0, os.getpid()):
            raise RuntimeError(
                f"This DataLoader reads ahead in process {self._pid}, of which this one is a fork: the workers and threads "
                f"are not its own. Make another loader here, and load the state into it."
            )
        if queue.segment is not segment or (cursor.u != queue.next_batch and cursor.u not in queue.micro_batches):
            self._queue, self._pid = MicroBatchQueue(), os.getpid()
            self.feed.begin(segment, cursor.copy().table, cursor.u)
            queue = self._queue = MicroBatchQueue(segment, cursor.u)
        while queue.next_batch < stop and not queue.is_exhausted:
            try:
                queue.micro_batches[queue.next_batch] = self.feed.next()
                queue.next_batch += 1
            except NoSamplesLeft:
                queue.is_exhausted = True
            except BaseException as error:
                # The runner is past the cursor now: the next call begins at the cursor again. Ctrl-C does not wait for a read.
                self.rewind(wait=isinstance(error, Exception))
                if isinstance(error, StopIteration):
                    raise RuntimeError(STOP_ITERATION_MESSAGE) from error
                raise
        return queue.next_batch

    def close(self) -> None:
        """Close the feed; the position in the run does not change."""
        self.rewind()  # first: Ctrl-C within `close` leaves no queue of a feed that has stopped
        self.feed.close()
        self.setup.runner.release_cache()
