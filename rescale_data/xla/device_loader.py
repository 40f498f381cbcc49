"""Batches on XLA devices, and a state that describes those that training has received.

    DataLoader ──► in hand ──► MpDeviceLoader's threads ──► training
                   state: of what has come out here ───────────┘

torch_xla's ``MpDeviceLoader`` reads up to 25 batches ahead from a thread of its own: a loader that it reads directly
would say in a checkpoint that they were all trained on. It also takes an error of the loader for the end of the data.
"""

from __future__ import annotations

import functools
import queue
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any

import torch
import torch_xla
from torch_xla.distributed.parallel_loader import MpDeviceLoader

from rescale_data.loader import Batches, DataLoader
from rescale_data.lookahead import LookAhead
from rescale_data.xla.hosts import warn_if_hosts_share_samples
from rescale_data.xla.input_sharding import InputSharding, check_input_sharding


class DeviceLoader:
    """Feeds ``MpDeviceLoader`` from a `DataLoader`. Save this object in place of the loader.

    A state of it is that of the `DataLoader`: either loads what the other has saved.

    Args:
        loader: From now on read by this object alone.
        device: Default: ``torch_xla.device()``.
        input_sharding: How batches lie on the devices: of all columns, or by column (`None`: replicated). With several dp
            ranks, which have rows of their own, of every tensor: ``ShardingSpec(mesh, (all axes of the mesh, None, ...),
            minibatch=True)``.
        read_ahead: Batches on their way to the devices.
        batches_per_execution: Batches between two ``torch_xla.sync()``, as ``MpDeviceLoader`` has it.

    Raises:
        ValueError: From the first batch, where it does not fit ``input_sharding``.
    """

    def __init__(
        self,
        loader: DataLoader,
        device: torch.device | None = None,
        *,
        input_sharding: InputSharding | None = None,
        read_ahead: int = 2,
        batches_per_execution: int = 1,
    ) -> None:
        warn_if_hosts_share_samples(loader.setup.ranks.world_size)
        self.loader = loader
        self._ahead = LookAhead(loader, read_ahead)
        self._sharding = dict(input_sharding) if isinstance(input_sharding, Mapping) else input_sharding
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._on_device: Iterator[Any] | None = None
        self._num_iterators = 0  # the newest is the valid one
        self._new_device_loader: Callable[[Iterator[Any]], MpDeviceLoader] = functools.partial(
            MpDeviceLoader,
            device=torch_xla.device() if device is None else device,
            input_sharding=self._sharding,
            batches_per_execution=batches_per_execution,
            loader_prefetch_size=read_ahead,
            device_prefetch_size=1,  # its thread waits until so many are there
            host_to_device_transfer_threads=1,  # with more they overtake each other
        )

    def __iter__(self) -> Batches:
        """Go on from the position; an older iterator is invalid from now on."""
        self._ahead.begin()
        self._num_iterators += 1
        return Batches(self.epoch, self._num_iterators, self._next)

    @property
    def step(self) -> int:
        """Global batches that training has received."""
        return self._ahead.step

    @property
    def epoch(self) -> int:
        """As `DataLoader.epoch`, where training is."""
        return self._ahead.epoch

    @property
    def gradient_accumulation_steps(self) -> int:
        return self.loader.gradient_accumulation_steps

    def state_dict(self) -> dict[str, Any]:
        """The state that describes the batches training has received; collective where `DataLoader.state_dict` is."""
        return self._ahead.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a state of this or of a `DataLoader`, of any topology."""
        self._stop()
        self._ahead.load_state_dict(state_dict)
        self._num_iterators += 1

    def reset(self) -> None:
        """Go back to the beginning of the run."""
        self._stop()
        self._ahead.reset()
        self._num_iterators += 1

    def close(self) -> None:
        """Stop threads and worker processes; the position stays, and the next batch starts them again."""
        self._stop()
        self.loader.close()

    def __enter__(self) -> DeviceLoader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _next(self, batches: Batches) -> Any:
        if batches.number != self._num_iterators:
            raise RuntimeError(
                "This iterator is no longer valid: a newer iter(loader), a reset or a load took its place. Use the newest."
            )
        for batch in self._ahead.read() if self._on_device is not None else self._start():
            self._queue.put(batch)
        if not self._ahead.in_hand:
            self._stop()
            raise StopIteration
        batch = self._receive()
        self._ahead.take()
        return batch

    def _start(self) -> list[Any]:
        """Start the threads; what they are to be given first."""
        self._ahead.read()
        first = self._ahead.in_hand
        if first:
            check_input_sharding(first[0], self._sharding, self.loader.setup.ranks.world_size)
        self._queue = queue.SimpleQueue()
        self._on_device = iter(self._new_device_loader(_until_end(self._queue)))
        return first

    def _receive(self) -> Any:
        if self._on_device is None:
            raise RuntimeError("The device loader has not begun.")
        try:
            return next(self._on_device)
        except Exception as error:
            self._on_device = None  # its threads have ended; what is in hand goes to new ones
            if isinstance(error, StopIteration):
                raise RuntimeError("torch_xla's loader thread ended before the data did: see the log above.") from None
            raise

    def _stop(self) -> None:
        """End the threads. What they have in hand stays in ours."""
        on_device, self._on_device = self._on_device, None
        if on_device is not None:
            self._queue.put(_END)
            for _ in on_device:
                pass


_END = object()


def _until_end(batches: queue.SimpleQueue[Any]) -> Iterator[Any]:
    while (batch := batches.get()) is not _END:
        yield batch
