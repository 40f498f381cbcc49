"""Runs that are saved by 4 or 5 ranks, go on from there on any number of them, and then on one without a process group."""

import functools
from pathlib import Path
from typing import NamedTuple

import pytest
import torch.distributed.checkpoint as dcp

import rescale_data as rd
from tests.distributed.ranks import run_ranks
from tests.distributed.segments import ByRank, Data, Logged, Taken, check_exactly_once, global_batches, take

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

MICRO_BATCH = {1: 12, 3: 4, 4: 3, 6: 2}
"""The largest of a segment, by its world size: other ones, so that segments differ in A too."""


class Case(NamedTuple):
    """Three segments: W ranks, any ranks, one rank without a process group.

    Args:
        w: Ranks of the first segment; 0 for a single one without a process group.
        micro_batches: That each of them takes before the save.
        second_o: O of the second segment.
        aligned: Whether the second segment keeps the order.
    """

    data: Data
    w: int
    micro_batches: int
    b: int = 3
    o: int = 24
    second_o: int = 24
    second_steps: int = 3
    aligned: bool = True

    @property
    def samples(self) -> int:
        """At the first save."""
        return self.micro_batches * self.b * max(self.w, 1)

    @property
    def keeps_steps(self) -> bool:
        return self.samples % self.o == 0 and self.second_o == self.o

    def second_b(self, w: int) -> int:
        return max(b for b in range(1, MICRO_BATCH[w] + 1) if self.second_o % (w * b) == 0)


EPOCH = Data("rows", 282, 96, repeat=False)
"""Main phase: 8 steps of 24. Then 90 of 96 shards have a sample left: 3 steps, and 18 samples that fill no global batch."""

CASES = {
    "step": Case(Data("packed", 500, 96), 4, 6),
    "before the first batch": Case(Data("rows", 500, 96), 4, 0),
    "in mid-step": Case(Data("every", 500, 96), 4, 5),
    "another global batch": Case(Data("rows", 500, 96), 4, 4, second_o=48, second_steps=2),
    "another global batch in mid-step": Case(Data("rows", 500, 48), 4, 3, second_o=96, second_steps=2),
    "without a group": Case(Data("kept", 500, 96), 0, 4, b=12),
    "uneven": Case(Data("kept", 90, 10), 4, 5, aligned=False),
    "no row by the chunk rule": Case(Data("batched", 200, 12), 5, 3, b=4, o=60, aligned=False),
    "in the tail": Case(Data("rows", 282, 96, repeat=False, tail="pad"), 4, 18, second_steps=5),
    "in mid-step of the tail": Case(EPOCH, 4, 19, second_steps=5, aligned=False),
    "at the end of an epoch": Case(EPOCH, 4, 22),
}
RESCALED = (1, 3, 6)
"""One rank, fewer, and more: 3 and 6 neither divide 4 nor are divided by it. `tests.test_chains` simulates the others."""


def load(case: Case, name: str, checkpoint: Path, o: int, b: int) -> rd.DataLoader:
    loader = case.data.loader(o, b)
    dcp.load({name: loader}, checkpoint_id=checkpoint)
    return loader


def first_segments(names: list[str], folder: Path) -> list[list[Taken]]:
    loaders = {name: CASES[name].data.loader(CASES[name].o, CASES[name].b) for name in names}
    taken = [take(loader, CASES[name].micro_batches) for name, loader in loaders.items()]
    dcp.save(loaders, checkpoint_id=folder / f"first{CASES[names[0]].w}")
    return taken


class Second(NamedTuple):
    """What one rank saw in the second segment of a case."""

    step: int
    taken: list[Taken]


def second_segments(w: int, folder: Path) -> tuple[dict[str, Second], list[str]]:
    loaders = {name: case.data.loader(case.second_o, case.second_b(w)) for name, case in CASES.items()}
    with Logged() as warnings:
        for first_w in {case.w for case in CASES.values()}:
            saved = {name: loader for name, loader in loaders.items() if CASES[name].w == first_w}
            dcp.load(saved, checkpoint_id=folder / f"first{first_w}")
    seen = {name: _second_segment(CASES[name], loader) for name, loader in loaders.items()}
    dcp.save(loaders, checkpoint_id=folder / f"second{w}")
    return seen, warnings


