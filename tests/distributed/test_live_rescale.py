"""The same loader on 4 ranks, then 3, then 4, in live processes: every global batch is that of a run that never stopped."""

import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import rescale_data as rd
from tests.distributed.ranks import run_ranks

GLOBAL_BATCH_SIZE, STEPS = 24, 15
LEGS = [(4, 3, 5), (3, 4, 10), (4, 6, STEPS)]
"""Ranks, micro batch, and the step at which they stop."""
SOURCE = rd.DatasetSource(range(430), "numbers")
"""About ten steps are left of the filter, so an epoch ends within the legs, in the deal of what its shards still have."""


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


Found = dict[int, list[Any]]


def live(k: int, other_k: int) -> dict[str, Any]:
    """One rank of four: the last leaves after the first leg and comes back for the third."""
    me, found = dist.get_rank(), {"rows": {}, "refused": "", "left": "", "pids": []}
    meshes = {w: DeviceMesh("cpu", list(range(w))) for w in (4, 3)}
    loader, batches = loader_of(k, mesh=meshes[4], micro_batch_size=3), iter(())
    for number, (w, b, stop) in enumerate(LEGS):
        if number:
            if me < LEGS[number - 1][0]:
                stayed = loader.rescale(mesh=meshes[w], micro_batch_size=b, num_workers=other_k if number == 1 else k)
                assert stayed == (me < w)
            elif me < w:
                loader, batches = loader_of(k, mesh=meshes[w], micro_batch_size=b, join=True), iter(())
        if me >= w:
            with pytest.raises(RuntimeError) as error:
                next(iter(loader))
            found["left"] = str(error.value)
            continue
        while loader.step < stop:
            rows: list[int] = []
            step, a = loader.step, loader.gradient_accumulation_steps
            for m in range(a):
                batch = next(batches, None)
                while batch is None:  # the end of an epoch, or the first batch
                    batches = iter(loader)
                    batch = next(batches, None)
                rows += batch.tolist()
                if m + 1 < a and not found["refused"]:
                    with pytest.raises(ValueError) as refused:
                        loader.rescale(mesh=meshes[3])
                    found["refused"] = str(refused.value)
            found["rows"][step] = rows
        found["pids"].append(os.getpid())
    loader.close()
    return found


def uninterrupted() -> list[list[int]]:
    loader = loader_of(0, dp_rank=0, dp_world_size=1)
    rows: list[list[int]] = []
    while len(rows) < STEPS:
        rows += [batch.tolist() for batch in loader]
    return rows[:STEPS]


@pytest.mark.parametrize(("k", "other_k"), [(0, 0), (2, 2), (1, 0)])
def test_four_ranks_then_three_then_four(k: int, other_k: int, tmp_path: Path) -> None:
    ranks = run_ranks(4, tmp_path, live, k, other_k)
    expected = uninterrupted()
    assert [[row for rank in ranks for row in rank["rows"].get(step, [])] for step in range(STEPS)] == expected
    assert sum(len(rank["rows"]) for rank in ranks) == 3 * STEPS + 10
    assert "This rank has left the loader by rescale()" in ranks[3]["left"]
    assert "call it when all gradient_accumulation_steps=2 micro batches have been taken" in ranks[0]["refused"]
    assert len(set(itertools.chain.from_iterable(rank["pids"] for rank in ranks))) == 4
