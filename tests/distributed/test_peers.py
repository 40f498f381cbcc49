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
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsspec.implementations.local import LocalFileSystem
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import rescale_data as rd
from rescale_data.engine.ranks import meeting as groups
from tests.distributed.ranks import run_ranks
from tests.states import opened

O, ROWS = 8, 60  # noqa: E741


class Counted(LocalFileSystem):
    """Counts the requests of this process."""

    protocol = "counted"
    requests = 0


def counted(name: str) -> Any:
    def request(self: Counted, *args: Any, **kwargs: Any) -> Any:
        Counted.requests += 1
        return getattr(LocalFileSystem, name)(self, *args, **kwargs)

    return request


for each in ("_open", "cat_file", "ls", "info"):
    setattr(Counted, each, counted(each))


def write(folder: Path) -> None:
    folder.mkdir()
    for file in range(2):
        rows = range(file * ROWS // 2, (file + 1) * ROWS // 2)
        table = pa.table(
            {"row": list(rows), "text": [f"row {row}" for row in rows], "image": [[row] * 3 for row in rows]}
        )
        pq.write_table(table, folder / f"{file}.parquet", row_group_size=10)


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
    fsspec.register_implementation("counted", Counted, clobber=True)
    return functools.partial(pipeline, rd.ParquetSource(f"counted://{folder}"), bad)


def make(data: Path, dp: int, bad: int = -1, receives: bool = True, **arguments: Any) -> rd.DataLoader:
    mesh = init_device_mesh("cpu", (dp, 4 // dp), mesh_dim_names=("dp", "tp"))
    given: dict[str, Any] = {"mesh": mesh["dp"], "global_batch_size": O, "micro_batch_size": 2, "num_logical_shards": 8}
    source = functools.partial(open_data, str(data), bad)
    return rd.DataLoader(
        source, **{"peers": mesh["tp"], "receives": receives, "collate_fn": nested, **given, **arguments}
    )


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
    found["requests"] = Counted.requests

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
    found["requests of 4"] = Counted.requests
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
    found["of another"] = next(iter(training)) and said_or(RuntimeError, (validation if me == 3 else training).peek)
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


def said_or(kind: type[Exception], call: Any) -> str:
    """What an error says; nothing where there is none."""
    try:
        call()
    except kind as error:
        return str(error)
    return ""


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
    assert [found["reads"] for found in ranks] == [True, False, True, False]
    assert [found["requests"] > 0 for found in ranks] == [True, False, True, False]
    assert [found["requests of 4"] > 0 for found in ranks] == [True, False, True, False]


def test_batches_are_those_of_a_loader(ranks: list[dict[str, Any]], tmp_path: Path) -> None:
    write(tmp_path / "data")
    epochs: list[Any] = []
    for dp_rank in range(2):
        data = open_data(str(tmp_path / "data"))
        loader = rd.DataLoader(
            data, global_batch_size=O, micro_batch_size=2, num_logical_shards=8, dp_rank=dp_rank, dp_world_size=2,
            collate_fn=nested,
        )  # fmt: skip
        epochs.append([plain(batch) for batch in loader])
    for rank, found in enumerate(ranks):
        epoch = epochs[rank // 2]
        assert found["first"] + found["rest"] == epoch
        assert found["by number"] == epoch[:5]


def test_all_have_the_same_state_and_go_on_as_one_dp_rank_of_4(ranks: list[dict[str, Any]]) -> None:
    assert all(found["state"] == ranks[0]["state"] for found in ranks)
    assert all(found["rescaled"] == ranks[0]["rescaled"] for found in ranks)
    first = [row for found in (ranks[0], ranks[2]) for row in rows(found["first"])]
    later = rows(ranks[0]["rescaled"])
    assert len(first) == 20
    assert len(later) == 40
    assert sorted(first + later) == list(range(ROWS))


def test_a_state_of_dp_ranks_at_different_batches_is_loaded_into_but_not_kept(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert "The ranks save at different batches" in found["pickled"]
        assert found["rolled back"] == found["rest"]


def test_rows_of_one_dp_rank_stay_with_the_one_that_reads(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert "peers= and 2 dp ranks" in found["local"]
        assert "Call loader.state_dict() on all ranks" in found["local"]


def test_each_peer_sends_its_batches_to_its_own_device(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        sums = [sum(batch["row"][2]) for batch in found["first"] + found["rest"]]
        assert found["sent"] == [sums[0], sums]


def test_a_fork_of_a_peer_sends_nothing_on_its_connections(ranks: list[dict[str, Any]]) -> None:
    assert [found["in a fork"] for found in ranks] == [3, 3, 3, 3]


def test_a_stage_that_needs_nothing_has_nothing(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["stages"] == ranks[3]["stages"]
    assert len(ranks[0]["stages"]) == 28
    assert ranks[1]["stages"] == ranks[2]["stages"] == [None] * 28


def test_peers_that_differ_are_told_where(ranks: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(ranks):
        assert (
            f"different seed: rank {rank} has {rank // 3}, and the ranks [3] another than rank 0" in found["different"]
        )
    assert all("different pipeline" in found["other data"] for found in ranks)
    assert "make the same calls in the same order" in ranks[3]["apart"]


def test_errors_of_the_one_that_reads_are_raised_on_all(ranks: list[dict[str, Any]]) -> None:
    assert all("micro_batch_size" in found["bad arguments"] for found in ranks)
    assert all("nothing" in found["no files"] for found in ranks)
    assert [found["before the error"] for found in ranks] == [2] * 4
    assert all("is bad" in found["error"] for found in ranks[:2])


def test_data_that_cannot_be_opened_is_told_at_once_where_dp_ranks_are_given_by_number(
    ranks: list[dict[str, Any]],
) -> None:
    assert all("nothing" in found["no data"] for found in ranks)
    assert max(found["seconds until it was said"] for found in ranks) < 200  # timeout is 300


def test_a_call_of_another_loader_among_the_same_peers_is_an_error(ranks: list[dict[str, Any]]) -> None:
    assert [bool(found["of another"]) for found in ranks] == [False, False, False, True]
    assert "that of another loader" in ranks[3]["of another"]


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


def test_a_report_is_that_of_the_dp_ranks_on_all_peers(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["report"]["read_bytes"].minimum > 0
    assert all(found["report"] == ranks[0]["report"] for found in ranks)
