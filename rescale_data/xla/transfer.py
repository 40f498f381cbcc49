"""torch_xla's threads, which bring batches to the devices.

    put ──► its loader thread ──► its transfer thread ──► take

They are those of ``MpDeviceLoader``, by the class beneath it, which can be ended while batches are on their way.
"""

from __future__ import annotations

import contextlib
import queue
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch_xla.distributed.parallel_loader import ParallelLoader

from rescale_data.xla.input_sharding import InputSharding


class Transfer:
    """Brings batches to a device, in order. Its threads end with `end`, or with the object.

    Args:
        num_batches: How many may wait for their transfer.
        batches_per_execution: Batches between two ``torch_xla.sync()``.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        input_sharding: InputSharding | None,
        num_batches: int,
        batches_per_execution: int,
    ) -> None:
        self._batches: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._loader = ParallelLoader(
            _until_end(self._batches),
            [device],
            input_sharding=input_sharding,
            batches_per_execution=batches_per_execution,
            loader_prefetch_size=num_batches,
            device_prefetch_size=1,  # its thread waits until so many are there
            host_to_device_transfer_threads=1,  # with more they overtake each other
        )
        self._on_device = iter(self._loader.per_device_loader(device))
        # Called by a garbage collection too, in any thread: so it takes no lock, and leaves the work to the loader thread.
        self._finalize = weakref.finalize(self, self._batches.put, _End(self._loader.close))

    def put(self, batch: Any) -> None:
        """Send a batch on its way."""
        self._batches.put(batch)

    def take(self) -> Any:
        """Wait for the next batch; what torch_xla raised in its thread, where that has failed."""
        try:
            return next(self._on_device)
        except StopIteration:
            raise RuntimeError(
                "torch_xla's threads ended before the data did, as they do at a batch that is None: see the log above."
            ) from None

    def end(self) -> None:
        """Return when the threads have ended. Batches on their way are forgotten, and errors of their transfer with them."""
        self._finalize()
        self._loader.close()


class _End:
    """The last thing that the loader thread is given."""

    def __init__(self, close: Callable[[], None]) -> None:
        self.close = close


def _until_end(batches: queue.SimpleQueue[Any]) -> Iterator[Any]:
    while not isinstance(batch := batches.get(), _End):
        yield batch
    # What it puts into its queues is dropped from now on. Then it joins its threads, of which this is the first.
    with contextlib.suppress(RuntimeError):
        batch.close()
