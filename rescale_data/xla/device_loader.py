"""Batches on XLA devices, and a state that describes those that training has received.

    DataLoader ──► a thread sends them ──► training
                     state: of what has come out here ─┘

torch_xla's ``MpDeviceLoader`` reads some 30 batches ahead from a thread of its own: a loader that it reads directly
would say in a checkpoint that they were all trained on. It also takes an error of the loader for the end of the data. Here
one thread makes batches and sends them: sending waits for the devices, so without it the trainer would.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Self

import torch
import torch_xla
from torch_xla.core import xla_model

from rescale_data.engine.feed import InThread, Mapped
from rescale_data.engine.ranks.ranks import Ranks
from rescale_data.engine.reading import Batches
from rescale_data.errors import require_int
from rescale_data.loader import DataLoader
from rescale_data.xla.hosts import warn_if_hosts_share_samples
from rescale_data.xla.input_sharding import InputSharding, check_input_sharding


class DeviceLoader(DataLoader):
    """A `DataLoader` whose batches are on the devices. Save this object in place of the loader that it is made of.

    A state of it is that of the `DataLoader`: either loads what the other has saved.

    Args:
        loader: From now on read by this object alone: asked for batches, its position or a state, it raises `RuntimeError`.
        device: Default: ``torch_xla.device()``.
        input_sharding: How batches lie on the devices: of all columns, or by column (`None`: replicated). With several dp
            ranks, which have rows of their own, of every tensor: ``ShardingSpec(mesh, (all axes of the mesh, None, ...),
            minibatch=True)``.
        read_ahead: Batches on the devices, or on their way, before training wants them; at least 1.

    Raises:
        ValueError: From any batch that does not fit ``input_sharding``, when training comes to it.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        return object.__new__(cls)

    def __init__(
        self,
        loader: DataLoader,
        device: torch.device | None = None,
        *,
        input_sharding: InputSharding | None = None,
        read_ahead: int = 2,
    ) -> None:
        require_int(read_ahead=read_ahead)
        if read_ahead < 1:
            raise ValueError(f"read_ahead={read_ahead}: one batch at least is on its way.")
        warn_if_hosts_share_samples(loader.setup.ranks.world_size)
        vars(self).update(vars(loader), _reading=loader.give_away())
        sharding = dict(input_sharding) if isinstance(input_sharding, Mapping) else input_sharding
        self._send = partial(_to_device, torch_xla.device() if device is None else device, sharding)
        self._read_ahead = read_ahead
        self._send_ahead()

    def reopen(self, state: Mapping[str, Any] | None = None, delivered: int = 0, **changed: Any) -> None:
        """As `DataLoader.reopen`; the device and what is sent ahead stay."""
        super().reopen(state, delivered, **changed)
        self._send_ahead()

    def _send_ahead(self) -> None:
        stream = self.stream
        send = partial(self._send, stream.ranks)
        stream.through(lambda feed: InThread(Mapped(feed, send), self._read_ahead))

    def __iter__(self) -> Batches:
        """As `DataLoader.__iter__`; a step of the devices ends where the next batch is asked for."""
        batches = super().__iter__()
        return Batches(batches.epoch, batches.number, lambda _: _next(batches))


def _next(batches: Batches) -> Any:
    torch_xla.sync()  # the devices begin with the last step
    return next(batches)


@torch.no_grad()
def _to_device(device: torch.device, sharding: InputSharding | None, ranks: Ranks, batch: Any) -> Any:
    check_input_sharding(batch, sharding, ranks.world_size, ranks.rank)
    if not isinstance(sharding, Mapping):
        return xla_model.send_cpu_data_to_device([batch], device, sharding)[0]
    return {
        column: xla_model.send_cpu_data_to_device(value, device, sharding[column])[0] for column, value in batch.items()
    }
