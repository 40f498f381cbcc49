"""Law 9: memory, threads, file descriptors and processes stay as they are, however often a public method is called.

Memory is counted as blocks of Python and as tensors, exactly, and in pages, also of worker processes, roughly. A state keeps
a range of samples for each skip with a batch after it: these are taken off.
"""

import gc
import logging
import multiprocessing
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import rescale_data as rd
from tests.distributed.ranks import run_ranks
from tests.laws.pairs import Case, cases, name_of

NUM_CALLS = 300
FEEDS: dict[str, dict[str, Any]] = {"in process": {}, "thread": {"prefetch": 2}, "workers": {"num_workers": 2}}


def is_odd(row: int) -> bool:
    return row % 2 == 1


def filtered(shard: rd.Shard) -> Any:
    return rd.Filter(rd.Reader(range(64), shard), is_odd)


DOCUMENTS = [{"tokens": [i, i + 1, i + 2]} for i in range(64)]


def packed(shard: rd.Shard) -> Any:
    readers = {name: rd.Reader(DOCUMENTS, shard) for name in ("a", "b")}
    mixture = rd.WeightedSampler(readers, {"a": 2, "b": 1})
    return rd.TokenPacker(mixture, column="tokens", seq_len=4, eos_id=None)


PIPELINES: dict[str, tuple[Any, dict[str, Any]]] = {
    "rows": (range(64), {}),
    "filtered": (filtered, {}),
    "packed": (packed, {"repeat": True, "steps_per_epoch": 7}),
    "balanced": (DOCUMENTS, {"balance": rd.Balance(cost=len, over="rank", weight=len)}),
}
CALLS: dict[str, Callable[[rd.DataLoader, dict[str, Any], int], Any]] = {
    "next": lambda loader, state, i: next(iter(loader), None),
    "iter": lambda loader, state, i: iter(loader),
    "state_dict": lambda loader, state, i: loader.state_dict(),
    "load": lambda loader, state, i: loader.load_state_dict(state),
    "load and next": lambda loader, state, i: (loader.load_state_dict(state), next(iter(loader), None)),
    "close and next": lambda loader, state, i: (loader.close(), next(iter(loader), None)),
    "skip": lambda loader, state, i: loader.skip(2),
    "skip and next": lambda loader, state, i: (loader.skip(2), next(iter(loader), None)),
    "reset": lambda loader, state, i: loader.reset(),
    "peek": lambda loader, state, i: peeked(loader),
    "reopen": lambda loader, state, i: (loader.reset(), loader.reopen(global_batch_size=4 + i % 2 * 4)),
    "set_epoch": lambda loader, state, i: loader.set_epoch(loader.epoch),
    "reopen from a state": lambda loader, state, i: loader.reopen(state, micro_batch_size=2 + i % 2 * 2),
    "progress": lambda loader, state, i: (loader.progress(), loader.report()),
}


def peeked(loader: rd.DataLoader) -> Any:
    try:
        return loader.peek()
    except StopIteration:
        return next(iter(loader), None)


CASES = cases(
    {"call": list(CALLS), "feed": list(FEEDS), "pipeline": list(PIPELINES)},
    lambda case: case["pipeline"] != "balanced" or not case["call"].startswith("skip"),  # refused within a step
)


def opened(pipeline: str, feed: str) -> rd.DataLoader:
    data, given = PIPELINES[pipeline]
    sizes = {"global_batch_size": 4, "micro_batch_size": 2, "num_logical_shards": 8}
    return rd.DataLoader(data, **{**sizes, **given, **FEEDS[feed]})


BLOCKS_OF_A_RANGE = 3
"""Blocks of Python that a range of skipped samples takes: a tuple and two integers."""


def held(loader: rd.DataLoader | None = None) -> dict[str, int]:
    """Return what this process holds, by kind, but for the skipped ranges of a loader."""
    gc.collect()
    sys._clear_type_cache()  # it keeps up to 4096 names of attributes that C code has looked up
    ranges = 0 if loader is None else len(loader._stream.clock.skipped)
    return {
        "blocks": sys.getallocatedblocks() - BLOCKS_OF_A_RANGE * ranges,
        "tensors": sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects()),
        "threads": threading.active_count(),
        "files": len(os.listdir("/proc/self/fd")),
        "processes": len(multiprocessing.active_children()),
    }


def kilobytes() -> dict[int | None, int]:
    """Memory that is written, and no other's, of this process and of its workers."""
    pids = [os.getpid(), *(child.pid for child in multiprocessing.active_children())]
    lines = {pid: Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines() for pid in pids}
    return {pid: int(next(line for line in lines[pid] if "Private_Dirty" in line).split()[1]) for pid in lines}


