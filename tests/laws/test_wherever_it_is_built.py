"""Law 10: wherever a loader is built and asked it gives the same rows, or an error that says what to do."""

import gc
import json
import logging
import multiprocessing
import os
import pickle
import re
import threading
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import chain, islice
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import rescale_data as rd
from rescale_data.engine.ranks import find_ranks
from tests.distributed.ranks import SECONDS, run_ranks
from tests.laws.pairs import Case, cases, name_of
from tests.laws.tables import CORPORA, is_kept
from tests.states import closed, opened

ROWS = rd.DatasetSource(CORPORA["web"], name="web")
SHORT, LONG = 1.5, 60.0
"""Seconds that a rank waits for one that fails on purpose, and for one that does not."""
END = 1000
"""More global batches than there are."""


def rows(shard: rd.Shard) -> rd.Node[Any]:
    return rd.Reader(ROWS, shard)


def filtered(shard: rd.Shard) -> rd.Node[Any]:
    return rd.Filter(rows(shard), is_kept)


def packed(shard: rd.Shard) -> rd.Node[Any]:
    return rd.TokenPacker(rows(shard), column="tokens", seq_len=11, eos_id=None)


DATA = {"rows": rows, "filtered": filtered, "packed": packed}
AHEAD = {"nothing": {}, "thread": {"prefetch": 2}, "worker": {"num_workers": 1}}
STEP = {1: 4, 2: 4, 3: 3, 4: 4}
"""The samples of a global batch, by the number of ranks; twice as many logical shards."""
GRIDS = {
    "dp and tp": [[0, 1], [2, 3]],
    "tp and dp": [[0, 2], [1, 3]],
    "tp alone": [[0, 1, 2, 3]],
    "dp_rank of dp and tp": [[0, 1], [2, 3]],
    "out of order": [[2], [0], [3], [1]],
}
"""Ways to use four ranks: the ranks of each dp rank, which read the same rows."""
DIMENSIONS: dict[str, list[Any]] = {
    "trouble": ["none", "build fails", "load fails", "saves alone", "built in another order", "used in another order"],
    "use": ["iterate", "state_dict", "load", "skip", "peek", "numbers"],
    "built": ["before the group", "after it", "in a group before"],
    "ranks": ["default", "dp_rank", "mesh", "group", "one", *GRIDS],
    "data": list(DATA),
    "ahead": list(AHEAD),
    "world": [2, 3, 4],
}
"""Trouble is what rank 1 does otherwise than rank 0, before all go on alike."""


def allowed(case: Case) -> bool:
    """True unless there is no mesh yet, an epoch's end that simulated ranks cannot know, or no rank that has trouble."""
    if case["ranks"] in GRIDS:
        return case["world"] == 4 and case["trouble"] == "none" and case["built"] != "before the group"
    simulated = case["ranks"] == "dp_rank" and case["data"] != "rows"
    if case["built"] == "before the group" and (case["ranks"] in ("mesh", "group") or simulated):
        return False
    return case["trouble"] == "none" or (case["built"] == "after it" and case["ranks"] != "one")


CASES = cases(DIMENSIONS, allowed)
Batch = list[Any]


def collate(samples: list[dict[str, Any]]) -> list[Any]:
    """Return what tells samples apart: an id, or a tuple of tokens."""
    return [each["id"] if "id" in each else tuple(each["tokens"].tolist()) for each in samples]


def loader_of(data: str, world: int = 2, **options: Any) -> rd.DataLoader:
    sizes = {"global_batch_size": STEP[world], "micro_batch_size": 1, "num_logical_shards": 2 * STEP[world], "seed": 3}
    return rd.DataLoader(DATA[data], collate_fn=collate, **{**sizes, "timeout": LONG, **options})


def alone(data: str, world: int) -> list[Batch]:
    """Return the global batches of two epochs on one rank, of the size that they have on `world` ranks."""
    loader = loader_of(data, world, micro_batch_size=STEP[world], dp_world_size=1)
    return [batch for _ in range(2) for batch in loader]


