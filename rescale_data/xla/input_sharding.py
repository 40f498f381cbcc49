"""Whether batches can lie on the devices as they are asked to: torch_xla says it from a thread, or not at all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch_xla.runtime as xr
from torch_xla.distributed.spmd import ShardingSpec

_Sharding = ShardingSpec | Mapping[str, ShardingSpec | None] | None


def check_input_sharding(batch: Any, input_sharding: _Sharding) -> None:
    """``ValueError`` where a column has no sharding, or does not divide over the devices of a host as it must."""
    if isinstance(input_sharding, Mapping):
        _check_columns(batch, input_sharding)
        for column, sharding in input_sharding.items():
            _check(column, batch[column], sharding)
    elif isinstance(batch, Mapping):
        for column, value in batch.items():
            _check(column, value, input_sharding)
    else:
        _check("the batch", batch, input_sharding)


def _check_columns(batch: Any, input_sharding: Mapping[str, ShardingSpec | None]) -> None:
    if not isinstance(batch, Mapping) or set(batch) != set(input_sharding):
        given = f"the columns {sorted(batch)}" if isinstance(batch, Mapping) else f"a {type(batch).__name__}"
        raise ValueError(
            f"The batch is {given}, input_sharding is for {sorted(input_sharding)}. Name every column, None for those that "
            f"are replicated."
        )
    others = [column for column, value in batch.items() if type(value) is not torch.Tensor]
    if others:
        raise ValueError(
            f"The columns {others} are no tensors, which input_sharding by column cannot place. Leave them out in "
            f"collate_fn, or give one ShardingSpec for all."
        )


def _check(column: str, value: Any, sharding: ShardingSpec | None) -> None:
    """With ``minibatch`` each host gives its own rows: they must be cut alike on all, and without padding."""
    if sharding is None or not sharding.minibatch or not isinstance(value, torch.Tensor) or not value.dim():
        return
    dims, shape = len(sharding.partition_spec), list(value.shape)
    if value.dim() != dims:
        raise ValueError(
            f"{column!r} has the shape {shape}, input_sharding is for {dims} dims: it would be replicated, although each "
            f"host has other rows. Give input_sharding by column, with a ShardingSpec for {value.dim()} dims."
        )
    devices = xr.addressable_runtime_device_count()
    if value.shape[0] % devices:
        raise ValueError(
            f"{column!r} has {value.shape[0]} rows, which do not divide over the {devices} devices of this host, and "
            f"minibatch=True pads nothing. Use a micro_batch_size that is a multiple of {devices}."
        )
