"""Random chains of topologies on real ranks, with workers too, over epochs whose end only reading tells."""

import random
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist

from tests.distributed.ranks import run_ranks
from tests.distributed.segments import (
    ByRank,
    Data,
    Taken,
    check_exactly_once,
    global_batches,
    num_real,
    take,
    take_epoch,
)
from tests.promises import comparable
from tests.simulate import GlobalBatch

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

RANKS, SEEDS = 3, range(16)
KINDS = {"packed": 130, "every": 200, "skewed": 300}


class Segment(NamedTuple):
    w: int
    b: int
    o: int
    k: int
    micro_batches: int


class Chain(NamedTuple):
    data: Data
    segments: list[Segment]
    aligned: bool


def chain_of(seed: int) -> Chain:
    """Every other one is aligned, keeps O, and saves at the end of a step: so nothing changes the order."""
    rng = random.Random(seed)
    aligned = seed % 2 == 0
    o = rng.choice([6, 12]) if aligned else 0
    n = o * rng.choice([1, 2]) if aligned else rng.choice([7, 12, 20])
    segments = []
    for _ in range(4):
        w, b, a = rng.choice([1, 2, 3]), rng.randint(1, 3), rng.randint(1, 2)
        if aligned:
            b = rng.choice([b for b in (1, 2, 3, 4, 6) if o % (w * b) == 0])
            a = o // (w * b)
        k = rng.choice([k for k in (0, 0, 0, 1, 2) if not (aligned and k) or n // o * a % k == 0])
        steps = rng.randint(0, 12)
        segments.append(Segment(w, b, w * b * a, k, steps * a if aligned else rng.randint(0, 25)))
    kind = rng.choice(sorted(KINDS))
    data = Data(kind, KINDS[kind] + rng.randint(0, 9), n, repeat=False, tail=rng.choice(["drop", "pad"]))
    return Chain(data, segments, aligned)


def play(chain: Chain, groups: list[Any]) -> tuple[list[list[Taken]], int, float]:
    """What this rank took in each segment, the last of them to the end of an epoch; epochs that have ended, samples dropped."""
    segments: list[list[Taken]] = []
    state, dropped, epoch = None, 0.0, 0
    for segment in chain.segments:
        segments.append([])
        if dist.get_rank() < segment.w:
            workers = {"num_workers": segment.k, "multiprocessing_context": "fork"}  # which import nothing anew
            loader = chain.data.loader(segment.o, segment.b, mesh=groups[segment.w], **workers)
            if state is not None:
                loader.load_state_dict(state)
            segments[-1] += (
                take(loader, segment.micro_batches) if len(segments) < len(chain.segments) else take_epoch(loader)
            )
            state, dropped, epoch = loader.state_dict(), loader.progress()["dropped_samples"], loader.epoch
            loader.close()
        box = [state, dropped, epoch]
        dist.broadcast_object_list(box)
        state, dropped, epoch = box
    return segments, epoch, dropped


def on_ranks(seeds: range) -> list[Any]:
    groups = [None, *(dist.new_group(list(range(w))) for w in range(1, RANKS + 1))]
    return [play(chain_of(seed), groups) for seed in seeds]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    return run_ranks(RANKS, tmp_path_factory.mktemp("rounds"), on_ranks, SEEDS, forks=True)


@pytest.mark.parametrize("seed", SEEDS)
def test_every_sample_comes_once_and_the_batches_are_those_of_one_rank(played: list[list[Any]], seed: int) -> None:
    chain, (_, epochs, dropped) = chain_of(seed), played[0][seed]
    segments: list[ByRank] = [
        [rank[seed][0][i] for rank in played[: segment.w]] for i, segment in enumerate(chain.segments)
    ]
    check_exactly_once(chain.data, *(segment for segment in segments))
    found = sum(num_real(*segments, epoch=epoch) for epoch in range(epochs))
    assert found + dropped == sum(map(chain.data.num_samples, range(epochs)))
    assert chain.data.tail == "drop" or not dropped
    if chain.aligned:
        steps = [
            step
            for segment, ranks in zip(chain.segments, segments, strict=True)
            if ranks[0]
            for step in by_step(ranks, segment.o)
        ]
        o = chain.segments[0].o
        alone = chain.data.loader(o, o)
        assert steps == by_step([take(alone, len(steps))], o)


def by_step(ranks: ByRank, o: int) -> list[Any]:
    """Global batches, real samples and others; of several samples of one shard, their order is left open (see `Remainder`)."""
    marked = [
        [Taken(t.epoch, [(s, i < t.num_real) for i, s in enumerate(t.samples)], t.num_real) for t in rank]
        for rank in ranks
    ]
    return [comparable(GlobalBatch(rows, True)) for rows in global_batches(marked, o)]