class Group:
    """The process group of a case, which can be started again."""

    def __init__(self, store: Any, rank: int, world: int) -> None:
        self._store, self._rank, self._world, self._number = store, rank, world, 0

    def start(self) -> None:
        self._number += 1
        store = dist.PrefixStore(f"group{self._number}", self._store)
        dist.init_process_group("gloo", store=store, rank=self._rank, world_size=self._world)

    def restart(self) -> None:
        dist.barrier()
        dist.destroy_process_group()
        self.start()


def ranks_of(case: Case, rank: int) -> dict[str, Any]:
    """Return the arguments that say which ranks there are."""
    world = case["world"]
    if case["ranks"] == "mesh":
        return {"mesh": init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))}
    if case["ranks"] == "out of order":
        return {"mesh": DeviceMesh("cpu", [[2, 0], [3, 1]], mesh_dim_names=("replicate", "shard"))}
    if case["ranks"] == "dp_rank of dp and tp":
        return {"dp_rank": rank // 2, "dp_world_size": 2}
    if case["ranks"] in GRIDS:
        dims = ("tp", "dp") if case["ranks"] == "tp and dp" else ("dp", "tp")
        shape = (1, 4) if case["ranks"] == "tp alone" else (2, 2)
        return {"mesh": init_device_mesh("cpu", shape, mesh_dim_names=dims)["dp"]}
    if case["ranks"] == "group":
        return {"mesh": dist.new_group(list(range(world)))}
    given = {"dp_rank": rank, "dp_world_size": world}
    return {"default": {}, "dp_rank": given, "one": {"dp_world_size": 1}}[case["ranks"]]


def failure(call: Callable[[], Any]) -> str:
    """Return the error of a call that has to fail."""
    with pytest.raises((RuntimeError, ValueError)) as error:
        call()
    return str(error.value)


def names(said: str, rank: int) -> bool:
    """True if an error names the rank that does not come, perhaps with others, or, on a busy machine, the store."""
    missing = re.search(r"[Tt]he ranks \[([\d, ]*)\] did not", said)
    return "the store" in said or (missing is not None and str(rank) in missing[1].split(", "))


def run(case: Case, rank: int, group: Group) -> tuple[list[str], int, list[Batch]]:
    """Return what failed on a rank, how many global batches were left out, and its batches of what followed."""
    options = AHEAD[case["ahead"]]
    if case["built"] == "before the group":
        loader = loader_of(case["data"], case["world"], **options, **ranks_of(case, rank))
        begun = iter(loader) if is_late(case) else iter(())
        next(begun, None)
        group.start()
    else:
        group.start()
        where = ranks_of(case, rank)
        if case["trouble"] == "build fails":
            wrong = {"tail": "dorp"} if rank == 1 else {"timeout": SHORT}
            said = failure(lambda: loader_of(case["data"], case["world"], **wrong, **where))
            assert "tail='dorp'" in said if rank == 1 else names(said, 1)
            dist.barrier()
        if case["trouble"] == "built in another order":
            said = failure(lambda: loader_of(case["data"], case["world"], **where, seed=rank))
            assert "different seed" in said
        loader = loader_of(case["data"], case["world"], **options, **where)
    if case["built"] == "in a group before":
        group.restart()
    with loader:
        if is_late(case):
            calls: list[Callable[[], Any]] = [
                lambda: list(islice(begun, 16)),  # it does not ask for each batch
                lambda: use(case, rank, loader),
                lambda: next(iter(loader)),
                lambda: len(loader),
                loader.state_dict,
            ]
            calls += [
                lambda: loader.skip(4),
                lambda: loader.load_state_dict({}),
                lambda: loader.gradient_accumulation_steps,
            ]
            return list(map(failure, calls)), 0, []
        return [], *use(case, rank, loader)


def is_late(case: Case) -> bool:
    """True if the group comes after the loader, and the loader is to read for several ranks."""
    return case["built"] == "before the group" and case["ranks"] != "one"


def use(case: Case, rank: int, loader: rd.DataLoader) -> tuple[int, list[Batch]]:
    """Do what a case does, and read on to the end of the second epoch."""
    if case["use"] == "state_dict":
        loader.state_dict()
    if case["use"] == "peek":
        assert loader.peek() == loader.peek()
    if case["use"] == "skip":
        loader.skip(2 * STEP[case["world"]])
    if case["use"] == "numbers" and rank == 1:
        assert (loader.step, loader.epoch, bool(loader)) == (0, 0, True)
        loader.gradient_accumulation_steps, loader.last_batch_samples, loader.progress()
        for number in (lambda: len(loader), lambda: loader.batches_left):
            if case["data"] == "rows":
                assert number() > 0
            else:
                with pytest.raises(TypeError):
                    number()
    left_out = 2 if case["use"] == "skip" else 0
    if case["use"] == "load" or case["trouble"] in ("load fails", "saves alone"):
        left_out += 2
        reload(case, rank, loader)
    if case["trouble"] == "used in another order":
        other = loader_of(case["data"], case["world"], **ranks_of(case, rank))
        first, second = (other, loader) if rank else (loader, other)
        if case["data"] == "rows":  # each rank knows all by itself
            for each in (first, second):
                assert len(list(read(each, each.step + 2))) == 2 * loader.gradient_accumulation_steps
            left_out += 2
        else:
            said = failure(lambda: with_patience(first, lambda: list(read(first))))
            assert names(said, 0 if rank else 1)
            dist.barrier()
            return END, []
    return left_out, list(read(loader))


def reload(case: Case, rank: int, loader: rd.DataLoader) -> None:
    """Save after two steps, read on, and go back there."""
    taken = list(read(loader, loader.step + 2))
    assert taken
    if case["trouble"] == "saves alone" and rank == 1:
        said = failure(lambda: with_patience(loader, loader.state_dict))
        assert names(said, 0)
    if dist.get_world_size() > 1:
        dist.barrier()
    state = loader.state_dict()
    batches = iter(loader)
    next(batches)
    if case["trouble"] == "load fails" and rank == 1:
        assert "seed=99" in failure(lambda: loader.load_state_dict(closed({**opened(state), "seed": 99})))
    if case["trouble"] == "load fails" and rank == 0:
        loader.load_state_dict(state)  # and once more, which the other does not
    loader.load_state_dict(state)
    assert loader.step == opened(state)["step"]


def with_patience(loader: rd.DataLoader, call: Callable[[], Any]) -> Any:
    """Call what others do not, and wait for them shortly."""
    ranks = loader._stream.ranks
    object.__setattr__(ranks, "timeout", SHORT)
    try:
        return call()
    finally:
        object.__setattr__(ranks, "timeout", LONG)


def read(loader: rd.DataLoader, stop: int | None = None) -> Iterator[Any]:
    """Yield batches up to a step, or to the end of the second epoch."""
    while loader.epoch < 2:
        for batch in loader:
            yield batch
            if loader.step == stop:
                return


def in_a_fork(*calls: Callable[[], Any]) -> list[Any]:
    """Return what calls give in a forked child, or the texts of their errors."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(writer, json.dumps([said_by(call) for call in calls]).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        said = json.loads(file.read())
    os.waitpid(child, 0)
    return said


def said_by(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:
        return str(error)


def groups_that_stay() -> tuple[int, int]:
    """Return how many of ten groups live on that loaders used and that are destroyed, and how many threads do."""
    groups: list[Any] = []
    before = set(threading.enumerate())
    for _ in range(10):
        group = dist.new_group([0, 1])
        with loader_of("rows", mesh=group) as loader:
            next(iter(loader))
            loader.state_dict()
            rd.whole_state(loader.local_state_dict())
        dist.destroy_process_group(group)
        groups.append(weakref.ref(group))
        del group, loader
    gc.collect()
    new = set(threading.enumerate()) - before
    for thread in new:
        thread.join(120)  # it ends when it is next run
    return sum(group() is not None for group in groups), sum(thread.is_alive() for thread in new)


def on_ranks() -> dict[str, Any]:
    """Return what a rank has found in each case that has so many ranks."""
    everybody: Any = dist.group.WORLD
    rank, store = dist.get_rank(), everybody.get_group_store()
    dist.destroy_process_group()
    found: dict[str, Any] = {}
    for number, case in enumerate(CASES):
        if rank >= case["world"]:
            continue
        group = Group(dist.PrefixStore(f"case{number}", store), rank, case["world"])
        try:
            found[name_of(case)] = run(case, rank, group)
        except BaseException as error:
            error.add_note(f"in the case {name_of(case)}")
            raise
        dist.barrier()
        dist.destroy_process_group()
    if rank < 2:
        Group(dist.PrefixStore("last", store), rank, 2).start()  # which ends with this process
        loader = loader_of("rows")
        loader.state_dict()
        found["fork"] = in_a_fork(loader.state_dict, loader.report)
        found["groups"] = groups_that_stay()
        store.set(f"done{rank}", "")
    else:
        store.wait(["done0", "done1"], timedelta(seconds=SECONDS))
        Group(dist.PrefixStore(f"last{rank}", store), 0, 1).start()
    return found


@pytest.fixture(scope="module")
def found() -> Any:
    ranks = run_ranks(4, on_ranks)
    return {name: [each[name] for each in ranks if name in each] for name in ranks[0]}


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_the_same_rows_or_an_error_with_the_line_to_move(case: Case, found: Any) -> None:
    ranks = found[name_of(case)]
    if is_late(case):
        for said, _, batches in ranks:
            assert not batches
            assert all(f"built before the process group of {case['world']} ranks" in each for each in said)
            assert all("train_dataloader()" in each for each in said)
        return
    size, world = STEP[case["world"]], case["world"]
    in_order = alone(case["data"], world)
    expected = [sorted(batch) for batch in in_order]
    assert len(ranks) == world
    for said, left_out, batches in ranks:
        assert not said
        if case["ranks"] == "one":
            steps = [list(chain(*batches[i : i + size])) for i in range(0, len(batches), size)]
            assert [sorted(step) for step in steps] == expected[left_out:]
    if case["ranks"] != "one":
        of_dp_ranks = GRIDS.get(case["ranks"], [[rank] for rank in range(world)])
        for peers in of_dp_ranks:
            assert all(ranks[peer] == ranks[peers[0]] for peer in peers)
        left_out, each = ranks[0][1], size // len(of_dp_ranks)
        assert len({len(batches) for _, _, batches in ranks}) == 1
        steps = [
            list(chain(*(chain(*ranks[peers[0]][2][i : i + each]) for peers in of_dp_ranks)))
            for i in range(0, len(ranks[0][2]), each)
        ]
        assert [sorted(step) for step in steps] == expected[left_out:]
        if case["data"] == "rows" and steps:  # not the remainder of an epoch: rows in the order of dp ranks
            assert steps[0] == in_order[left_out]


def test_a_fork_of_a_rank_is_no_rank(found: Any) -> None:
    for said in found["fork"]:
        assert all("was forked from the rank" in each and "build a loader in it" in each for each in said)


def test_a_group_that_is_destroyed_ends(found: Any) -> None:
    for num_groups, num_threads in found["groups"]:
        assert num_groups == 0
        assert num_threads == 0


def test_a_loader_says_where_to_build_it_for_a_process_that_is_spawned() -> None:
    loader = loader_of("rows")
    with pytest.raises(TypeError, match="build it in the function that is spawned, after init_process_group"):
        multiprocessing.get_context("spawn").Process(target=len, args=(loader,)).start()
    with pytest.raises(TypeError, match="at the top level of the dict"):
        pickle.dumps({"loader": loader})


@pytest.mark.parametrize("launcher", ["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_NTASKS"])
def test_a_job_of_several_processes_without_a_group(
    launcher: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv(launcher, "4")
    find_ranks._warn_once.cache_clear()
    for numbers in ({"dp_world_size": 1}, {"dp_rank": 1, "dp_world_size": 2}):
        loader_of("rows", **numbers)
    if launcher == "WORLD_SIZE":
        with pytest.raises(ValueError, match=r"WORLD_SIZE=4.* Build it after torch\.distributed\.init_process_group"):
            loader_of("rows")
        return
    with caplog.at_level(logging.WARNING, "rescale_data"):
        for _ in range(2):
            loader_of("rows")
    assert [launcher in record.getMessage() for record in caplog.records] == [True]
