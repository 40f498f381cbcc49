"""Random chains of topologies on real ranks, through DCP, with workers too, endless or over ends that only reading tells.

Each goes on from a checkpoint, or behind what was delivered after one. Whatever else a trainer may do there, on ranks that
are threads: `tests.test_histories`.
"""

import itertools
import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import rescale_data as rd
from tests.distributed.ranks import run_ranks
from tests.distributed.segments import (
    ByRank,
    Data,
    Logged,
    Taken,
    check_exactly_once,
    global_batches,
    num_real,
    take,
    take_epoch,
    taken_from,
)
from tests.pipelines import Rows
from tests.promises import comparable
from tests.simulate import GlobalBatch
from tests.states import opened

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

RANKS, SEEDS = 4, range(24)
EPOCHS = {"packed": 130, "every": 200, "skewed": 300, "rows": 150}
ENDLESS = {"packed": 500, "kept": 300, "batched": 300, "mixed": 200, "rows": 300}
"""Kinds of pipelines, and about how many rows they have."""
SKEWED = Data("skewed", 300, 12, repeat=False)
WRONG = (0, 11)
"""A shard that ends first, in the main phase, and one that ends last, in a round of the remainder."""


class Segment(NamedTuple):
    """A topology, how many micro batches are taken in it, and how many of these after the state from which others go on."""

    w: int
    b: int
    o: int
    k: int
    micro_batches: int
    late: int


class Chain(NamedTuple):
    data: Data
    segments: list[Segment]
    aligned: bool