def _second_segment(case: Case, loader: rd.DataLoader) -> Second:
    return Second(loader.step, take(loader, case.second_steps * loader.gradient_accumulation_steps))


class Run:
    """All cases with a second segment of W ranks."""

    def __init__(self, w: int, folder: Path, first: dict[str, ByRank]) -> None:
        self.w, self.folder, self.first = w, folder, first
        ranks = run_ranks(w, folder, second_segments, w, folder)
        self.warnings = [warnings for _, warnings in ranks]
        self.second = {name: [seen[name].taken for seen, _ in ranks] for name in CASES}
        self.steps = {name: {seen[name].step for seen, _ in ranks} for name in CASES}

    @functools.cache  # noqa: B019
    def third(self, name: str) -> ByRank:
        """Two more steps, in this process and with the first global batch."""
        o = CASES[name].o
        return [take(load(CASES[name], name, self.folder / f"second{self.w}", o, o), 2)]


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, ByRank]]:
    """The folder of all checkpoints, and what was taken before them."""
    folder = tmp_path_factory.mktemp("segments")
    found: dict[str, ByRank] = {}
    for w in {case.w for case in CASES.values()}:
        names = [name for name, case in CASES.items() if case.w == w]
        ranks = run_ranks(w, folder, first_segments, names, folder) if w else [first_segments(names, folder)]
        found |= dict(zip(names, map(list, zip(*ranks, strict=True)), strict=True))
    return folder, found


@pytest.fixture(scope="module")
def run(first: tuple[Path, dict[str, ByRank]], request: pytest.FixtureRequest) -> Run:
    return Run(request.param, *first)


on_any_ranks = pytest.mark.parametrize("run", RESCALED, indirect=True, ids=lambda w: f"W={w}")
on_any_and_the_same_ranks = pytest.mark.parametrize("run", [4, *RESCALED], indirect=True, ids=lambda w: f"W={w}")


@on_any_and_the_same_ranks
@pytest.mark.parametrize("name", CASES)
def test_nothing_is_lost_or_repeated(run: Run, name: str) -> None:
    check_exactly_once(CASES[name].data, run.first[name], run.second[name], run.third(name))


@on_any_ranks
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.aligned])
def test_global_batches_are_those_of_one_rank(run: Run, name: str) -> None:
    """Which goes on from the same checkpoint, and, where that was saved at a step, from the beginning of the run."""
    case = CASES[name]
    alone = load(case, name, run.folder / f"first{case.w}", case.second_o, case.second_o)
    found = global_batches(run.second[name], case.second_o)
    assert found == global_batches([take(alone, case.second_steps)], case.second_o)
    if case.keeps_steps:
        steps = case.samples // case.o
        uninterrupted = take(case.data.loader(case.o, case.o), steps + case.second_steps + 2)
        assert found + global_batches(run.third(name), case.o) == global_batches([uninterrupted[steps:]], case.o)


@pytest.mark.parametrize("run", [4], indirect=True, ids=["W=4"])
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.w == 4 and case.second_o == case.o])
def test_the_same_topology_resumes_exactly(run: Run, name: str) -> None:
    """In mid-step, in the tail, and where the order depends on the topology."""
    case = CASES[name]
    for rank, taken in enumerate(run.second[name]):
        uninterrupted = case.data.loader(case.o, case.b, dp_rank=rank, dp_world_size=4)
        assert run.first[name][rank] + taken == take(uninterrupted, case.micro_batches + len(taken))
    assert not any(run.warnings[1:])


@on_any_ranks
def test_a_load_says_once_where_steps_are_counted_anew(run: Run) -> None:
    anew = [case for case in CASES.values() if case.samples and not case.keeps_steps]
    assert len(run.warnings[0]) == len(anew)
    assert all("global batches begin anew at sample" in said for said in run.warnings[0])
    assert not any(run.warnings[1:])
    assert run.steps == {name: {case.samples // case.o} for name, case in CASES.items()}
