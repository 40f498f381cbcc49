"""What is promised of a run over a chain of topologies, as checks of what its ranks were given."""

import functools
import itertools
from collections import Counter
from typing import Any, NamedTuple, TypeAlias

import rescale_data as rd
from tests.pipelines import Rows, as_samples, data_for, pipeline_of, plain
from tests.simulate import GlobalBatch, Run, Topology, same_state
from tests.states import opened

Begin: TypeAlias = tuple[int, dict[str, Any] | None]
TOPOLOGY = ("global_batch_size", "dp_world_size", "micro_batch_size")


class Case(NamedTuple):
    """What is the same in all segments of a run."""

    kind: str
    num_rows: int
    n: int
    repeat: bool
    tail: str


def run_of(case: Case, data: Rows | None = None) -> Run:
    pipeline = pipeline_of(case.kind, data or data_for(case.kind, case.num_rows))

    def make(rank: int, topology: Topology) -> rd.DataLoader:
        sizes: Any = {"global_batch_size": topology.o, "micro_batch_size": topology.b, "num_logical_shards": case.n}
        workers: Any = {"num_workers": topology.k, "prefetch": None if topology.k else topology.ahead}
        how: Any = {"seed": 7, "repeat": case.repeat, "tail": case.tail, "collate_fn": as_samples}
        return rd.DataLoader(pipeline, **sizes, **workers, **how, dp_rank=rank, dp_world_size=topology.w)

    return Run(make)


@functools.cache
def epoch_of(kind: str, num_rows: int, n: int, shard: int, epoch: int) -> list[Any]:
    """What a shard yields in an epoch if nothing interrupts it."""
    node = pipeline_of(kind, data_for(kind, num_rows))(rd.Shard(shard, n, seed=7))
    for _ in range(epoch):
        list(node)
        node.reset(None)
    return [plain(sample) for sample in node]


def endless(kind: str, num_rows: int, n: int, shard: int, count: int) -> list[Any]:
    """The first samples of a shard's endless stream."""
    node, found = _endless(kind, num_rows, n, shard)
    silent = 0
    while len(found) < count and silent < 3:
        before = len(found)
        found += map(plain, itertools.islice(node, count - before))
        silent = silent + 1 if len(found) == before else 0
        if silent:
            node.reset(None)
    return found[:count]


@functools.cache
def _endless(kind: str, num_rows: int, n: int, shard: int) -> tuple[rd.BaseNode[Any], list[Any]]:
    return pipeline_of(kind, data_for(kind, num_rows))(rd.Shard(shard, n, seed=7, repeat=True)), []


def check_load(saved: dict[str, Any], loaded: dict[str, Any], topology: Topology) -> None:
    """The rule of `origin`, and that nothing else has changed."""
    saved, loaded = opened(saved), opened(loaded)
    now, was = (topology.o, topology.w, topology.b), tuple(saved[key] for key in TOPOLOGY)
    at_step = (saved["samples"] - saved["origin"]) % saved["global_batch_size"] == 0 and topology.o == was[0]
    if at_step or now == was or saved["samples"] == saved["origin"]:
        assert same_state(saved, loaded, besides=TOPOLOGY)
        return
    assert loaded["origin"] == loaded["samples"] == saved["samples"]
    saved["shards"]["remainder"].fill_(-1)
    assert same_state(saved, loaded, besides=(*TOPOLOGY, "origin", "in_step"))


def check_exactly_once(case: Case, run: Run) -> None:
    """R1, and R3 with it: `Run` asserts that all ranks end together."""
    for (epoch, shard), samples in run.delivered.items():
        if case.repeat:
            expected = endless(case.kind, case.num_rows, case.n, shard, len(samples))
        else:
            expected = epoch_of(case.kind, case.num_rows, case.n, shard, epoch)[: len(samples)]
        assert samples == expected, f"shard {shard} in epoch {epoch}"


def check_epochs(case: Case, run: Run) -> None:
    """Every sample of an epoch that has ended was delivered, or is counted as dropped."""
    for epoch in range(run.loaders[0].epoch):
        whole = [s for shard in range(case.n) for s in epoch_of(case.kind, case.num_rows, case.n, shard, epoch)]
        found = Counter(s for (e, _), samples in run.delivered.items() if e == epoch for s in samples)
        assert not found - Counter(whole)
        assert found.total() + run.dropped[epoch] == len(whole)
        assert case.tail == "drop" or run.dropped[epoch] == 0
        if case.kind == "rows" and case.tail == "pad":
            rows = Counter(dict(sample)["row"] for sample in found.elements())
            assert rows == Counter(range(case.num_rows))


def check_same_batches(case: Case, run: Run, o: int, begins: list[Begin]) -> None:
    """R2: from wherever the count of steps began, the global batches are those of one rank.

    Args:
        begins: The number of global batches before each beginning, and the state it began with.
    """
    ends = [*(begin for begin, _ in begins[1:]), len(run.global_batches)]
    for (begin, state), end in zip(begins, ends, strict=True):
        alone = run_of(case)
        alone.resume(Topology(1, o, o), state)
        alone.take(end - begin)
        assert [comparable(batch) for batch in run.global_batches[begin:end]] == [
            comparable(batch) for batch in alone.global_batches
        ]


def comparable(batch: GlobalBatch) -> Any:
    """A batch itself. In a remainder, several samples of one shard may change places (see test_remainder)."""
    shards = [dict(sample)["shard"] for sample, _ in batch.rows]
    if batch.has_remainder and len(set(shards)) < len(shards):
        return shards, sorted(batch.rows)
    return batch.rows