def chain_of(seed: int) -> Chain:
    """Every other one is aligned, keeps O, and saves at the end of a step: so nothing changes the order."""
    rng = random.Random(seed)
    aligned, repeat = seed % 2 == 0, seed % 3 == 0
    o = rng.choice([12, 24]) if aligned else 0
    n = o * rng.choice([1, 2]) if aligned else rng.choice([7, 12, 20])
    segments = []
    for _ in range(4):
        w, b, a = rng.randint(1, RANKS), rng.randint(1, 3), rng.randint(1, 2)
        if aligned:
            b = rng.choice([b for b in (1, 2, 3, 4, 6) if o % (w * b) == 0])
            a = o // (w * b)
        k = rng.choice([k for k in (0, 0, 0, 1, 2) if not (aligned and k) or n // o * a % k == 0])
        unit = a if aligned else 1
        num = rng.randint(0, 12 if aligned else 25)
        late = rng.choice([0, rng.randint(0, num)])
        segments.append(Segment(w, b, w * b * a, k, num * unit, late * unit))
    kind, num_rows = rng.choice(sorted((ENDLESS if repeat else EPOCHS).items()))
    data = Data(kind, num_rows + rng.randint(0, 9), n, repeat=repeat, tail=rng.choice(["drop", "pad"]))
    return Chain(data, segments, aligned)


class Played(NamedTuple):
    """What this rank took in each segment, the last of them to an epoch's end; epochs that have ended, samples dropped and
    repeated; and for each load whether steps are counted anew, and how often that was logged here."""

    segments: list[list[Taken]]
    epochs: int
    dropped: float
    padded: float
    loads: list[tuple[bool, int]]


def play(chain: Chain, groups: list[Any], folder: Path) -> Played:
    segments: list[list[Taken]] = []
    loads: list[tuple[bool, int]] = []
    state, told, epoch = None, {"dropped_samples": 0.0, "padded_samples": 0.0}, 0
    for number, segment in enumerate(chain.segments):
        segments.append([])
        if dist.get_rank() < segment.w:
            workers = {"num_workers": segment.k, "multiprocessing_context": "fork"}  # which import nothing anew
            loader = chain.data.loader(segment.o, segment.b, mesh=groups[segment.w], **workers)
            if number:
                before = chain.segments[number - 1]
                with Logged() as said:
                    if before.late:
                        loader.load_state_dict(state, delivered=before.late * before.w * before.b)
                    else:
                        dcp.load(
                            {"loader": loader}, checkpoint_id=folder / str(number), process_group=groups[segment.w]
                        )
                        anew = opened(loader.state_dict())["origin"] != opened(state)["origin"]
                        loads.append((anew, sum("global batches begin anew" in line for line in said)))
            if number == len(chain.segments) - 1:
                segments[-1] += (
                    take(loader, 6 * loader.gradient_accumulation_steps) if chain.data.repeat else take_epoch(loader)
                )
                told, epoch = loader.progress(), loader.epoch
            else:
                segments[-1] += take(loader, segment.micro_batches - segment.late)
                state = loader.state_dict()
                if not segment.late:
                    checkpoint = folder / str(number + 1)
                    dcp.save({"loader": loader}, checkpoint_id=checkpoint, process_group=groups[segment.w])
                segments[-1] += take(loader, segment.late)
            loader.close()
        box = [state]
        dist.broadcast_object_list(box)
        (state,) = box
    return Played(segments, epoch, told["dropped_samples"], told["padded_samples"], loads)


def with_faults() -> tuple[list[Taken], list[Taken]]:
    """Two epochs in which reads of the last rank fail now and then, once each, and are asked for again; and without."""
    whole, loader = SKEWED.loader(12, 1, verify=True), SKEWED.loader(12, 1, verify=True, timeout=60, prefetch=1)
    expected = take_epoch(whole) + take_epoch(whole)
    real, fails, count = Rows.__getitem__, set(random.Random(3).sample(range(600), 60)), itertools.count()

    def row(self: Rows, index: int) -> Any:
        if next(count) in fails and dist.get_rank() == RANKS - 1:
            raise OSError("for a moment")
        return real(self, index)

    Rows.__getitem__ = row  # type: ignore[method-assign]
    taken: list[Taken] = []
    while loader.epoch < 2:
        try:
            for batch in loader:
                taken.append(taken_from(loader, loader.epoch, batch))
        except OSError:
            continue
        except RuntimeError as error:  # of another rank
            if "asked again" not in str(error):
                raise
    Rows.__getitem__ = real  # type: ignore[method-assign]
    return taken, expected


def with_a_row_left_out(shard: int) -> tuple[int, list[str]]:
    """From a state in which a row of one shard is left out, how many batches come before the error, which comes again."""
    first, loader = (SKEWED.loader(12, 1, verify=True, timeout=60, prefetch=ahead) for ahead in (0, 2))
    take(first, first.gradient_accumulation_steps)
    state = first.state_dict()
    opened(state)["shards"][next(key for key in opened(state)["shards"] if key.endswith("row"))][shard] += 1
    loader.load_state_dict(state)
    num, said = 0, list[str]()
    for _ in range(2):
        try:
            for _ in loader:
                num += 1
        except rd.DataStateError as error:
            said.append(str(error))
    return num, said


def on_ranks(folder: Path) -> dict[Any, Any]:
    groups = [None, *(dist.new_group(list(range(w))) for w in range(1, RANKS + 1))]
    found: dict[Any, Any] = {seed: play(chain_of(seed), groups, folder / str(seed)) for seed in SEEDS}
    return {**found, "faults": with_faults(), "wrong": [with_a_row_left_out(shard) for shard in WRONG]}


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    folder = tmp_path_factory.mktemp("rounds")
    return run_ranks(RANKS, folder, on_ranks, folder, forks=True)


@pytest.mark.parametrize("seed", SEEDS)
def test_every_sample_comes_once_and_the_batches_are_those_of_one_rank(played: list[Any], seed: int) -> None:
    chain, lead = chain_of(seed), played[0][seed]
    segments: list[ByRank] = [
        [rank[seed].segments[i] for rank in played[: segment.w]] for i, segment in enumerate(chain.segments)
    ]
    check_exactly_once(chain.data, *segments)
    found = sum(num_real(*segments, epoch=epoch) for epoch in range(lead.epochs))
    assert found + lead.dropped == sum(map(chain.data.num_samples, range(lead.epochs)))
    assert chain.data.tail == "drop" or not lead.dropped
    assert lead.padded == sum(len(t.samples) - t.num_real for ranks in segments for rank in ranks for t in rank)
    if chain.aligned:
        steps = [
            step
            for segment, ranks in zip(chain.segments, segments, strict=True)
            if ranks[0]
            for step in by_step(ranks, segment.o, chain.data.repeat)
        ]
        o = chain.segments[0].o
        assert steps == by_step([take(chain.data.loader(o, o), len(steps))], o, chain.data.repeat)


def test_a_load_says_once_where_steps_are_counted_anew(played: list[Any]) -> None:
    loads = [load for seed in SEEDS for load in played[0][seed].loads]
    assert all(anew == num_said for anew, num_said in loads)
    assert {anew for anew, _ in loads} == {False, True}
    assert not any(num_said for rank in played[1:] for seed in SEEDS for _, num_said in rank[seed].loads)


def test_reads_that_fail_once_on_one_rank_lose_nothing(played: list[Any]) -> None:
    for taken, expected in (rank["faults"] for rank in played):
        assert taken == expected


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_a_failed_proof_of_one_rank_is_an_error_of_all_before_the_same_batch(played: list[Any], number: int) -> None:
    found = [rank["wrong"][number] for rank in played]
    assert len({num for num, _ in found}) == 1
    assert [len(said) for _, said in found] == [2] * RANKS, "each time that it is asked for"
    owner = WRONG[number] * RANKS // 12
    assert ["lost or repeated" in said[0] for _, said in found] == [rank == owner for rank in range(RANKS)]


def by_step(ranks: ByRank, o: int, repeat: bool) -> list[Any]:
    """Global batches, real samples and others; at an epoch's end the order of several samples of one shard is left open."""
    marked = [
        [Taken(t.epoch, [(s, i < t.num_real) for i, s in enumerate(t.samples)], t.num_real) for t in rank]
        for rank in ranks
    ]
    return [comparable(GlobalBatch(rows, not repeat)) for rows in global_batches(marked, o)]
