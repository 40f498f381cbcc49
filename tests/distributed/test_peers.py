"""`peers=`: of the peers of a dp rank one reads, and all have its batches, its state and its errors."""

import functools
import gc
import os
import pickle
import time
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import rescale_data as rd
from rescale_data.engine.ranks import meeting as groups
from tests.distributed.ranks import run_ranks
from tests.formats import write_table
from tests.sources.far import Far
from tests.states import opened

ROWS = 60
SIZES: dict[str, Any] = {"global_batch_size": 8, "micro_batch_size": 2, "num_logical_shards": 8}


def write(folder: Path) -> None:
    for file in range(2):
        rows = range(file * ROWS // 2, (file + 1) * ROWS // 2)
        columns = {"row": rows, "text": [f"row {row}" for row in rows], "image": [[row] * 3 for row in rows]}
        write_table(folder / f"{file}.parquet", columns, 10)


def nested(samples: list[Any]) -> Any:
    """What a batch may be: tensors in dicts and tuples, arrays, strings, `None`."""
    rows = torch.tensor([int(sample["row"]) for sample in samples])
    return {
        "row": rows,
        "of": {"image": (np.stack([sample["image"] for sample in samples]), None)},
        "text": [sample["text"] for sample in samples],
        "empty": torch.empty(0, 3),
        "mask": (rows % 2 == 0)[:, None].expand(-1, 2),
    }


def fails_at(row: int, sample: Any) -> Any:
    if sample["row"] == row:
        raise KeyError(f"row {row} is bad")
    return sample


def pipeline(source: Any, bad: int, shard: rd.Shard) -> Any:
    return rd.Map(rd.Reader(source, shard), functools.partial(fails_at, bad))


def open_data(folder: str, bad: int = -1) -> Any:
    fsspec.register_implementation("far", Far, clobber=True)
    return functools.partial(pipeline, rd.ParquetSource(f"far://{folder}"), bad)


def make(data: Path, dp: int, bad: int = -1, receives: bool = True, **arguments: Any) -> rd.DataLoader:
    mesh = init_device_mesh("cpu", (dp, 4 // dp), mesh_dim_names=("dp", "tp"))
    given: dict[str, Any] = {**SIZES, "mesh": mesh["dp"], "peers": mesh["tp"], "receives": receives}
    source = functools.partial(open_data, str(data), bad)
    return rd.DataLoader(source, **{**given, "collate_fn": nested, **arguments})


def row_sums(batch: Any) -> Any:
    return batch["row"].sum().item()


def plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor | np.ndarray):
        return [type(value).__name__, str(value.dtype), value.tolist()]
    if isinstance(value, dict):
        return {name: plain(of) for name, of in value.items()}
    return [plain(of) for of in value] if isinstance(value, list | tuple) else value


def said(kind: type[Exception], call: Any) -> str:
    with pytest.raises(kind) as error:
        call()
    return str(error.value)


def on_4_ranks(folder: Path) -> dict[str, Any]:
    me = dist.get_rank()
    data = folder / "data"
    found: dict[str, Any] = {}
    with make(data, 2) as loader:
        batches, taken = iter(loader), []
        for _ in range(5):
            found["peeked"] = plain(loader.peek())
            taken.append(plain(next(batches)))
        assert taken[-1] == found["peeked"]
        found |= {"first": taken, "reads": len(loader.progress()) > 1}
        dcp.save({"loader": loader}, checkpoint_id=folder / "saved")
        found["state"] = {name: tensor.tolist() for name, tensor in opened(loader.state_dict())["shards"].items()}
        found["rest"] = [plain(batch) for batch in batches]
        found["report"] = loader.report()
        found["in a fork"] = exit_code_of_a_fork(loader)
    found["requests"] = Far.asked.total()

    uneven = make(data, 2)
    for _ in range(1 + me // 2):
        next(iter(uneven))
    found["pickled"] = said(rd.DataStateError, functools.partial(pickle.dumps, uneven.state_dict()))
    found["local"] = said(TypeError, uneven.local_state_dict)
    dcp.load({"loader": uneven}, checkpoint_id=folder / "saved")
    found["rolled back"] = [plain(batch) for batch in uneven]

    wider = make(data, 1)  # from 2 dp ranks of 2 TP peers each to one of 4
    dcp.load({"loader": wider}, checkpoint_id=folder / "saved")
    found["rescaled"] = [plain(batch) for batch in wider]
    found["requests of 4"] = Far.asked.total()
    sent = make(data, 2, collate_fn=None, transfer=row_sums)
    found["sent"] = [sent.peek(), list(sent)]
    stage = make(data, 1, receives=me in (0, 3), pin_memory=True)  # a pipeline of 4 stages
    found["stages"] = [plain(batch) for batch in stage]

    found["different"] = said(ValueError, lambda: make(data, 1, seed=me // 3))
    found["other data"] = said(ValueError, lambda: make(folder / str(me), 1))
    found["bad arguments"] = said(ValueError, lambda: make(data, 2, micro_batch_size=3))
    found["no files"] = said(FileNotFoundError, lambda: make(folder / "nothing", 2))
    failing = iter(make(data, 2, bad=found["first"][2]["row"][2][0] if me < 2 else -1))
    found["before the error"] = len([next(failing) for _ in range(2)])
    if me < 2:
        found["error"] = said(KeyError, failing.__next__)
    found["by number"] = [plain(batch) for batch in by_number(data, me // 2)][:5]
    began = time.monotonic()
    found["no data"] = said(FileNotFoundError, lambda: by_number(data / "nothing", 1 - me // 2))
    found["seconds until it was said"] = time.monotonic() - began
    training, validation = make(data, 1), make(data, 1)
    next(iter(training))
    found["of another"] = said(RuntimeError, validation.peek) if me == 3 else training.peek()
    if me in (2, 3):
        loader = numbers(2, 3)
        found["apart"] = said(RuntimeError, loader.peek if me == 3 else loader.reset) if me == 3 else loader.reset()
    if me != 2:
        found["after a death"] = after_a_death(3)
    return found


def exit_code_of_a_fork(loader: rd.DataLoader) -> int:
    """Return 3 if a call in a forked child is an error that says so."""
    child = os.fork()
    if child == 0:
        try:
            loader.peek()
        except RuntimeError as error:
            os._exit(3 if "was forked from the rank" in str(error) else 2)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def by_number(data: Path, dp_rank: int) -> rd.DataLoader:
    peers = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"].get_group()
    return make(data, 2, mesh=None, peers=peers, dp_rank=dp_rank, dp_world_size=2)


def after_a_death(dead: int) -> list[str]:
    """Of three peers one is gone, as its sockets tell; what the others hear, who try again and again."""
    loader = numbers(0, 1, dead, timeout=8.0)
    batches = iter(loader)
    next(batches)
    if dist.get_rank() == dead:
        del batches, loader
        groups._values_by_group[dist.group.WORLD].pop(("peers", 0, 1, dead))
        gc.collect()
        return []
    heard: list[str] = []
    for _ in range(4):
        try:
            heard.append(str(next(batches).tolist()))
        except RuntimeError as error:
            heard.append(str(error))
    return heard


def numbers(*peers: int, **given: Any) -> rd.DataLoader:
    where: dict[str, Any] = {
        "peers": DeviceMesh("cpu", [*peers], _init_backend=False),
        "dp_rank": 0,
        "dp_world_size": 1,
    }
    return rd.DataLoader(lambda: range(1000), **where, global_batch_size=4, shuffle=False, **given)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("broadcast")
    write(folder / "data")
    return run_ranks(4, folder, on_4_ranks, folder)


def rows(batches: list[Any]) -> list[int]:
    return [row for batch in batches for row in batch["row"][2]]


def test_one_reads_and_its_peers_make_no_request(ranks: list[dict[str, Any]]) -> None:
    for name in ("reads", "requests", "requests of 4"):
        assert [found[name] > 0 for found in ranks] == [True, False, True, False]


def test_batches_are_those_of_a_loader_and_come_to_the_device_of_each_peer(ranks: Any, tmp_path: Path) -> None:
    write(tmp_path / "data")
    given = {**SIZES, "collate_fn": nested, "dp_world_size": 2}
    data = open_data(str(tmp_path / "data"))
    alone = [[plain(batch) for batch in rd.DataLoader(data, **given, dp_rank=rank)] for rank in range(2)]
    for rank, found in enumerate(ranks):
        epoch = alone[rank // 2]
        assert found["first"] + found["rest"] == epoch
        assert found["by number"] == epoch[:5]
        sums = [sum(batch["row"][2]) for batch in epoch]
        assert found["sent"] == [sums[0], sums]


def test_all_have_the_same_state_and_go_on_as_one_dp_rank_of_4(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["report"]["read_bytes"].minimum > 0
    for found in ranks:
        assert found["rolled back"] == found["rest"], "also where dp ranks stood at different batches"
        assert all(found[name] == ranks[0][name] for name in ("state", "rescaled", "report"))
    first = [row for found in (ranks[0], ranks[2]) for row in rows(found["first"])]
    later = rows(ranks[0]["rescaled"])
    assert (len(first), len(later)) == (20, 40)
    assert sorted(first + later) == list(range(ROWS))


def test_a_stage_that_needs_nothing_has_nothing(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["stages"] == ranks[3]["stages"]
    assert len(ranks[0]["stages"]) == 28
    assert ranks[1]["stages"] == ranks[2]["stages"] == [None] * 28


SAID: dict[str, tuple[tuple[int, ...], str]] = {
    "pickled": ((0, 1, 2, 3), "The ranks save at different batches"),
    "local": ((0, 1, 2, 3), "peers= and 2 dp ranks"),
    "different": ((0, 1, 2), "different seed: rank {rank} has 0, and the ranks [3] another than rank 0"),
    "other data": ((0, 1, 2, 3), "different pipeline"),
    "bad arguments": ((0, 1, 2, 3), "micro_batch_size"),
    "no files": ((0, 1, 2, 3), "nothing"),
    "error": ((0, 1), "is bad"),
    "no data": ((0, 1, 2, 3), "nothing"),
    "apart": ((3,), "make the same calls in the same order"),
    "of another": ((3,), "that of another loader"),
}
"""What is said on which ranks."""


@pytest.mark.parametrize("what", SAID)
def test_what_is_wrong_is_said_on_all_that_it_concerns(what: str, ranks: list[dict[str, Any]]) -> None:
    for rank in SAID[what][0]:
        assert SAID[what][1].format(rank=rank) in ranks[rank][what]


def test_errors_come_in_their_place_and_in_time_and_forks_send_nothing(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert (found["before the error"], found["in a fork"]) == (2, 3)
        assert found["seconds until it was said"] < 200, "timeout is 300"


def test_when_a_peer_is_gone_the_others_are_told_so_and_given_nothing_else(ranks: list[dict[str, Any]]) -> None:
    for rank in range(2):
        heard = ranks[rank]["after a death"]
        batches = [text for text in heard if text.startswith("[")]
        assert batches == [str(list(range(4 * i, 4 * i + 4))) for i in range(1, len(batches) + 1)]
        first, *more = heard[len(batches) :]
        others = "one of the ranks [1, 3]" if rank == 0 else "rank 0, which reads"
        assert f"Rank {rank} waited at most 8 s for {others}: it makes no call, or has died" in first
        assert more
        assert set(more) == {first}