@pytest.fixture(autouse=True)
def no_log() -> Iterator[None]:
    """No log, of which pytest keeps all."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


ROUNDS = 4
ALLOWED = {"blocks": 80, "tensors": 32, "files": 4, "threads": 1}
"""What may be more after a round of calls than before it: 26 blocks, once 80, and no more after several rounds."""
BLOCKS_WITH_WORKERS = 200
"""Also blocks, where workers are ahead by now more, now fewer batches: up to 524 in one round, and no more in several."""


def require_flat(use: Callable[[int], Any], num_calls: int, loader: rd.DataLoader | None = None) -> None:
    """Fail if a kind of what is held grows in each of four rounds of calls.

    A cache that fills first may grow, and how far workers are ahead differs from moment to moment: a leak grows each time.
    """
    for i in range(num_calls // 4):
        use(i)
    rounds = list[dict[Any, int]]()
    for _ in range(ROUNDS):
        before, size = held(loader), kilobytes()
        for i in range(num_calls):
            use(i)
        rounds.append(growth(before, size, loader))
        if not set.intersection(*map(set, rounds)):
            return
    pytest.fail(f"what grows in {num_calls} calls, in each round: {rounds}")


def growth(before: dict[str, int], size: dict[int | None, int], loader: rd.DataLoader | None) -> dict[Any, int]:
    """Return by how much what this process holds, and the memory of each process, is more than it may be."""
    after, now = held(loader), kilobytes()
    allowed = ALLOWED | ({"blocks": BLOCKS_WITH_WORKERS} if after["processes"] else {})
    more = {name: after[name] - before[name] for name in after}
    pages = {pid: now[pid] - size[pid] for pid in now if pid in size}
    return {name: n for name, n in more.items() if n > allowed.get(name, 0)} | {
        pid: n for pid, n in pages.items() if n > 4096
    }


@pytest.mark.parametrize("case", CASES, ids=map(name_of, CASES))
def test_many_calls(case: Case) -> None:
    call, num_calls = CALLS[case["call"]], NUM_CALLS
    if case["call"].startswith("reopen") or (case["feed"] == "workers" and case["call"].endswith("and next")):
        num_calls = 8 if case["call"] == "close and next" else 100
    with opened(case["pipeline"], case["feed"]) as loader:
        for _ in range(NUM_CALLS):
            next(iter(loader), None)
        state = loader.state_dict()
        require_flat(lambda i: call(loader, state, i), num_calls, loader)


@pytest.mark.parametrize(
    ("pipeline", "feed"),
    [("rows", "workers"), ("filtered", "thread"), ("packed", "in process"), ("rows", "in process")],
)
def test_ten_thousand_batches(pipeline: str, feed: str) -> None:
    with opened(pipeline, feed) as loader:
        batches = (batch for _ in cycle([0]) for batch in loader)
        for _ in range(10_000):  # until what a mixture keeps of its documents is full
            next(batches)
        require_flat(lambda i: next(batches), 10_000)


@pytest.mark.parametrize("feed", FEEDS)
def test_many_loaders(feed: str) -> None:
    def use(i: int) -> None:
        """With sources of its own, which go with it."""
        rows = rd.DatasetSource(list(range(64)))
        with rd.DataLoader(rows, global_batch_size=4, num_logical_shards=8, **FEEDS[feed]) as loader:
            next(iter(loader))

    require_flat(use, 12 if feed == "workers" else 100)


def keys_of_ranks() -> dict[str, int]:
    """Return how many keys each call adds to the job's store, on this rank of several, over forty calls."""
    world: Any = dist.group.WORLD
    store, grown = world.get_group_store(), dict[str, int]()

    def count(name: str, use: Callable[[], Any]) -> None:
        for _ in range(5):
            use()
        dist.barrier()
        before = store.num_keys()
        dist.barrier()
        for _ in range(40):
            use()
        dist.barrier()
        grown[name] = store.num_keys() - before
        dist.barrier()

    def made() -> rd.DataLoader:
        return rd.DataLoader(filtered, global_batch_size=4, micro_batch_size=2, num_logical_shards=8)

    def use_another() -> None:
        with made() as another:
            next(iter(another))
            another.state_dict()

    def balanced() -> rd.DataLoader:
        balance, sizes = rd.Balance(cost=len, over="all"), {"global_batch_size": 8, "num_logical_shards": 8}
        return rd.DataLoader(DOCUMENTS, micro_batch_size=2, balance=balance, prefetch=1, repeat=True, **sizes)

    def use_another_balanced() -> None:
        with balanced() as another:
            next(iter(another))

    loader = made()
    state = loader.state_dict()
    count("epochs", lambda: list(loader))
    count("state_dict", loader.state_dict)
    count("load", lambda: (loader.load_state_dict(state), next(iter(loader))))
    count("skip", lambda: (loader.load_state_dict(state), loader.skip(4)))
    count("loaders", use_another)
    loader = balanced()
    count("balanced", lambda: (loader.reset(), next(iter(loader))))
    count("balanced loaders", use_another_balanced)
    loader.close()
    grown["threads"] = sum(
        each.name in ("rescale_data-balance", "rescale_data-ahead") for each in threading.enumerate()
    )
    return grown


def test_keys_of_the_store() -> None:
    for grown in run_ranks(2, keys_of_ranks, forks=True):
        assert not any(grown.values()), grown


def group_of_a_loader_that_lives() -> bool:
    """Return True if the process group is gone once it is destroyed, though a loader over it is kept."""
    with rd.DataLoader(filtered, global_batch_size=4, micro_batch_size=2, num_logical_shards=8) as loader:
        next(iter(loader))
        loader.state_dict()
    group = weakref.ref(dist.group.WORLD)
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    gc.collect()
    return group() is None and loader.step == 1


def test_a_loader_keeps_no_process_group() -> None:
    """Others wait in it, for what a rank that died does not send, until those that go on have let go of it."""
    assert run_ranks(2, group_of_a_loader_that_lives, forks=True) == [True, True]
