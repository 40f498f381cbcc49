"""A rank of four is killed within a step: two go on at that step, one that was late comes back, and a new one joins."""

import multiprocessing
import os
import pickle
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import rescale_data as rd
from rescale_data.testing import full_state_dict
from tests.distributed.test_live_rescale import keep

GLOBAL_BATCH_SIZE, STEPS, KILLED, LATE, DIES, JOINS = 24, 15, 1, 3, 9, 12
RANKS = {0: [0, 1, 2, 3], DIES: [0, 2], DIES + 1: [0, 2, 3], JOINS: [0, 2, 3, 4]}
"""Processes in the order of their ranks, by the step from which on."""
NUMBERS = rd.DatasetSource(range(430), "numbers")
"""About eleven steps are left of the filter: an epoch's end is dealt in the step in which the rank dies, and ends after it."""
DOCUMENTS = {
    name: rd.DatasetSource([{"tokens": torch.arange(i, i + 1 + i * 7 % 13)} for i in range(160)], name)
    for name in ("web", "code")
}


def filtered(shard: rd.Shard) -> rd.BaseNode[Any]:
    return rd.Filter(rd.Reader(NUMBERS, shard), keep)


def packed(shard: rd.Shard) -> rd.BaseNode[Any]:
    sources = {name: rd.Reader(source, shard) for name, source in DOCUMENTS.items()}
    mixture = rd.WeightedSampler(sources, {"web": 2, "code": 1})
    return rd.Map(rd.TokenPacker(mixture, column="tokens", seq_len=16, eos_id=None), tokens_of)


def tokens_of(sample: dict[str, torch.Tensor]) -> torch.Tensor:
    return sample["tokens"]


CASES: dict[str, dict[str, Any]] = {
    "counted": {"pipeline": range(260)},
    "filtered": {"pipeline": filtered, "num_workers": 2, "multiprocessing_context": "fork"},
    "packed": {"pipeline": packed, "repeat": True},
    "not aligned": {"pipeline": packed, "repeat": True, "num_logical_shards": 50},
}


class Run:
    """All cases on one rank, step by step."""

    def __init__(self, micro_batch_size: int, only: str = "", **kwargs: Any) -> None:
        sizes = {"global_batch_size": GLOBAL_BATCH_SIZE, "num_logical_shards": 96, "micro_batch_size": micro_batch_size}
        self.loaders = {
            name: rd.DataLoader(**{**sizes, **case, **kwargs}) for name, case in CASES.items() if only in name
        }
        self.batches: dict[str, Iterator[Any]] = {name: iter(()) for name in self.loaders}
        self.steps: dict[str, dict[int, list[Any]]] = {name: {} for name in self.loaders}

    def take(self, step: int, dies: bool = False) -> None:
        for name, loader in self.loaders.items():
            assert loader.step == step
            self.steps[name][step] = []
            for _ in range(loader.gradient_accumulation_steps):
                self.steps[name][step] += self._next(name).tolist()
                if dies and name == list(self.loaders)[-1]:
                    os.kill(os.getpid(), signal.SIGKILL)

    def _next(self, name: str) -> Any:
        while (batch := next(self.batches[name], None)) is None:
            self.batches[name] = iter(self.loaders[name])
        return batch


def meet(port: int, step: int, me: int) -> int:
    """A new process group of those that live; the micro batch that fits it."""
    members, store = RANKS[step], dist.PrefixStore(str(step), dist.TCPStore("localhost", port, is_master=False))
    dist.init_process_group("gloo", store=store, rank=members.index(me), world_size=len(members))
    return 12 // len(members)


def commit() -> bool:
    """Whether the step is complete on all ranks, as an all-reduce of gradients tells."""
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError:
        return False
    return True


