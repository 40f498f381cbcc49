"""`Transfer`: sends batches to XLA devices.

torch_xla's ``MpDeviceLoader`` reads some 30 batches ahead from a thread of its own: a loader that it reads directly
would say in a checkpoint that they were all trained on. It also takes an error of the loader for the end of the data. Here the
loader's own thread makes batches and sends them: sending waits for the devices, so without a thread the trainer would.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch_xla
from torch_xla.core import xla_model

from rescale_data.engine.transfer import DpTransfer
from rescale_data.xla.hosts import warn_if_hosts_share_samples
from rescale_data.xla.input_sharding import InputSharding, check_input_sharding


class Transfer(DpTransfer):
    """Sends batches to XLA devices: ``rd.DataLoader(..., transfer=Transfer(input_sharding=...))``.

    End each step with ``torch_xla.sync()``, so that the devices begin with it.

    Args:
        device: Default: ``torch_xla.device()``.
        input_sharding: How batches lie on the devices: of all columns, or by column (`None`: replicated). With several dp
            ranks, which have rows of their own, of every tensor: ``ShardingSpec(mesh, (all axes of the mesh, None, ...),
            minibatch=True)``.

    Raises:
        ValueError: From any batch that does not fit ``input_sharding``, when training comes to it.
    """

    def __init__(self, device: torch.device | None = None, *, input_sharding: InputSharding | None = None) -> None:
        self._device = torch_xla.device() if device is None else device
        self._sharding = dict(input_sharding) if isinstance(input_sharding, Mapping) else input_sharding

    def bind(self, dp_rank: int, dp_world_size: int) -> Callable[[Any], Any]:
        warn_if_hosts_share_samples(dp_world_size)
        return partial(self._send, dp_rank, dp_world_size)

    @torch.no_grad()
    def _send(self, dp_rank: int, dp_world_size: int, batch: Any) -> Any:
        device, sharding = self._device, self._sharding
        check_input_sharding(batch, sharding, dp_world_size, dp_rank)
        if not isinstance(sharding, Mapping):
            return xla_model.send_cpu_data_to_device([batch], device, sharding)[0]
        return {
            column: xla_model.send_cpu_data_to_device(value, device, sharding[column])[0]
            for column, value in batch.items()
        }
