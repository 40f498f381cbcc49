"""Checks that batches fit their input sharding; torch_xla reports a mismatch only from a thread, or not at all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias, cast

import numpy as np
import torch
import torch_xla
import torch_xla.runtime as xr
from torch_xla.distributed.spmd import ShardingSpec

InputSharding: TypeAlias = ShardingSpec | Mapping[str, ShardingSpec | None]


def check_input_sharding(batch: Any, input_sharding: InputSharding | None, num_hosts: int, host: int = 0) -> None:
    """Raise ``ValueError`` if a value of a batch cannot be placed on the devices as ``input_sharding`` says.

    Args:
        num_hosts: Hosts that read rows of their own, the dp world size.
        host: This one's dp rank.
    """
    sharding_by_column: Mapping[str, ShardingSpec | None] = {}
    if isinstance(input_sharding, Mapping):
        _check_columns(batch, sharding_by_column := input_sharding)
    for path, value in _leaves(batch, ()):
        name = repr(".".join(path)) if path else "The batch"
        _check_value(name, value)
        if isinstance(value, torch.Tensor):
            sharding = sharding_by_column[path[0]] if isinstance(input_sharding, Mapping) else input_sharding
            _check_rows(name, value, sharding, num_hosts, host)


def _leaves(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(value, Mapping):
        for key, nested in cast(Mapping[Any, Any], value).items():
            yield from _leaves(nested, (*path, str(key)))
    elif isinstance(value, list | tuple):
        for index, nested in enumerate(cast("list[Any]", value)):
            yield from _leaves(nested, (*path, str(index)))
    else:
        yield path, value


def _check_columns(batch: Any, input_sharding: Mapping[str, ShardingSpec | None]) -> None:
    columns = dict(cast("Mapping[Any, Any]", batch)) if isinstance(batch, Mapping) else {None: batch}
    if set(columns) != set(input_sharding) or any(type(value) is not torch.Tensor for value in columns.values()):
        description = {name: type(value).__name__ for name, value in columns.items()}
        raise ValueError(
            f"The batch is {description}, and input_sharding is for {sorted(input_sharding)}. Name every column, None for "
            f"those that are replicated; leave out in collate_fn what is no torch.Tensor, or give one ShardingSpec for all."
        )


def _check_value(name: str, value: Any) -> None:
    is_plain = type(value) is torch.Tensor and value.dtype not in _UNSUPPORTED_DTYPES
    if isinstance(value, np.ndarray | torch.Tensor) and not is_plain:
        raise ValueError(
            f"{name} is a {type(value).__name__} of {value.dtype}, which torch_xla leaves on the host, or takes for a signed "
            f"integer. Return a plain torch.Tensor from collate_fn, and unsigned integers as .to(torch.int64)."
        )


def _check_rows(name: str, value: torch.Tensor, sharding: ShardingSpec | None, num_hosts: int, host: int) -> None:
    """Raise ``ValueError`` if the rows of a tensor cannot be divided over the devices of this host."""
    if sharding is None or not sharding.minibatch:
        if num_hosts > 1:
            raise ValueError(
                f"{name} has rows of its own on each of {num_hosts} hosts, but torch_xla takes what a host gives for the whole "
                f"global batch. Give input_sharding=ShardingSpec(mesh, (all axes of the mesh, None, ...), minibatch=True)."
            )
        return
    _check_mesh(sharding, num_hosts, host)
    num_dims, shape = len(sharding.partition_spec), list(value.shape)
    if value.dim() != num_dims and (value.dim() or num_hosts > 1):
        raise ValueError(
            f"{name} has the shape {shape}, input_sharding is for {num_dims} dims: it would be replicated, although each "
            f"host has other rows. Give input_sharding by column, with a ShardingSpec for {value.dim()} dims."
        )
    num_devices = xr.addressable_runtime_device_count()
    if value.dim() and value.shape[0] % num_devices:
        raise ValueError(
            f"{name} has {value.shape[0]} rows, which do not divide over the {num_devices} devices of this host, and "
            f"minibatch=True pads nothing. Use a micro_batch_size that is a multiple of {num_devices}."
        )


def _check_mesh(sharding: ShardingSpec, num_hosts: int, host: int) -> None:
    """Raise ``ValueError`` if the mesh does not put the rows of a host on its own devices, in their order."""
    mesh, spec = sharding.mesh, sharding.partition_spec
    row_axes = [_axis_index(sharding, axis) for axis in (spec[0] if isinstance(spec[0], tuple) else spec[:1])]
    other_axes = [axis for axis in range(len(mesh.mesh_shape)) if axis not in row_axes]
    if (
        None in row_axes
        or any(dim is not None for dim in spec[1:])
        or any(mesh.mesh_shape[axis] > 1 for axis in other_axes)
    ):
        all_axes = tuple(mesh.axis_names or range(len(mesh.mesh_shape)))
        raise ValueError(
            f"The ShardingSpec has minibatch=True and the partition spec {spec} on a mesh of shape {tuple(mesh.mesh_shape)}: "
            f"torch_xla cuts the rows of the hosts over all devices. Give {(all_axes, *(None,) * (len(spec) - 1))}."
        )
    devices = mesh.get_logical_mesh().transpose([*row_axes, *other_axes]).ravel().tolist()
    local_devices = [int(name.rpartition(":")[2]) for name in torch_xla.real_devices()]
    host_devices = [devices[start : start + len(local_devices)] for start in range(0, len(devices), len(local_devices))]
    if local_devices not in (host_devices[host : host + 1] if len(host_devices) == num_hosts else host_devices):
        raise ValueError(
            f"The ShardingSpec has minibatch=True and cuts rows over the devices {devices}. The rows of this host, dp rank "
            f"{host} of {num_hosts}, go to its devices {local_devices} in this order, so they would come out in another. Make "
            "the mesh of the hosts' devices host after host, in the order of the dp ranks, and name its axes in their order."
        )


def _axis_index(sharding: ShardingSpec, axis: Any) -> Any:
    return (sharding.mesh.axis_names or ()).index(axis) if isinstance(axis, str) else axis


_UNSUPPORTED_DTYPES = (torch.uint16, torch.uint32, torch.uint64)