def rank(me: int, port: int, folder: Path) -> None:
    torch.set_num_threads(1)
    step = 0 if me in RANKS[0] else JOINS
    run, refused = Run(meet(port, step, me), join=step > 0), ""
    while step < STEPS:
        if step == 7:  # a checkpoint: from here on the rows of others are made again
            for loader in run.loaders.values():
                loader.state_dict()
        run.take(step, dies=me == KILLED and step == DIES)
        committed = commit()
        step += committed or me == LATE  # who is late has the others' model of a step later
        if committed and step not in (DIES + 1, JOINS):
            continue
        for loader in run.loaders.values():
            loader.close()  # forked workers hold the group's connections open, by whose end the others see that it is over
        dist.destroy_process_group()
        b = meet(port, step, me)
        if step == DIES:
            with pytest.raises(ValueError) as error:
                run.loaders["packed"].rescale(step=step - 1, micro_batch_size=b)
            refused = str(error.value)
        for loader in run.loaders.values():
            assert loader.rescale(step=step, micro_batch_size=b)
    for loader in run.loaders.values():
        loader.close()
    (folder / str(me)).write_bytes(pickle.dumps((run.steps, refused)))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    store, folder = (
        dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False),
        tmp_path_factory.mktemp("ranks"),
    )
    context = multiprocessing.get_context("forkserver")
    started = [context.Process(target=rank, args=(me, store.port, folder)) for me in range(5)]
    for process in started:
        process.start()
    deadline = time.monotonic() + 90
    for process in started:
        process.join(max(0, deadline - time.monotonic()))
    codes = [process.exitcode for process in started]
    for process in started:
        process.kill()
    assert codes == [0, -signal.SIGKILL, 0, 0, 0]
    return {me: pickle.loads((folder / str(me)).read_bytes()) for me in range(5) if me != KILLED}


def rows_of(name: str, ranks: dict[int, Any], step: int) -> list[Any]:
    """The global batch of a step that was committed, as far as those know that live."""
    members = RANKS[max(begin for begin in RANKS if begin <= step)]
    return [row for me in members if me != KILLED for row in ranks[me][0][name][step]]


@pytest.mark.parametrize("name", [name for name in CASES if name != "not aligned"])
def test_those_that_live_take_the_batches_of_a_run_that_never_stopped(name: str, ranks: dict[int, Any]) -> None:
    one = Run(GLOBAL_BATCH_SIZE, name, dp_rank=0, dp_world_size=1, num_workers=0)
    for step in range(STEPS):
        one.take(step)
        expected = one.steps[name][step]
        assert rows_of(name, ranks, step) == (expected if step >= DIES else expected[:6] + expected[12:])


def test_where_the_order_depends_on_the_topology_each_sample_still_comes_once(ranks: dict[int, Any]) -> None:
    """Against the same topologies without a death, whose ranks are simulated."""
    states: list[Any] = [None]
    for begin, members in RANKS.items():
        sizes = {"dp_world_size": len(members), "num_workers": 0}
        runs = [Run(12 // len(members), only="not aligned", dp_rank=r, **sizes) for r in range(len(members))]
        loaders = [run.loaders["not aligned"] for run in runs]
        for loader in loaders if states[-1] is not None else []:
            loader.load_state_dict(states[-1])
        for step in range(begin, min([later for later in RANKS if later > begin], default=STEPS)):
            for run, me in zip(runs, members, strict=True):
                run.take(step)
                assert me == KILLED or run.steps["not aligned"][step] == ranks[me][0]["not aligned"][step]
        states.append(full_state_dict(loaders))


def test_a_step_that_cannot_be_gone_back_to_is_refused_on_all(ranks: dict[int, Any]) -> None:
    for me in RANKS[DIES]:
        assert f"step={DIES - 1}: this rank has taken 0 micro batches of step {DIES + 1}" in ranks[me][1]


@pytest.mark.parametrize("kwargs", [{}, {"repeat": True, "steps_per_epoch": 2}])
def test_the_last_step_of_an_epoch_is_served_again_and_ends_it_again(kwargs: dict[str, Any]) -> None:
    loader = rd.DataLoader(range(10), global_batch_size=4, **kwargs)
    rows, dropped = [batch.tolist() for batch in loader], loader.progress()["dropped_samples"]
    assert (len(rows), loader.step, loader.epoch) == (2, 2, 1)
    assert loader.rescale(step=1)
    assert (loader.step, loader.epoch, loader.batches_left) == (1, 0, 1)
    assert [batch.tolist() for batch in loader] == rows[1:]
    assert (loader.step, loader.epoch, loader.progress()["dropped_samples"]) == (2, 1, dropped)
