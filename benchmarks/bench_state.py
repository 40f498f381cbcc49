"""What does it cost that the data order is state: to keep it, to save it, to send it from workers, and to resume from it?

    python benchmarks/bench_state.py [--quick] [--table]

Packed int64 batches [8, 4096] from shuffled Arrow files, as in bench_read.py. Whatever is compared takes turns, round after
round, so that a noisy machine is noisy for all; what state adds to a batch is measured in CPU time.
"""

from __future__ import annotations

import argparse
import logging
import pickle
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from bench_read import MICRO_BATCH, Corpus, machine, pipeline
from torch.utils.data import IterableDataset, default_collate, get_worker_info

import rescale_data as rd
from rescale_data.engine.feed import InProcessFeed
from rescale_data.engine.micro_batch import MicroBatch, TableUpdate
from rescale_data.engine.runner import Collate, ShardRunner
from rescale_data.engine.stream import Stream
from rescale_data.layout.batch_shards import AlignedBatchShards, BatchShards
from rescale_data.layout.layout import Layout
from rescale_data.nodes.batch_buffer import BatchBuffer
from rescale_data.sources.decoded.cache import cache

NUM_LOGICAL_SHARDS = 4 * MICRO_BATCH
MANY_LOGICAL_SHARDS = 4096
WORKERS = 2


@dataclass(frozen=True)
class Scale:
    files: int
    rounds: int
    warm_up: int  # batches, about an epoch
    turns: int  # of a round in one process, of 40 batches each
    worker_batches: int  # of a round with workers
    repeats: int  # of what takes milliseconds


FULL, QUICK = Scale(8, 21, 2000, 15, 1200, 101), Scale(2, 5, 500, 6, 300, 15)


@dataclass(frozen=True)
class Answer:
    """What one question came to, round by round."""

    question: str
    values: list[float]
    unit: str
    budget: float = float("inf")
    at_least: bool = False

    def __str__(self) -> str:
        middle = statistics.median(self.values)
        numbers = " ".join(f"{value:10.2f}" for value in (middle, min(self.values), max(self.values)))
        if self.budget == float("inf"):
            return f"{self.question:62} {numbers} {self.unit}"
        met = middle >= self.budget if self.at_least else middle <= self.budget
        bound = f"{'>=' if self.at_least else '<='} {self.budget:g}"
        return f"{self.question:62} {numbers} {self.unit:8} {bound:8} {'met' if met else 'MISSED'}"


def loader_of(source: rd.ArrowSource, **others: Any) -> rd.DataLoader:
    arguments = {"global_batch_size": MICRO_BATCH, "num_logical_shards": NUM_LOGICAL_SHARDS, "repeat": True, **others}
    return rd.DataLoader(partial(pipeline, source), **arguments)


# The state itself


