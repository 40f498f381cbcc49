"""Other ranks for a loader that goes on in the same processes: who stays, and what those that join are told."""

from __future__ import annotations

import io
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from rescale_data.engine.reading import Reading
from rescale_data.engine.setup import Setup
from rescale_data.layout.layout import Layout


def stays(mesh: DeviceMesh | None, group: Any) -> bool:
    """Whether this process is one of the new ranks; the old ones, where none are given."""
    if mesh is not None:
        return dist.get_rank() in mesh.mesh.flatten().tolist()
    return group is None or isinstance(group, dist.ProcessGroup)


def new_layout(
    setup: Setup, mesh: DeviceMesh | None, group: Any, micro_batch_size: int | None, num_workers: int | None
) -> Layout | None:
    """That of the new ranks, so that all old ones refuse it together; `None` where this one cannot know how many they are."""
    old = setup.layout
    world_size = setup.ranks.world_size
    if mesh is not None:
        world_size = mesh.size()
    elif group is not None:
        if not isinstance(group, dist.ProcessGroup):
            return None
        world_size = group.size()
    return Layout(
        num_logical_shards=old.num_logical_shards,
        global_batch_size=old.global_batch_size,
        dp_world_size=world_size,
        micro_batch_size=max(1, old.global_batch_size // world_size) if micro_batch_size is None else micro_batch_size,
        num_workers=old.num_workers if num_workers is None else num_workers,
    )


def require_step_boundary(reading: Reading) -> None:
    """``ValueError`` within a global batch, which other ranks could not complete."""
    clock, layout = reading.stream.clock, reading.setup.layout
    begun = (clock.samples - clock.origin) % layout.global_batch_size
    if begun:
        raise ValueError(
            f"rescale() after {begun} of the {layout.global_batch_size} samples of a step: call it when all "
            f"gradient_accumulation_steps={layout.gradient_accumulation_steps} micro batches have been taken."
        )


def tell(setup: Setup, state: dict[str, Any] | None) -> dict[str, Any]:
    """The state of the ranks that have gone on, on all of the new ones (collective over these)."""
    data = io.BytesIO()
    if state is not None:
        torch.save(state, data)
    told = setup.ranks.share(data.getvalue())
    if not told:
        raise ValueError(
            "join=True, but no rank has gone on: those that did call rescale() with the same mesh. Else leave join= out and "
            "load a checkpoint."
        )
    return torch.load(io.BytesIO(told), weights_only=True)
