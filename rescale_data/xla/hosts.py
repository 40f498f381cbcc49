"""Ranks of a loader in SPMD mode: each host is a dp rank, whose process feeds all devices of the host.

host 0  process_index 0  devices 0 1 2 3  ◄── dp rank 0
host 1  process_index 1  devices 4 5 6 7  ◄── dp rank 1
"""

from __future__ import annotations

import logging

import torch.distributed as dist
import torch_xla.runtime as xr
from torch.distributed.device_mesh import DeviceMesh

from rescale_data.xla.adapter import require_spmd

_logger = logging.getLogger("rescale_data")


def host_mesh() -> DeviceMesh | None:
    """Return a mesh for a loader's ``mesh=``: one dp rank a host, in the order of their devices; `None` on a single host.

    Collective over the hosts, where there are several.

    Raises:
        ValueError: SPMD mode is off; several hosts and no process group, or one that does not have one rank a host.
    """
    require_spmd()
    host_index, num_hosts = xr.process_index(), xr.process_count()
    if num_hosts == 1:
        return None
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError(
            f"{num_hosts} hosts share their state, for which they need a process group on the CPU. After "
            f"`import torch_xla.distributed.xla_backend` call torch.distributed.init_process_group('gloo', init_method='xla://')."
        )
    host_indices: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(host_indices, host_index)
    return DeviceMesh("cpu", ranks_in_order(host_indices, num_hosts), mesh_dim_names=("dp",))


def warn_if_hosts_share_samples(num_ranks: int) -> None:
    """Warn once if several hosts would train on the same samples, because the loader was built without a mesh of hosts."""
    if num_ranks == 1 and xr.process_count() > 1:
        _logger.warning(
            "The loader has a single dp rank on %d hosts: all of them read the same samples. That is right where the model "
            "spans the hosts; else build it with mesh=rescale_data.xla.host_mesh().",
            xr.process_count(),
        )


def ranks_in_order(process_indices: list[int], num_hosts: int) -> list[int]:
    """Return the ranks of the process group in the order of their hosts.

    Args:
        process_indices: The host of each rank, in rank order.
    """
    if sorted(process_indices) != list(range(num_hosts)):
        raise ValueError(
            f"The process group has {len(process_indices)} ranks, which run on the hosts {process_indices}; SPMD has one "
            f"process on each of {num_hosts} hosts. Start the group with world_size={num_hosts}, one rank a host."
        )
    return sorted(range(num_hosts), key=process_indices.__getitem__)