def saving(scale: Scale) -> list[Answer]:
    """Beside a copy of the table, in turns."""
    return [answer for num_sources in (1, 60, 200) for answer in _saving(num_sources, scale.repeats // 3)]


def _saving(num_sources: int, rounds: int) -> list[Answer]:
    loader = mixture_of(num_sources)
    state, of = loader.state_dict(), f"{num_sources:3} sources: "
    works = {
        "np.copy of the table": loader._stream.table.copy,
        "state_dict()": loader.state_dict,
        "load_state_dict()": lambda: loader.load_state_dict(state),
    }
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            taken[name].append(_milliseconds(work))
    wall, cpu = ({name: [each[i] for each in times] for name, times in taken.items()} for i in (0, 1))
    copied = _ratios(cpu["state_dict()"], cpu["np.copy of the table"])
    num_bytes = state["table"].nbytes / MANY_LOGICAL_SHARDS / num_sources
    with tempfile.TemporaryDirectory() as folder:
        paths = (f"{folder}/{number}" for number in range(3))
        saved = [
            _milliseconds(partial(dcp.save, {"loader": state}, checkpoint_id=path, no_dist=True))[0] for path in paths
        ]
    budget, bound = {1: (1.0, float("inf")), 200: (float("inf"), 1.5)}.get(num_sources, (float("inf"), float("inf")))
    return [
        *(Answer(f"{of}{name}, CPU", cpu[name], "ms") for name in works if name != "state_dict()"),
        Answer(f"{of}state_dict() of {MANY_LOGICAL_SHARDS} logical shards, CPU", cpu["state_dict()"], "ms", budget),
        *(Answer(f"{of}{name}, wall", wall[name], "ms") for name in works),
        Answer(f"{of}state_dict() / np.copy, CPU", copied, "x", bound),
        Answer(f"{of}state of a logical shard and source", [num_bytes], "bytes", 64),
        Answer(f"{of}its dcp.save, wall", saved, "ms"),
        *_planning(of, state),
    ]


def mixture_of(num_sources: int) -> rd.DataLoader:
    sources = {f"source{i}": rd.SyntheticSource(4 * MANY_LOGICAL_SHARDS, length=8) for i in range(num_sources)}

    def pipeline(shard: rd.Shard) -> rd.BaseNode[Any]:
        readers = {name: rd.Reader(source, shard) for name, source in sources.items()}
        return rd.WeightedSampler(readers, dict.fromkeys(readers, 1.0)) if num_sources > 1 else readers["source0"]

    sizes = {"global_batch_size": 1024, "micro_batch_size": MICRO_BATCH, "num_logical_shards": MANY_LOGICAL_SHARDS}
    return rd.DataLoader(pipeline, repeat=True, **sizes)


def _planning(of: str, state: dict[str, Any]) -> list[Answer]:
    """The loader's part of the plans of 1,000 ranks, on the one that unpickles and merges them."""
    planner = dcp.DefaultSavePlanner()
    planner.set_up_planner({"loader": state}, is_coordinator=True)
    plan = planner.create_local_plan()
    pickled, started = pickle.dumps(plan), time.process_time()
    planner.create_global_plan([pickle.loads(pickled) for _ in range(1000)])
    seconds = time.process_time() - started
    return [
        Answer(f"{of}values of a plan", [len(plan.items)], "values"),
        Answer(f"{of}planning of 1,000 ranks, CPU", [seconds], "s", 1.0),
    ]


def _milliseconds(work: Callable[[], object]) -> tuple[float, float]:
    """Wall and CPU."""
    cpu, wall = time.process_time(), time.perf_counter()
    kept = work()
    times = (time.perf_counter() - wall) * 1e3, (time.process_time() - cpu) * 1e3
    del kept
    return times


# What it adds to a batch


def bare(source: rd.ArrowSource) -> Iterator[Any]:
    """The same pipelines, drawn in the same order into the same batches, in the shortest loop that does it."""
    layout = Layout(
        num_logical_shards=NUM_LOGICAL_SHARDS,
        global_batch_size=MICRO_BATCH,
        dp_world_size=1,
        micro_batch_size=MICRO_BATCH,
    )
    turns = [AlignedBatchShards(layout, 0).batch_shards(u).shards for u in range(layout.batch_period)]
    nodes: list[Any] = [pipeline(source, rd.Shard(i, NUM_LOGICAL_SHARDS, 0, True)) for i in range(NUM_LOGICAL_SHARDS)]
    for node in nodes:
        node.reset()
    while True:
        for shards in turns:
            buffer, drawn, place = (
                BatchBuffer(nodes[0].written_columns, MICRO_BATCH),
                [nodes[shard] for shard in shards],
                0,
            )
            while (place := nodes[0].write_many(drawn, buffer, place)) < MICRO_BATCH:
                drawn[place].write(buffer, place)
                place += 1
            yield buffer.batch()


_NO_ROWS = TableUpdate(slice(0), np.empty((0, 0), dtype=np.int64))


class ForgetfulRunner(ShardRunner):
    """Draws, and keeps no count of it in the table."""

    def load(self, *args: Any) -> None:
        super().load(*args)
        self._nodes: dict[int, list[Any]] = {}

    def make_micro_batch(self, batch_shards: BatchShards, collate: Collate | None) -> MicroBatch:
        nodes = self._nodes.get(batch_shards.shards[0])
        if nodes is None:
            nodes = self._nodes[batch_shards.shards[0]] = [
                self._active_nodes[shard] or self._activate_node(shard) for shard in batch_shards.shards
            ]
        batch = self._write_batch(nodes, batch_shards.shards)
        return MicroBatch(batch, _NO_ROWS, batch_shards.shards, len(nodes))


class ForgetfulStream(Stream):
    """Hands micro batches out, and neither commits their rows nor moves the clock."""

    def take(self) -> MicroBatch:
        made, queue = self.peek(), self._queue
        queue.micro_batches.clear()
        queue.next_batch -= 1
        return made


def forgetful(source: rd.ArrowSource) -> Iterator[Any]:
    """Our loader with what carries state cut out: what it delivers is right, what it would save is not."""
    loader = loader_of(source)
    setup = loader._stream.setup
    runner = ForgetfulRunner(setup.recipe, setup.schema)
    loader._own_stream = ForgetfulStream(replace(setup, runner=runner), InProcessFeed(runner, None))
    return iter(loader)


def carrying(folder: Path, scale: Scale) -> list[Answer]:
    """In turns of a few batches, because the rest of the machine slows down all that runs in the same moment; each with a
    source of its own, so that none finds in the cache what another has paid for."""
    contenders = {
        "loader": iter(loader_of(rd.ArrowSource(folder))),
        "forgetful": forgetful(rd.ArrowSource(folder)),
        "bare": bare(rd.ArrowSource(folder)),
        "verify": iter(loader_of(rd.ArrowSource(folder), verify=True)),
    }
    for batches in contenders.values():
        _cpu_microseconds(batches, scale.warm_up)
    rounds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(scale.rounds):
        times = dict.fromkeys(contenders, 0.0)
        for turn in range(scale.turns):
            names = list(contenders)
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                times[name] += _cpu_microseconds(contenders[name], 40) / scale.turns
        for name, value in times.items():
            rounds[name].append(value)
    loader = rounds["loader"]

    def share(other: str) -> list[float]:
        return [(a - b) / a * 100 for a, b in zip(loader, rounds[other], strict=True)]

    return [
        Answer("a batch of the loader, in process", loader, "us"),
        Answer("of it, what carries state: table, commit and clock", share("forgetful"), "%", 6.0),
        Answer("of it, all that is more than the shortest loop that draws", share("bare"), "%"),
        Answer("what verify=True adds to it", [-value for value in share("verify")], "%"),
    ]


def _cpu_microseconds(batches: Iterator[Any], num_batches: int) -> float:
    """Of a batch."""
    started = time.thread_time()
    for _ in range(num_batches):
        next(batches)
    return (time.thread_time() - started) / num_batches * 1e6


# What it adds to a message


class OneBatchAMessage(IterableDataset[Any]):
    """How one would carry state with torch's DataLoader: each batch comes with the state of its worker, as Python dicts."""

    def __init__(self, source: rd.ArrowSource, *, with_state: bool) -> None:
        self._source, self._with_state = source, with_state

    def __iter__(self) -> Iterator[tuple[Any, dict[int, Any]]]:
        worker = get_worker_info()
        index, count = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        num_blocks = NUM_LOGICAL_SHARDS // MICRO_BATCH
        blocks = [range(block, NUM_LOGICAL_SHARDS, num_blocks) for block in range(index, num_blocks, count)]
        nodes: dict[int, Any] = {
            i: pipeline(self._source, rd.Shard(i, NUM_LOGICAL_SHARDS, 0, True)) for block in blocks for i in block
        }
        for node in nodes.values():
            node.reset()
        while True:
            for block in blocks:
                batch = default_collate([nodes[shard].next() for shard in block])
                yield batch, {i: node.get_state() for i, node in nodes.items()} if self._with_state else {}


def one_batch_a_message(source: rd.ArrowSource, *, with_state: bool) -> Iterator[Any]:
    data = OneBatchAMessage(source, with_state=with_state)
    return iter(
        torch.utils.data.DataLoader(
            data, batch_size=None, num_workers=WORKERS, collate_fn=_as_it_is, multiprocessing_context="forkserver"
        )
    )


def _as_it_is(value: Any) -> Any:
    return value


def sending(source: rd.ArrowSource, scale: Scale) -> list[Answer]:
    with loader_of(source, num_workers=WORKERS) as loader:
        contenders = {
            "ours": (iter(loader), scale.worker_batches),
            "with state": (one_batch_a_message(source, with_state=True), scale.worker_batches // 4),
            "without": (one_batch_a_message(source, with_state=False), scale.worker_batches // 4),
        }
        rates: dict[str, list[float]] = {name: [] for name in contenders}
        for number in range(1 + scale.rounds // 2):
            for name, (batches, num_batches) in contenders.items():
                rate = _batches_a_second(batches, num_batches)
                if number:  # the first round starts the workers
                    rates[name].append(rate)
    ours = rates["ours"]
    return [
        Answer(f"batches from {WORKERS} workers", ours, "a second"),
        Answer("one a message, state as Python dicts", rates["with state"], "a second"),
        Answer("one a message, no state", rates["without"], "a second"),
        Answer(
            "ours / one a message, state as Python dicts", _ratios(ours, rates["with state"]), "x", 4.0, at_least=True
        ),
        Answer("ours / one a message, no state", _ratios(ours, rates["without"]), "x"),
    ]


def _batches_a_second(batches: Iterator[Any], num_batches: int) -> float:
    for _ in range(num_batches // 4):  # whatever was made ahead in the others' turn
        next(batches)
    started = time.perf_counter()
    for _ in range(num_batches):
        next(batches)
    return num_batches / (time.perf_counter() - started)


# Resuming


def resuming(source: rd.ArrowSource, corpus_tokens: int, scale: Scale) -> list[Answer]:
    epoch = corpus_tokens // 4096 // NUM_LOGICAL_SHARDS * NUM_LOGICAL_SHARDS
    states = {percent: _state_at(source, epoch * percent // 100) for percent in (1, 99)}
    times: dict[int, list[float]] = {percent: [] for percent in states}
    for number in range(scale.repeats):
        for percent in list(states)[:: 1 if number % 2 else -1]:
            times[percent].append(_milliseconds_to_first_batch(source, states[percent]))
    return [
        *(Answer(f"first batch after a resume at {percent} % of an epoch", times[percent], "ms") for percent in states),
        Answer("99 % / 1 %, of the medians", [statistics.median(times[99]) / statistics.median(times[1])], "x", 1.2),
    ]


def _state_at(source: rd.ArrowSource, num_samples: int) -> dict[str, Any]:
    loader = loader_of(source)
    loader.skip(num_samples // MICRO_BATCH * MICRO_BATCH)
    return loader.state_dict()


def _milliseconds_to_first_batch(source: rd.ArrowSource, state: dict[str, Any]) -> float:
    cache().clear()
    loader = loader_of(source)
    started = time.perf_counter()
    loader.load_state_dict(state)
    next(iter(loader))
    return (time.perf_counter() - started) * 1e3


def _ratios(above: list[float], below: list[float]) -> list[float]:
    return [a / b for a, b in zip(above, below, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--table", action="store_true", help="only the state itself, without a corpus")
    parser.add_argument("--quick", action="store_true", help="a small corpus and few rounds, to see that it runs")
    arguments = parser.parse_args()
    scale = QUICK if arguments.quick else FULL
    torch.set_num_threads(1)
    logging.getLogger("rescale_data").setLevel(logging.ERROR)  # thousands of logical shards in one process are meant
    print(machine())
    print(f"{'':62} {'median':>10} {'min':>10} {'max':>10} {'':8} budget")
    print(*saving(scale), sep="\n", flush=True)
    if arguments.table:
        return
    with tempfile.TemporaryDirectory() as folder:
        corpus = Corpus(Path(folder))
        corpus.write(scale.files)
        source = rd.ArrowSource(corpus.folder / "arrow")
        corpus_tokens = sum(path.stat().st_size for path in corpus.paths("flat")) // 2
        questions: list[Callable[[], list[Answer]]] = [
            lambda: carrying(corpus.folder / "arrow", scale),
            lambda: resuming(source, corpus_tokens, scale),
            lambda: sending(source, scale),
        ]
        for question in questions:
            print(*question(), sep="\n", flush=True)


if __name__ == "__main__":
    main()
