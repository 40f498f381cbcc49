"""Batches on XLA devices, and a state that describes those that training has received.

    DataLoader ──► in hand ──► a thread ──► training
                   state: of what has come out here ─┘

torch_xla's ``MpDeviceLoader`` reads some 30 batches ahead from a thread of its own: a loader that it reads directly
would say in a checkpoint that they were all trained on. It also takes an error of the loader for the end of the data. Here
one thread sends what is in hand: sending waits for the devices, so without it the trainer would.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any

import torch
import torch_xla
from torch_xla.core import xla_model

from rescale_data.engine.reading import Batches
from rescale_data.engine.statedict import Sharded
from rescale_data.engine.stream import Stream
from rescale_data.loader import DataLoader
from rescale_data.lookahead import LookAhead
from rescale_data.xla.hosts import warn_if_hosts_share_samples
from rescale_data.xla.input_sharding import InputSharding, check_input_sharding


class DeviceLoader:
    """Brings the batches of a `DataLoader` to the devices. Save this object in place of the loader.

    A state of it is that of the `DataLoader`: either loads what the other has saved. It can be asked what the loader could be.

    An error of reading comes when training comes to its batch, over several dp ranks at once. Asked again, it goes on.

    Args:
        loader: From now on read by this object alone: asked for batches, its position or a state, it raises `RuntimeError`.
        device: Default: ``torch_xla.device()``.
        input_sharding: How batches lie on the devices: of all columns, or by column (`None`: replicated). With several dp
            ranks, which have rows of their own, of every tensor: ``ShardingSpec(mesh, (all axes of the mesh, None, ...),
            minibatch=True)``.
        read_ahead: Batches on the devices, or on their way, before training wants them.
        batches_per_execution: Batches between two ``torch_xla.sync()``, as ``MpDeviceLoader`` has it.

    Raises:
        ValueError: From any batch that does not fit ``input_sharding``.
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
        self._device = torch_xla.device() if device is None else device
        self._steps_between_syncs, self._steps = batches_per_execution, 0
        self._sent: deque[Future[Any]] = deque()  # of what is in hand the first ones
        self._thread: ThreadPoolExecutor | None = None  # ends with close, or with this object
        self._num_iterators = 0  # the newest is the valid one
        self._wait_seconds = 0.0

    def __iter__(self) -> Batches:
        """Go on from the position; an older iterator is invalid from now on."""
        self._ahead.begin()
        self._num_iterators += 1
        return Batches(self.epoch, self._num_iterators, self._next)

    def __len__(self) -> int:
        """As `DataLoader.__len__`."""
        return len(self._ahead)

    def __bool__(self) -> bool:
        return True

    @property
    def batches_left(self) -> int:
        """As `DataLoader.batches_left`, from where training is."""
        return self._ahead.batches_left

    def set_epoch(self, epoch: int) -> None:
        """As `DataLoader.set_epoch`, where training is."""
        self._ahead.set_epoch(epoch)

    def start(self) -> None:
        """As `DataLoader.start`."""
        self._ahead.start()

    def peek(self) -> Any:
        """The next batch, on the devices; it stays the next."""
        if self._ahead.is_over():
            raise StopIteration
        self._ahead.begin()
        self._send()
        return self._sent[0].result()

    def skip(self, num_samples: int) -> None:
        """As `DataLoader.skip`, from where training is; an iterator is invalid from now on (collective as a state is)."""
        self._sent.clear()
        self._ahead.skip(num_samples)
        self._num_iterators += 1

    def set_global_batch_size(self, global_batch_size: int) -> None:
        """As `DataLoader.set_global_batch_size`, from where training is; what is on its way is read again."""
        self._sent.clear()
        self._ahead.set_global_batch_size(global_batch_size)

    def exclude_steps(self, ranges: Iterable[tuple[int, int]]) -> None:
        """As `DataLoader.exclude_steps`, from where training is (collective as a state is)."""
        self._sent.clear()
        self._ahead.exclude_steps(ranges)

    def reset(self) -> None:
        """Go back to the beginning of the run."""
        self._sent.clear()
        self._ahead.reset()
        self._num_iterators += 1

    def close(self) -> None:
        """Stop the thread and worker processes; the position stays, and the next batch starts them again."""
        self._sent.clear()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.shutdown(cancel_futures=True)
        self.loader.close()

    # Where training is

    @property
    def stream(self) -> Stream:
        """What the loader reads, for `check_checkpoint`. Its position is ahead of training."""
        return self._ahead.stream

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

    @property
    def last_batch_samples(self) -> int:
        """As `DataLoader.last_batch_samples`, of the batch that training has received last."""
        return self._ahead.last_batch_samples

    def progress(self) -> dict[str, float]:
        """As `DataLoader.progress`, of the batches that training has received, and the time that it has waited for them."""
        return {"wait_seconds": self._wait_seconds, **self._ahead.progress()}

    # State

    def state_dict(self) -> dict[str, Any]:
        """The state that describes the batches training has received; collective as `DataLoader.state_dict` is."""
        return self._ahead.state_dict()

    @property
    def sharded(self) -> Sharded:
        """As `DataLoader.sharded`, of the batches that training has received."""
        return Sharded(self._ahead.standing, self.load_state_dict)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a state of this or of a `DataLoader`, of any topology."""
        self._sent.clear()
        self._ahead.load_state_dict(state_dict)
        self._num_iterators += 1

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
        started = time.perf_counter()
        if self._steps % self._steps_between_syncs == 0:
            torch_xla.sync()  # the devices begin with the last step
        self._steps += 1
        if batches.epoch != self.epoch or not self._send():
            torch_xla.sync()
            raise StopIteration
        batch = self._sent[0].result()
        self._sent.popleft()
        self._ahead.take()
        self._wait_seconds += time.perf_counter() - started
        return batch

    def _send(self) -> bool:
        """Send all that is in hand on its way; False at the end of the epoch."""
        self._ahead.read()
        for batch in self._ahead.in_hand[len(self._sent) :]:
            self._thread = self._thread or ThreadPoolExecutor(1, "rescale_data-xla")
            self._sent.append(self._thread.submit(self._to_device, batch))
        return bool(self._sent)

    @torch.no_grad()
    def _to_device(self, batch: Any) -> Any:
        sharding, ranks = self._sharding, self.loader.setup.ranks
        check_input_sharding(batch, sharding, ranks.world_size, ranks.rank)
        if not isinstance(sharding, Mapping):
            return xla_model.send_cpu_data_to_device([batch], self._device, sharding)[0]
        return {
            column: xla_model.send_cpu_data_to_device(value, self._device, sharding[column])[0]
            for column, value in batch.items()
        }
