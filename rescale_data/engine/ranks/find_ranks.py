"""Finds the data-parallel ranks that a loader's arguments name: by a mesh, a process group, or numbers."""

from __future__ import annotations

import functools
import logging
import os

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from rescale_data.engine.ranks.communicator import Communicator
from rescale_data.engine.ranks.meeting import digest, make_once, members_by_dp_rank, part_of_store
from rescale_data.engine.ranks.ranks import BUILD_LATER_REMEDY, Ranks
from rescale_data.errors import require_type

_logger = logging.getLogger("rescale_data")
MESH_TYPES = (DeviceMesh, dist.ProcessGroup)
_MODEL_DIMS = {"tp", "tensor", "tensor_parallel", "pp", "pipeline", "cp", "context", "sp", "ep", "expert"}


def find_ranks(
    mesh: DeviceMesh | dist.ProcessGroup | None, dp_rank: int | None, dp_world_size: int | None, timeout: float
) -> Ranks:
    """Return the data-parallel ranks that a loader's arguments name (collective if there is a process group).

    Args:
        mesh: The data-parallel ranks: a mesh, whose dims count row-major as one, or a process group of exactly these ranks in
            their order.
        dp_rank: The data-parallel rank, in place of a mesh, together with ``dp_world_size``.

    Raises:
        ValueError: The arguments contradict each other, or name ranks that no process group connects yet.
    """
    if dp_world_size == 1 and dp_rank is None:
        dp_rank = 0
    _require_arguments(mesh, dp_rank, dp_world_size)
    if dp_world_size == 1:
        return Ranks()
    has_group = dist.is_available() and dist.is_initialized()
    if not has_group and dp_rank is None:
        _require_one_process(mesh)
    if not has_group or (dist.get_world_size() == 1 and mesh is None):
        return Ranks(dp_rank or 0, dp_world_size or 1, assumes_one_rank=True)
    rank_and_size = None if dp_rank is None or dp_world_size is None else (dp_rank, dp_world_size)
    members = _dp_members(mesh) if rank_and_size is None else members_by_dp_rank(*rank_and_size, timeout)
    if len(members) == 1:
        return Ranks()
    group = None if isinstance(mesh, DeviceMesh) else mesh
    me, store = members.index(dist.get_rank()), part_of_store(f"communicator/{digest(members)}", group)
    communicator = make_once(group, ("communicator", *members), lambda: Communicator(store, me, members))
    return Ranks(me, len(members), communicator, timeout)


def _require_one_process(mesh: object) -> None:
    """Raise or warn if the mesh or the environment shows several processes, although there is no process group."""
    if mesh is not None:
        raise ValueError(f"mesh= was given, but there is no process group (any more). {BUILD_LATER_REMEDY}")
    if int(os.environ.get("WORLD_SIZE") or 1) > 1:
        raise ValueError(
            f"The loader is built before the process group (WORLD_SIZE={os.environ['WORLD_SIZE']}), so every rank would read "
            f"all rows. {BUILD_LATER_REMEDY}"
        )
    for name in ("OMPI_COMM_WORLD_SIZE", "SLURM_NTASKS"):
        if "WORLD_SIZE" not in os.environ and int(os.environ.get(name) or 1) > 1:
            _warn_once(
                f"The loader is built without a process group, although {name}={os.environ[name]}: this process reads all "
                f"rows. {BUILD_LATER_REMEDY}"
            )


@functools.cache
def _warn_once(message: str) -> None:
    _logger.warning(message)


def _require_arguments(mesh: object, dp_rank: int | None, dp_world_size: int | None) -> None:
    if (dp_rank is None) != (dp_world_size is None):
        raise ValueError(f"dp_rank={dp_rank} and dp_world_size={dp_world_size}: give both, or neither.")
    if mesh is not None and dp_rank is not None:
        raise ValueError("Give mesh= or dp_rank= and dp_world_size=, not both.")
    if mesh is not None:
        require_type(MESH_TYPES, "a DeviceMesh of the dp ranks, world_mesh['dp'], or their process group", mesh=mesh)
    if dp_rank is not None and dp_world_size is not None and not 0 <= dp_rank < dp_world_size:
        raise ValueError(
            f"dp_rank={dp_rank}, dp_world_size={dp_world_size}: a rank is at least 0 and less than the size."
        )


def _dp_members(mesh: DeviceMesh | dist.ProcessGroup | None) -> list[int]:
    if mesh is None:
        num_ranks = dist.get_world_size()
        _logger.info(
            "No mesh given: all %d ranks of the process group read different samples. With TP, PP or CP pass mesh= (the data-"
            "parallel dims alone), or peers that should read the same samples will not.",
            num_ranks,
        )
        return list(range(num_ranks))
    dims = mesh.mesh_dim_names or () if isinstance(mesh, DeviceMesh) else ()
    if model_dims := [name for name in dims if name.lower() in _MODEL_DIMS]:
        raise ValueError(
            f"mesh has the dims {dims}; the ranks along {model_dims} share their samples. Pass the data-parallel dims alone, "
            f"for example mesh=world_mesh['dp']."
        )
    return ranks_in(mesh=mesh)


def ranks_in(**argument: DeviceMesh | dist.ProcessGroup) -> list[int]:
    """Return the ranks of the job in a mesh, row-major, or in a process group; ``ValueError`` if this process is not in it."""
    ((name, group),) = argument.items()
    members = members_of(group)
    if dist.get_rank() not in members:
        raise ValueError(
            f"This process has rank {dist.get_rank()}, but {name} holds the ranks {members}: pass the one that it is part of."
        )
    return members


def members_of(group: DeviceMesh | dist.ProcessGroup) -> list[int]:
    """Return the ranks of the job in a mesh, row-major, or in a process group."""
    return group.mesh.flatten().tolist() if isinstance(group, DeviceMesh) else dist.get_process_group_ranks(group)
