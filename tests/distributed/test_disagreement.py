"""Two ranks that differ: in arguments, in where they stand, in errors. All are told, at once, and may go on together."""

import functools
import logging
import pickle
import re
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import rescale_data as rd
from tests.distributed.ranks import fails, run_ranks
from tests.distributed.segments import Data, Logged, take
from tests.states import same_state

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

DATA, UNEVEN = Data("every", 300, 48), Data("rows", 200, 25)
ROWS = rd.DatasetSource([{"tokens": np.arange(i, i + 2 + i % 9)} for i in range(400)], "rows")
DIFFERENT: dict[str, tuple[Any, Any]] = {
    "seed": (0, 1),
    "tail": ("drop", "pad"),
    "verify": (False, True),
    "steps_per_epoch": (None, 5),
}
FAULT: list[Any] = []


def breaks(row: Any) -> bool:
    if FAULT and not next(FAULT[0], None):
        raise OSError("the disk is gone")
    return len(row["tokens"]) > 2


def fragile(shard: rd.Shard) -> rd.Node[Any]:
    return rd.Map(rd.Filter(rd.Reader(ROWS, shard), breaks, version=1), lambda row: row["tokens"][:1])


def make(pipeline: Any = ROWS, **given: Any) -> rd.DataLoader:
    sizes = {"global_batch_size": 4, "micro_batch_size": 2, "num_logical_shards": 8}
    return rd.DataLoader(pipeline, **sizes, seed=1, collate_fn=list, **given)


def a_load_that_failed_on_one_rank_leaves_the_next_one_right(_: Path) -> None:
    """Also where rows have to be read for it: ranks then have made different numbers of loads."""
    loader = make(fragile, timeout=20)
    state = loader.state_dict()
    if dist.get_rank():
        fails("The header of the state", loader.load_state_dict, {**state, "header": state["header"][:-5]})
    else:
        loader.load_state_dict(state)
    loader.load_state_dict(state, delivered=44)
    assert loader.step == 11


def ranks_that_save_at_different_batches_are_told_and_go_on_from_one_state(folder: Path) -> None:
    loader = UNEVEN.loader(12, 6)
    take(loader, 1)
    dcp.save({"loader": loader}, checkpoint_id=folder / "whole")
    whole, rows_of_this_rank = loader.state_dict(), loader.local_state_dict()
    expected = take(loader, 3)
    loader.load_state_dict(whole)
    take(loader, dist.get_rank())
    state, local = loader.state_dict(), loader.local_state_dict()  # as dcp.load asks for one
    apart = r"The ranks save at different batches[\s\S]*others between 12 and 24"
    fails(apart, pickle.dumps, state)
    fails(apart, rd.whole_state, {"root": local})
    fails("The ranks save at different batches", dcp.save, {"loader": loader}, checkpoint_id=folder / "apart")
    fails(
        "are not those of their logical shards at sample",
        UNEVEN.loader(12, 6).load_state_dict,
        state,
        kind=rd.DataStateError,
    )
    for call in (pickle.dumps, lambda rows: torch.save(rows, "/dev/null")):
        fails(r"Keep loader.state_dict\(\), which is whole", call, local, kind=TypeError)
    dcp.load({"loader": loader}, checkpoint_id=folder / "whole")
    assert same_state(loader.state_dict(), whole)
    assert take(loader, 3) == expected
    again = UNEVEN.loader(12, 6)
    again.load_state_dict(rows_of_this_rank)
    assert same_state(again.state_dict(), whole)


def trouble_on_one_rank_is_an_error_on_all_at_once(_: Path) -> None:
    me = dist.get_rank()
    loader = make()
    fails("different delivered", loader.load_state_dict, loader.state_dict(), delivered=8 * (me + 1))
    words = "Another dp rank" if me else "the disk is gone"
    for repeat in (False, True):
        for num_rows in (0, 20, 60):
            loader, FAULT[:] = make(fragile, repeat=repeat), []
            state = loader.state_dict()
            for call in (loader.skip, lambda n, to=loader, of=state: to.load_state_dict(of, delivered=n)):
                FAULT[:] = [] if me else [iter([True] * num_rows)]
                fails(words, call, 160)
                FAULT.clear()
    loader = make()
    for skips in (me == 0, me == 1):
        loader.skip(4) if skips else next(iter(loader))
    fails("not left out the same", pickle.dumps, loader.state_dict())
    loader, began = make(timeout=200.0), time.monotonic()
    dist.barrier()
    if me == 0:  # the signal leaves an exchange half begun
        signal.signal(signal.SIGALRM, stop_it)
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        fails("preempted$", loader.state_dict)
        assert time.monotonic() - began < 120
    dist.barrier()


def stop_it(*_: Any) -> None:
    raise InterruptedError("preempted")


def meshes_and_arguments_that_differ_are_refused_and_a_missing_mesh_is_told(_: Path) -> None:
    me, mesh = dist.get_rank(), init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("share their samples. Pass the data-parallel dims alone", {"mesh": mesh}),
        (rf"rank {me}, but mesh holds the ranks \[{1 - me}\]", {"mesh": DeviceMesh("cpu", [1 - me], _init_backend=False)}),
        ("Give mesh= or dp_rank= and dp_world_size=, not both", {"mesh": mesh["dp"], "dp_rank": 0, "dp_world_size": 1}),
        ("dp_rank=2 was given to 0 processes, and dp_rank=0 to 1. Give each dp rank to as many",
         {"dp_rank": me, "dp_world_size": 4, "b": 6}),
    ]  # fmt: skip
    for name, values in DIFFERENT.items():
        given = re.escape(f"different {name}; dp rank {me} has {{'{name}': {values[me]!r}}}")
        wrong.append((given, {name: values[me]}))
    for words, arguments in wrong:
        fails(words, DATA.loader, 24, **{"b": 12, **arguments})
    on_error: Any = ("raise", "skip")[me]
    reads = functools.partial(rd.Reader, ROWS, on_error=on_error)
    sizes = {"global_batch_size": 24, "micro_batch_size": 12, "num_logical_shards": 24}
    fails(f"different epoch_size_is_known; dp rank {me} has", rd.DataLoader, reads, **sizes)
    logging.getLogger("rescale_data").setLevel(logging.INFO)
    with Logged(logging.INFO) as information:
        DATA.loader(24, 12)
    [said] = [line for line in information if "rows for" not in line]  # that shards have few is said as well
    assert "all 2 ranks of the process group read different samples. With TP, PP or CP pass mesh=" in said


PROMISES = [
    a_load_that_failed_on_one_rank_leaves_the_next_one_right,
    ranks_that_save_at_different_batches_are_told_and_go_on_from_one_state,
    trouble_on_one_rank_is_an_error_on_all_at_once,
    meshes_and_arguments_that_differ_are_refused_and_a_missing_mesh_is_told,
]


@pytest.mark.parametrize("promise", PROMISES)
def test_two_ranks(promise: Any, tmp_path: Path) -> None:
    run_ranks(2, tmp_path, promise, tmp_path)
