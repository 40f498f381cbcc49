"""Two ranks that differ: in arguments, in where they stand, in errors. All are told, at once, and may go on together."""

import functools
import logging
import pickle
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
from tests.distributed.ranks import run_ranks
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


def error_of(call: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(BaseException) as error:
        call(*args, **kwargs)
    return f"{type(error.value).__name__}: {error.value}"


def on_2_ranks(folder: Path) -> dict[str, Any]:
    found = {**at_different_batches(folder), "refused": refused()}
    return {**found, **with_errors_of_one()}  # the signal in the last of these leaves an exchange half begun


def at_different_batches(folder: Path) -> dict[str, Any]:
    """Saves and loads of ranks of which one has taken a batch more; a state of both sets them to one place again."""
    loader = UNEVEN.loader(12, 6)
    take(loader, 1)
    dcp.save({"loader": loader}, checkpoint_id=folder / "whole")
    whole, rows_of_this_rank = loader.state_dict(), loader.local_state_dict()
    expected = take(loader, 3)
    loader.load_state_dict(whole)
    take(loader, dist.get_rank())
    state, local = loader.state_dict(), loader.local_state_dict()  # as dcp.load asks for one
    found = {
        "pickled": error_of(pickle.dumps, state),
        "saved": error_of(dcp.save, {"loader": loader}, checkpoint_id=folder / "apart"),
        "loaded": error_of(UNEVEN.loader(12, 6).load_state_dict, state),
        "made whole": error_of(rd.whole_state, {"root": local}),
        "local, pickled": error_of(pickle.dumps, local),
        "local, saved by torch": error_of(torch.save, local, "/dev/null"),
    }
    dcp.load({"loader": loader}, checkpoint_id=folder / "whole")
    assert same_state(loader.state_dict(), whole)
    assert take(loader, 3) == expected
    again = UNEVEN.loader(12, 6)
    again.load_state_dict(rows_of_this_rank)
    assert same_state(again.state_dict(), whole)
    return found


def with_errors_of_one() -> dict[str, Any]:
    me, found = dist.get_rank(), dict[str, Any]()
    loader = make()
    state = loader.state_dict()
    found["another number"] = error_of(loader.load_state_dict, state, delivered=8 * (me + 1))
    for repeat in (False, True):
        for num_rows in (0, 20, 60):
            loader, FAULT[:] = make(fragile, repeat=repeat), []
            state = loader.state_dict()
            for call in (loader.skip, lambda n, to=loader, of=state: to.load_state_dict(of, delivered=n)):
                FAULT[:] = [] if me else [iter([True] * num_rows)]
                found[f"a read that fails, {repeat}, {num_rows}, {call}"] = error_of(call, 160)
                FAULT.clear()
    loader = make()
    for skips in (me == 0, me == 1):
        loader.skip(4) if skips else next(iter(loader))
    found["left out on one rank"] = error_of(pickle.dumps, loader.state_dict())
    loader, began = make(timeout=200.0), time.monotonic()
    dist.barrier()
    if me == 0:
        signal.signal(signal.SIGALRM, stop_it)
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        found["a signal while it waits"] = error_of(loader.state_dict)
        found["in time"] = time.monotonic() - began < 120
    dist.barrier()
    return found


def stop_it(*_: Any) -> None:
    raise InterruptedError("preempted")


def refused() -> list[str]:
    """What is said where the mesh is not that of the dp ranks alone, arguments differ, or there is no mesh."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    other = DeviceMesh("cpu", [1 - dist.get_rank()], _init_backend=False)
    wrong: list[dict[str, Any]] = [
        {"mesh": mesh},
        {"mesh": other},
        {"mesh": mesh["dp"], "dp_rank": 0, "dp_world_size": 1},
        *({name: value[dist.get_rank()]} for name, value in DIFFERENT.items()),
        {"dp_rank": dist.get_rank(), "dp_world_size": 4},
    ]
    said = [error_of(DATA.loader, 24, 6 if "dp_rank" in given else 12, **given) for given in wrong]
    on_error: Any = ("raise", "skip")[dist.get_rank()]
    reads = functools.partial(rd.Reader, ROWS, on_error=on_error)
    said.append(error_of(rd.DataLoader, reads, global_batch_size=24, micro_batch_size=12, num_logical_shards=24))
    logging.getLogger("rescale_data").setLevel(logging.INFO)
    with Logged(logging.INFO) as information:
        DATA.loader(24, 12)
    return [*said, *(line for line in information if "rows for" not in line)]  # that shards have few is said as well


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("disagreement")
    return run_ranks(2, folder, on_2_ranks, folder)


def test_ranks_that_save_at_different_batches_are_told_and_go_on_from_one_state(ranks: Any) -> None:
    for found in ranks:
        assert "DataStateError" in found["loaded"]
        assert "are not those of their logical shards at sample" in found["loaded"]
        assert found["saved"].startswith("CheckpointException")
        assert all("The ranks save at different batches" in found[name] for name in ("pickled", "saved", "made whole"))
        assert all("others between 12 and 24" in found[name] for name in ("pickled", "made whole"))


def test_the_rows_of_one_rank_refuse_to_be_pickled(ranks: Any) -> None:
    for found in ranks:
        assert "TypeError" in found["local, pickled"]
        assert "Keep loader.state_dict(), which is whole" in found["local, pickled"]
        assert found["local, saved by torch"] == found["local, pickled"]


def test_trouble_on_one_rank_is_an_error_on_all_at_once(ranks: Any) -> None:
    one, other = ranks
    assert one["a signal while it waits"].endswith("preempted")
    assert one["in time"]
    for found, words in ((one, "the disk is gone"), (other, "Another dp rank")):
        assert "different delivered" in found["another number"]
        assert "not left out the same" in found["left out on one rank"]
        failed = [said for name, said in found.items() if name.startswith("a read that fails")]
        assert len(failed) == 12
        assert all(words in said for said in failed)


def test_meshes_and_arguments_that_are_refused_and_what_is_said_without_a_mesh(ranks: Any) -> None:
    for rank, found in enumerate(ranks):
        expected = [
            "share their samples. Pass the data-parallel dims alone",
            f"This process has rank {rank}, but mesh holds the ranks [{1 - rank}]",
            "Give mesh= or dp_rank= and dp_world_size=, not both",
            *(
                f"The ranks built their loaders with different {name}; dp rank {rank} has {{'{name}': {value[rank]!r}}}"
                for name, value in DIFFERENT.items()
            ),
            "dp_world_size=4, but dp_rank=2 was given to 0 processes, and dp_rank=0 to 1. Give each dp rank to as many",
            f"different epoch_size_is_known; dp rank {rank} has",
            "No mesh given: all 2 ranks of the process group read different samples. With TP, PP or CP pass mesh=",
        ]
        assert len(found["refused"]) == len(expected)
        assert all(part in said for part, said in zip(expected, found["refused"], strict=True)), found["refused"]
