"""The same loader on 4 ranks, then 3, then 4, in live processes: every global batch is that of a run that never stopped."""

from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import rescale_data as rd
from tests.distributed.ranks import run_ranks
from tests.states import opened

GLOBAL_BATCH_SIZE, STEPS = 24, 15
SEGMENTS = [(4, 3, 5), (3, 4, 10), (4, 6, STEPS)]
"""Ranks, micro batch, and the step at which they stop."""
SOURCE = rd.DatasetSource(range(430), "numbers")
"""About ten steps are left of the filter, so an epoch ends within the segments, with a remainder of its shards."""


def keep(row: int) -> bool:
    return row * 2654435761 % 5 < 3


def pipeline(shard: rd.Shard) -> rd.BaseNode[Any]:
    return rd.Filter(rd.Reader(SOURCE, shard), keep)


def loader_of(k: int, **kwargs: Any) -> rd.DataLoader:
    return rd.DataLoader(
        pipeline,
        global_batch_size=GLOBAL_BATCH_SIZE,
        num_logical_shards=96,
        num_workers=k,
        multiprocessing_context="fork",
        **kwargs,
    )


def go_on(loader: rd.DataLoader | None, k: int, w: int, b: int, was_w: int, mesh: DeviceMesh) -> rd.DataLoader | None:
    """What a user writes: the loader of the new ranks, from one state that all of them load; `None` on a rank that is none."""
    me, states = dist.get_rank(), [None]
    if me < was_w:
        assert loader is not None
        states = [loader.state_dict()]
        if me >= w:
            loader.close()
    dist.broadcast_object_list(states)
    if me >= w:
        return None
    if me < was_w:
        assert loader is not None
        loader.reopen(states[0], mesh=mesh, micro_batch_size=b, num_workers=k)
        return loader
    loader = loader_of(k, mesh=mesh, micro_batch_size=b)
    loader.load_state_dict(states[0])
    return loader


def live(k: int, other_k: int) -> dict[str, Any]:
    """One rank of four: the last leaves after the first segment and comes back for the third."""
    found: dict[str, Any] = {"rows": {}, "refused": ""}
    meshes = {w: DeviceMesh("cpu", list(range(w))) for w in (4, 3)}
    loader: rd.DataLoader | None = loader_of(k, mesh=meshes[4], micro_batch_size=3)
    for number, (w, b, stop) in enumerate(SEGMENTS):
        if number:
            loader = go_on(loader, other_k if number == 1 else k, w, b, SEGMENTS[number - 1][0], meshes[w])
        batches = iter(())
        while loader is not None and loader.step < stop:
            rows: list[int] = []
            step, a = loader.step, loader.gradient_accumulation_steps
            for _ in range(a):
                batch = next(batches, None)
                while batch is None:  # the end of an epoch, or the first batch
                    batches = iter(loader)
                    batch = next(batches, None)
                rows += batch.tolist()
            found["rows"][step] = rows
        if number == 0 and loader is not None:
            with pytest.raises(ValueError) as refused:
                loader.reopen(mesh=meshes[3], micro_batch_size=4)
            found["refused"] = str(refused.value)
    if loader is not None:
        loader.close()
    return {**found, "left": leave()}


def uninterrupted() -> list[list[int]]:
    loader = loader_of(0, dp_rank=0, dp_world_size=1)
    rows: list[list[int]] = []
    while len(rows) < STEPS:
        rows += [batch.tolist() for batch in loader]
    return rows[:STEPS]


def leave() -> list[Any]:
    """All but the first of four ranks leave, and it goes on alone; they are refused a state."""
    loader = rd.DataLoader(range(96), global_batch_size=8, micro_batch_size=2, timeout=3.0)
    batches = iter(loader)
    rows, said = next(batches).tolist(), ""
    state = loader.state_dict()
    if dist.get_rank():
        loader.close()
        with pytest.raises(RuntimeError, match="A state is made by all dp ranks together") as error:
            loader.state_dict()
        said = str(error.value)
    else:
        loader.reopen(state, dp_world_size=1)
        with pytest.raises(RuntimeError, match="no longer valid"):
            next(batches)
        rows += [row for batch in loader for row in batch.tolist()]
        assert loader._stream.layout.micro_batch_size == 2
        assert opened(loader.state_dict())["samples"] == 96
    dist.barrier()
    return [rows, said]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(4, tmp_path_factory.mktemp("live"), live, 1, 0)


def test_four_ranks_then_three_then_four(ranks: Any) -> None:
    """With a worker each, without, and with again."""
    expected = uninterrupted()
    assert [[row for rank in ranks for row in rank["rows"].get(step, [])] for step in range(STEPS)] == expected
    assert sum(len(rank["rows"]) for rank in ranks) == 3 * STEPS + 10
    assert all("give state=, one state_dict() of the old ranks" in rank["refused"] for rank in ranks[:3])
    assert "mesh holds the ranks [0, 1, 2]" in ranks[3]["refused"]


def test_a_state_of_a_loader_that_others_went_on_from_is_refused(ranks: Any) -> None:
    assert sorted(row for rank in ranks for row in rank["left"][0]) == list(range(96))
    assert all("the ranks [0] did not come to it in time" in rank["left"][1] for rank in ranks[1:])
