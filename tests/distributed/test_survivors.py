"""A rank of four is killed; three go on at the step of the model from a state that they have kept, and a new one joins them."""

import gc
import multiprocessing
import os
import pickle
import runpy
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import rescale_data as rd
from rescale_data.engine.ranks.ranks import Ranks

EXAMPLES = Path(__file__).parents[2] / "examples"
Kept = runpy.run_path(str(EXAMPLES / "trainers" / "parts" / "kept.py"))["Kept"]
GLOBAL_BATCH_SIZE, STEPS, EVERY, KILLED, LATE, JOINS = 24, 15, 4, 1, 3, 12
DIES = {"step": 9, "state": 8, "commit": 9}
"""Where the rank is killed, and in which step: within it, while states are made, while it is committed."""
NUMBERS = rd.DatasetSource(range(430), "numbers")
EPOCH = 10
"""Steps of the first epoch, of each case."""


def keep(row: int) -> bool:
    return row * 2654435761 % 5 < 3


def filtered(shard: rd.Shard) -> rd.BaseNode[Any]:
    return rd.Filter(rd.Reader(NUMBERS, shard), keep)


CASES: dict[str, dict[str, Any]] = {
    "counted": {"pipeline": range(260)},
    "workers": {"pipeline": filtered, "num_workers": 3, "multiprocessing_context": "fork"},
    "not aligned": {"pipeline": range(260), "num_logical_shards": 50},
}


class Run:
    """All cases on one rank, step by step."""

    def __init__(self) -> None:
        self.loaders: dict[str, rd.DataLoader] = {}
        self.batches: dict[str, Iterator[Any]] = {name: iter(()) for name in CASES}
        self.steps: dict[str, dict[int, list[Any]]] = {name: {} for name in CASES}
        self.kept: dict[str, Any] = {name: Kept(EVERY) for name in CASES}

    def build(self, name: str, micro_batch_size: int, **kwargs: Any) -> rd.DataLoader:
        sizes = {"global_batch_size": GLOBAL_BATCH_SIZE, "num_logical_shards": 72, "micro_batch_size": micro_batch_size}
        self.loaders[name] = rd.DataLoader(**{**sizes, "timeout": 60.0, **CASES[name], **kwargs})
        return self.loaders[name]

    def go_on(self, step: int, micro_batch_size: int) -> None:
        """Begin, or go on, at a step: each loader in turn, as new ranks and others do together."""
        for name, kept in self.kept.items():
            state, delivered = kept.agreed(step)
            if name in self.loaders:
                self.loaders[name].reopen(state, delivered, micro_batch_size=micro_batch_size)
            else:
                self.build(name, micro_batch_size).load_state_dict(state, delivered)
            self.batches[name] = iter(self.loaders[name])

    def take(self, step: int, die: Any = None) -> None:
        for name, loader in self.loaders.items():
            assert loader.step == step
            rows: list[Any] = []
            for _ in range(loader.gradient_accumulation_steps):
                rows += self._next(name).tolist()
                if die is not None and name == list(self.loaders)[-1]:
                    die()
            self.steps[name][step] = rows

    def _next(self, name: str) -> Any:
        while (batch := next(self.batches[name], None)) is None:
            self.batches[name] = iter(self.loaders[name])
        return batch


def meet(port: int, number: int, members: list[int], me: int) -> int:
    """A new process group of those that live; the micro batch that fits it."""
    store = dist.PrefixStore(str(number), dist.TCPStore("localhost", port, is_master=False))
    dist.init_process_group("gloo", store=store, rank=members.index(me), world_size=len(members))
    return 12 // len(members)


def largest(step: int) -> int:
    """The step of the model that has done the most, which the others are given."""
    steps: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(steps, step)
    return max(steps)


def rank(me: int, port: int, folder: Path, kind: str) -> None:
    torch.set_num_threads(1)
    gc.disable()  # groups that were dropped are collected in no rank, but would be in each fork
    os.register_at_fork(after_in_child=gc.collect)
    members = [[0, 1, 2, 3], [0, 2, 3], [0, 2, 3, 4]]
    number, run, step = 0 if me in members[0] else 2, Run(), 0
    if number == 0:
        b = meet(port, number, members[number], me)
        for name in CASES:
            run.build(name, b)

    def die() -> None:
        (folder / str(me)).write_bytes(pickle.dumps(run.steps))
        os.kill(os.getpid(), signal.SIGKILL)

    def one_step() -> bool:
        """True if the step is complete on all ranks, as an all-reduce of gradients tells."""
        dies = me == KILLED and step == DIES[kind]
        for i, (name, kept) in enumerate(run.kept.items()):
            if dies and kind == "state" and i == 2:
                Ranks.merge = lambda self, table, owner: die()  # type: ignore[method-assign, assignment, return-value]
            kept.keep(run.loaders[name])
        run.take(step, die if dies and kind == "step" else None)
        if dies and kind == "commit":
            die()
        dist.all_reduce(torch.ones(1))
        return True

    while step < STEPS:
        if run.loaders:
            try:
                done = one_step()
            except RuntimeError:
                done = False
            step += done or (kind == "commit" and me == LATE and number == 0)
            if done and not (step == JOINS and number == 1):
                continue
            for loader in run.loaders.values():
                loader.close()  # forked workers hold the group's connections open, by whose end others see that it is over
            dist.destroy_process_group()
            number += 1
        b = meet(port, number, members[number], me)
        step = largest(step)
        run.go_on(step, b)
    for loader in run.loaders.values():
        loader.close()
    (folder / str(me)).write_bytes(pickle.dumps(run.steps))
    dist.destroy_process_group()


@pytest.fixture(scope="module", params=list(DIES))
def run_of(request: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[Any]]]:
    """The global batches of each case, as the ranks that committed them had them."""
    folder = tmp_path_factory.mktemp("ranks")
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")
    started = [context.Process(target=rank, args=(me, store.port, folder, request.param)) for me in range(5)]
    for process in started:
        process.start()
    deadline = time.monotonic() + 200
    for process in started:
        process.join(max(0, deadline - time.monotonic()))
    codes = [process.exitcode for process in started]
    for process in started:
        process.kill()
    assert codes == [0, -signal.SIGKILL, 0, 0, 0]
    found = [pickle.loads((folder / str(me)).read_bytes()) for me in range(5)]
    goes_on = DIES[request.param] + (request.param == "commit")
    for steps in found[KILLED].values():  # what it began, others have served again
        for step in [step for step in steps if step >= goes_on]:
            del steps[step]
    return {
        name: [[row for each in found for row in each[name].get(step, [])] for step in range(STEPS)] for name in CASES
    }


@pytest.mark.parametrize("name", ["counted", "workers"])
def test_batches_are_those_of_a_run_that_never_stopped(name: str, run_of: dict[str, list[list[Any]]]) -> None:
    one = Run()
    one.build(name, GLOBAL_BATCH_SIZE, dp_rank=0, dp_world_size=1, num_workers=0)
    for step in range(STEPS):
        one.take(step)
        taken, expected = run_of[name][step], one.steps[name][step]
        if step == EPOCH - 1:  # the remainder: within the step, several samples of one shard come in any order
            taken, expected = sorted(taken), sorted(expected)
        assert taken == expected, step


def test_where_the_order_depends_on_the_topology_each_row_still_comes_once(run_of: dict[str, list[list[Any]]]) -> None:
    for name, steps in run_of.items():
        for epoch in (steps[:EPOCH], steps[EPOCH:]):
            rows = [row for step in epoch for row in step]
            assert len(rows) == len(set(rows)) == GLOBAL_BATCH_SIZE * len(epoch), name
