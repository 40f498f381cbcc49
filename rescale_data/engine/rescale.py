"""Other ranks for a loader that goes on in the same processes: who stays, and what those that join are told."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from rescale_data.engine.opening import Opening
from rescale_data.engine.ranks.find_ranks import require_mesh
from rescale_data.engine.reading import Reading
from rescale_data.engine.setup import Setup
from rescale_data.engine.states.statedict import header, state_of, whole_shards
from rescale_data.engine.stream import Stream
from rescale_data.layout.layout import Layout
from rescale_data.state import Ints


def rescale(
    reading: Reading,
    opening: Opening,
    stream_of: Callable[[Setup], Stream],
    mesh: DeviceMesh | None,
    group: Any,
    micro_batch_size: int | None,
    num_workers: int | None,
    step: int | None,
) -> bool:
    """What `DataLoader.rescale` documents; where this rank leaves, its rows have been given."""
    require_ranks(mesh, group)
    if step is None:
        require_step_boundary(reading)
    where = opening.where if mesh is None and group is None else {"mesh": mesh, "group": group}
    micro_batch_size = opening.micro_batch_size if micro_batch_size is None else micro_batch_size
    layout = new_layout(reading.setup, where, micro_batch_size, num_workers)
    if layout is not None:
        opening.require_order(layout)
    if step is None:
        whole_shards(reading.stream)  # from here on all rows are right on this rank
    if layout is None or not stays(mesh, group):
        return False
    setup = opening.set_up(
        where,
        global_batch_size=layout.global_batch_size,
        micro_batch_size=layout.micro_batch_size,
        num_logical_shards=layout.num_logical_shards,
        num_workers=layout.num_workers,
    )
    state, meeting = hand_over(setup, reading.stream, step)
    opening.where = where
    stream = stream_of(setup)
    stream.meeting = meeting
    reading.move_to(stream, state)
    return True


def require_ranks(mesh: DeviceMesh | None, group: Any) -> None:
    """``TypeError`` of what is neither a mesh nor a group, before a rank takes it for its leave."""
    require_mesh(mesh)
    left_out = group in (None, dist.GroupMember.NON_GROUP_MEMBER)
    if not left_out and not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"group={group!r} is a {type(group).__name__}: give what torch.distributed.new_group returned, also on a rank "
            f"that leaves."
        )


def stays(mesh: DeviceMesh | None, group: Any) -> bool:
    """Whether this process is one of the new ranks; the old ones, where none are given."""
    if mesh is not None:
        return dist.get_rank() in mesh.mesh.flatten().tolist()
    return group is None or isinstance(group, dist.ProcessGroup)


def new_layout(
    setup: Setup, where: Mapping[str, Any], micro_batch_size: int | None, num_workers: int | None
) -> Layout | None:
    """That of the new ranks, so that all old ones refuse it together; `None` where this one cannot know how many they are."""
    old, world_size = setup.layout, _world_size(where)
    if world_size is None:
        return None
    if micro_batch_size is None:
        micro_batch_size = max(1, old.global_batch_size // world_size)
    num_workers = old.num_workers if num_workers is None else num_workers
    return replace(old, dp_world_size=world_size, micro_batch_size=micro_batch_size, num_workers=num_workers)


def _world_size(where: Mapping[str, Any]) -> int | None:
    mesh, group, size = (where.get(name) for name in ("mesh", "group", "dp_world_size"))
    if mesh is not None:
        return mesh.size()
    if group is not None:
        return group.size() if isinstance(group, dist.ProcessGroup) else None
    return size or (dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1)


def require_step_boundary(reading: Reading) -> None:
    """``ValueError`` within a global batch, which other ranks could not complete."""
    layout = reading.setup.layout
    begun = reading.stream.clock.begun(layout.global_batch_size)
    if begun:
        raise ValueError(
            f"rescale() after {begun} of the {layout.global_batch_size} samples of a step: call it when all "
            f"gradient_accumulation_steps={layout.gradient_accumulation_steps} micro batches have been taken, or with step= "
            f"where ranks have died."
        )


def hand_over(setup: Setup, stream: Stream | None, step: int | None = None) -> tuple[dict[str, Any], int]:
    """The state of the ranks that go on, on all of the new ones (collective over these), and the number of this meeting.

    Each row comes from the rank that has it; one that has died, or left, is stood in for by the others, who read. Who has
    missed the last meeting of those that come has nothing to give, and is told like one that is new.

    Args:
        stream: `None` on a rank that is new.
        step: Where the run goes on; `None`: where it stands, and then all rows of ``stream`` are right.
    """
    ranks, schema, meeting, rank, why, at = setup.ranks, setup.schema, -1, -1, "", None
    if stream is not None:
        meeting, rank = stream.meeting, stream.ranks.rank
        try:
            at = stream if step is None else stream.at_step(step)
        except ValueError as error:
            stream, why = None, str(error)  # what is raised of it, and perhaps kept, must not hold the old group
    came = ranks.each([meeting, rank, -1 if at is None else at.clock.samples])
    newest = int(came[:, 0].max())
    came[came[:, 0] < newest, 1] = -1
    _require_one_place(came[came[:, 1] >= 0, 2], why)
    table, said = schema.fresh_table(setup.layout.num_logical_shards), ""
    if at is not None and meeting == newest:
        givers = _givers(at.standing.owners, came[:, 1])
        with ranks.reading():
            at.make_again(np.flatnonzero((givers == ranks.rank) & (at.standing.owners != rank)))
        table, said = at.table, json.dumps([header(at), givers.tolist()])
    numbers, givers = json.loads(ranks.share(said.encode()))
    return state_of(schema, ranks.merge(table, np.array(givers)), numbers), newest + 1


def _require_one_place(samples: Ints, why: str) -> None:
    if not len(samples):
        raise ValueError(
            "join=True, but no rank has gone on: those that did call rescale() with the same mesh. Else leave join= out and "
            "load a checkpoint."
        )
    if samples.min() < 0:
        raise ValueError(why or "Another rank cannot go on at the step that it was given; its error says why.")
    if samples.min() < samples.max():
        raise ValueError(
            f"The ranks would go on at different batches, after {sorted(set(samples.tolist()))} samples: call rescale() on "
            f"all of them after the same step, or with the same step=."
        )


def _givers(owners: Ints, came: Ints) -> Ints:
    """The new rank that gives each row: the one that had it, and for those that nobody has, the others in turn.

    Args:
        owners: ``int64[N]``, old ranks.
        came: ``int64[W]``, the old rank of each new one, -1 where it had none.
    """
    new = np.full(max(owners.max(), came.max()) + 1, -1)
    stayed = np.flatnonzero(came >= 0)
    new[came[stayed]] = stayed
    givers = new[owners]
    lost = np.flatnonzero(givers < 0)
    givers[lost] = stayed[np.arange(len(lost)) * len(stayed) // max(1, len(lost))]
    return givers
