"""A stream as its batches are taken: iterators over it, and what it counts. One object at a time owns it.

A `DataLoader` does, until it gives it away to whoever reads ahead of training (`LookAhead`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rescale_data.engine.collate import pin, with_valid
from rescale_data.engine.feed import MicroBatch
from rescale_data.engine.moment import counters
from rescale_data.engine.setup import Setup
from rescale_data.engine.statedict import full_state_dict, load_state_dict, state_dict
from rescale_data.engine.stream import Stream
from rescale_data.errors import require_int

_logger = logging.getLogger("rescale_data")


class Batches(Iterator[Any]):
    """The batches of a loader to the end of the epoch in which it was asked for them."""

    def __init__(self, epoch: int, number: int, next_batch: Callable[[Batches], Any]) -> None:
        self.epoch, self.number, self._next_batch = epoch, number, next_batch

    def __next__(self) -> Any:
        return self._next_batch(self)


class Reading:
    """What `DataLoader` documents, method by method.

    Args:
        pin_memory: Whether batches are brought to page-locked memory here.
    """

    def __init__(self, setup: Setup, stream: Stream, *, pin_memory: bool) -> None:
        self.setup, self.stream, self._pin = setup, stream, pin_memory
        self._num_iterators = 0  # the newest is the valid one
        self._last_taken = (-1, 0)  # from which iterator, and in which thread
        self._wait_seconds = 0.0
        self.last_batch_samples = 0

    def __iter__(self) -> Batches:
        self.stream.begin()
        self.invalidate()
        return Batches(self.epoch, self._num_iterators, self._next)

    def __len__(self) -> int:
        left = self.stream.num_micro_batches_left() if self.setup.recipe.repeat or self.setup.counts_are_known else None
        if left is None:
            why = (
                "repeat=True is endless"
                if self.setup.recipe.repeat
                else "the pipeline does not know its number of samples"
            )
            raise TypeError(f"The number of batches left has no len(): {why}.")
        return left

    def start(self) -> None:
        self.stream.start()
        if not self.setup.layout.num_workers:
            self.stream.peek()

    def peek(self) -> Any:
        return self._finish(self.stream.peek())

    def skip(self, num_samples: int) -> None:
        whole = self.setup.layout.micro_step_samples
        require_int(num_samples=num_samples)
        if num_samples < 0 or num_samples % whole:
            raise ValueError(
                f"skip(num_samples={num_samples}): give a multiple of dp_world_size * micro_batch_size = {whole}, counted over "
                f"all ranks."
            )
        self.stream.skip(num_samples // whole)

    def reset(self) -> None:
        self.stream.reset()
        self.invalidate()

    def close(self) -> None:
        self.stream.close()

    @property
    def step(self) -> int:
        return self.stream.clock.global_step(self.setup.layout.global_batch_size)

    @property
    def epoch(self) -> int:
        return self.stream.epoch

    def progress(self) -> dict[str, float]:
        return {"wait_seconds": self._wait_seconds, **counters(self.stream)}

    def state_dict(self) -> dict[str, Any]:
        self._warn_if_read_ahead()
        return state_dict(self.stream)

    def full_state_dict(self) -> dict[str, Any]:
        self._warn_if_read_ahead()
        return full_state_dict(self.stream)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        load_state_dict(self.stream, state)
        self.invalidate()

    def invalidate(self) -> None:
        """The iterators that there are give no more batches: who reads has changed, or from where."""
        self._num_iterators += 1

    def _warn_if_read_ahead(self) -> None:
        """Who takes batches in another thread than training's is perhaps a queue, whose batches a checkpoint would lose."""
        iterator, thread = self._last_taken
        if iterator == self._num_iterators and thread != threading.get_ident():
            _logger.warning(
                "Another thread takes the batches of this loader, perhaps ahead of training: its state describes what that "
                "thread has taken, and a checkpoint leaves out for good what training has not received by then. Take the "
                "state in that thread, or read ahead with rescale_data.lookahead.LookAhead (XLA: rescale_data.xla."
                "DeviceLoader), whose state is that of training."
            )

    def _next(self, batches: Batches) -> Any:
        if batches.number != self._num_iterators:
            raise RuntimeError(
                "This iterator is no longer valid: a newer iter(loader), a reset, a load or what reads the loader ahead took "
                "its place. Use the newest."
            )
        stream = self.stream
        if stream.epoch != batches.epoch:
            raise StopIteration
        started = time.perf_counter()
        batch = self._finish(stream.peek())
        micro_batch = stream.take()  # no sooner: a batch that cannot be handed over has not been delivered
        self._last_taken = (batches.number, threading.get_ident())
        self._wait_seconds += time.perf_counter() - started
        self.last_batch_samples = micro_batch.num_real
        return batch

    def _finish(self, micro_batch: MicroBatch) -> Any:
        batch = micro_batch.batch
        if self.setup.tail == "pad":
            batch = with_valid(batch, micro_batch.num_real, self.setup.layout.micro_batch_size)
        return pin(batch) if self._pin else batch
