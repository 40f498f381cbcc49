"""The end of an epoch where nobody knows beforehand how many samples it has: ranks agree, and all of them end together.

That batches are those of one rank, and that a save goes on with other ranks, is tested in `test_rounds`.
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
from tests.distributed.segments import ByRank, Data, Taken, check_exactly_once, num_real, take, take_epoch
from tests.pipelines import Rows, plain
from tests.states import opened

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

WRONG = (0, 11)
"""A shard that ends first, in the main phase, and one that ends last, in a round of the remainder."""


class Case(NamedTuple):
    data: Data
    o: int
    num_workers: int = 0

    @property
    def b(self) -> int:
        """At W = 2 and at W = 3 several micro batches make a step."""
        return 2


CASES = {
    "packed, drop, 12 shards": Case(Data("packed", 120, 12, repeat=False), 12),
    "kept, pad, 12 shards": Case(Data("kept", 90, 12, repeat=False, tail="pad"), 12),
    "every, pad, 7 shards": Case(Data("every", 90, 7, repeat=False, tail="pad"), 12),
    "packed, worker": Case(Data("packed", 120, 12, repeat=False), 12, num_workers=1),
}


class Seen(NamedTuple):
    """What a rank took.

    Args:
        epochs: Two whole epochs, one after the other.
        saves: What it took before a save, and after it from the checkpoint to the end of the next epoch.
        dropped, padded: Samples after the two epochs.
    """

    epochs: list[Taken]
    saves: dict[int, tuple[list[Taken], list[Taken]]]
    dropped: float
    padded: float


def on_ranks(folder: Path) -> dict[str, Seen]:
    seen = {name: _run(case, folder / name) for name, case in CASES.items()}
    return {**seen, "ramp": _ramp(), "faults": _faults(), **{f"wrong shard {shard}": _wrong(shard) for shard in WRONG}}


def _faults() -> Seen:
    """Two epochs in which reads of the last rank fail now and then, once each, and are asked for again; and without."""
    data = Data("skewed", 300, 12, repeat=False)
    whole, loader = data.loader(12, 2, verify=True), data.loader(12, 2, verify=True, timeout=60, prefetch=1)
    expected = take_epoch(whole) + take_epoch(whole)
    real, fails, count = Rows.__getitem__, set(random.Random(3).sample(range(600), 60)), itertools.count()

    def row(self: Rows, index: int) -> Any:
        if next(count) in fails and dist.get_rank() == dist.get_world_size() - 1:
            raise OSError("for a moment")
        return real(self, index)

    Rows.__getitem__ = row  # type: ignore[method-assign]
    taken: list[Taken] = []
    while loader.epoch < 2:
        try:
            for batch in loader:
                taken.append(
                    Taken(loader.epoch, [plain(sample) for sample in batch["samples"]], loader.last_batch_samples)
                )
        except OSError:
            continue
        except RuntimeError as error:  # of another rank
            if "asked again" not in str(error):
                raise
    Rows.__getitem__ = real  # type: ignore[method-assign]
    return Seen(taken, {0: (expected, [])}, 0, 0)


def _wrong(shard: int) -> Seen:
    """From a state in which a row of one shard is left out, to the error; and the same again, asked for once more."""
    data = Data("skewed", 300, 12, repeat=False)
    first, loader = (data.loader(12, 2, verify=True, timeout=60, prefetch=ahead) for ahead in (0, 2))
    take(first, first.gradient_accumulation_steps)
    state = first.state_dict()
    opened(state)["shards"][next(key for key in opened(state)["shards"] if key.endswith("row"))][shard] += 1
    loader.load_state_dict(state)
    taken, said = [], []
    for _ in range(2):
        try:
            for batch in loader:
                taken.append(Taken(loader.epoch, [plain(sample) for sample in batch["samples"]], 2))
        except rd.DataStateError as error:
            said.append(str(error))
    return Seen(taken, {}, *map(float, (len(said), "lost or repeated" in said[0])))


def _ramp() -> Seen:
    """An epoch of which nobody knows the end, with a larger global batch from some step on: live, and from a state."""
    live, again = (Data("packed", 120, 12, repeat=False).loader(12, 2) for _ in range(2))
    before = take(live, 2 * live.gradient_accumulation_steps)
    again.load_state_dict(live.state_dict())
    for loader in (live, again):
        loader.reopen(global_batch_size=24)
    return Seen(take_epoch(live), {0: (before, take_epoch(again))}, 0, 0)


def _run(case: Case, folder: Path) -> Seen:
    num_workers = case.num_workers if dist.get_world_size() == 2 else 0  # each imports torch, which takes seconds
    with case.data.loader(case.o, case.b, num_workers=num_workers) as loader:
        epochs = take_epoch(loader)
        in_first = len(epochs)
        epochs += take_epoch(loader)
        assert loader.epoch == 2
        progress = loader.progress()
    points = [] if case.num_workers else [in_first - 4, in_first - 1, in_first]
    saves = {point: _save_and_resume(case, point, folder / str(point)) for point in points}
    return Seen(epochs, saves, progress["dropped_samples"], progress["padded_samples"])


def _save_and_resume(case: Case, point: int, folder: Path) -> tuple[list[Taken], list[Taken]]:
    loader = case.data.loader(case.o, case.b)
    before = take(loader, point)
    dcp.save({"loader": loader}, checkpoint_id=folder)
    again = case.data.loader(case.o, case.b, prefetch=3)
    dcp.load({"loader": again}, checkpoint_id=folder)
    after: list[Taken] = []
    while again.epoch < 2:
        after += take_epoch(again)
    return before, after


@pytest.fixture(scope="module", params=[2, 3], ids=lambda w: f"W={w}")
def ranks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[dict[str, Seen]]]:
    folder = tmp_path_factory.mktemp("epochs")
    return folder, run_ranks(request.param, folder, on_ranks, folder)


def of(ranks: Any, name: str) -> list[Seen]:
    return [rank[name] for rank in ranks[1]]


in_all_cases = pytest.mark.parametrize("name", CASES)
in_process = pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.num_workers])


@in_all_cases
def test_two_epochs_end_on_all_ranks_at_once_and_every_sample_is_accounted_for(ranks: Any, name: str) -> None:
    case, seen = CASES[name], of(ranks, name)
    taken: ByRank = [rank.epochs for rank in seen]
    check_exactly_once(case.data, taken)  # micro batch by micro batch, in the same epoch on all ranks
    left_out = 0
    for epoch in (0, 1):
        left_out += case.data.num_samples(epoch) - num_real(taken, epoch=epoch)
    assert {(rank.dropped, rank.padded) for rank in seen} == {(float(left_out), float(_num_fills(taken)))}
    assert left_out < 2 * case.o
    assert case.data.tail == "drop" or not left_out
    assert len(taken[0]) * case.b * len(taken) % case.o == 0


@in_process
def test_a_save_near_the_end_resumes_exactly(ranks: Any, name: str) -> None:
    """In the tail, in mid-step, and after the last micro batch."""
    for rank in of(ranks, name):
        for before, after in rank.saves.values():
            assert before + after == rank.epochs


def _num_fills(ranks: ByRank) -> int:
    return sum(len(taken.samples) - taken.num_real for rank in ranks for taken in rank)


def test_a_ramp_within_an_epoch_is_a_save_and_a_load(ranks: Any) -> None:
    seen = of(ranks, "ramp")
    assert [rank.epochs for rank in seen] == [rank.saves[0][1] for rank in seen]
    check_exactly_once(
        CASES["packed, drop, 12 shards"].data, [rank.saves[0][0] for rank in seen], [r.epochs for r in seen]
    )
    assert len(seen[0].epochs) * 2 * len(seen) % 24 == 0 < len(seen[0].epochs)


@pytest.mark.parametrize("shard", WRONG)
def test_a_failed_proof_of_one_rank_is_an_error_of_all_before_the_same_batch(ranks: Any, shard: int) -> None:
    seen = of(ranks, f"wrong shard {shard}")
    assert len({len(rank.epochs) for rank in seen}) == 1
    assert [rank.dropped for rank in seen] == [2.0] * len(seen), "each time that it is asked for"
    owner = shard * len(seen) // 12
    assert [rank.padded for rank in seen] == [float(rank == owner) for rank in range(len(seen))]


def test_reads_that_fail_once_on_one_rank_lose_nothing(ranks: Any) -> None:
    for rank in of(ranks, "faults"):
        assert rank.epochs == rank.saves[0][0]
