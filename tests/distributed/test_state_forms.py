"""A state can be kept by anybody: every form of it, from any moment of a run, on any ranks."""

import pickle
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torchdata.nodes import Loader, Prefetcher

import rescale_data as rd
from tests.distributed.ranks import run_ranks
from tests.distributed.segments import SEED, ByRank, Data, Taken, check_exactly_once, num_real, take, take_epoch
from tests.pipelines import data_for, pipeline_of, plain
from tests.simulate import same_state

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

O = 12  # noqa: E741
CASES = {
    "endless": Data("mixed", 200, 24),
    "endless, uneven": Data("rows", 200, 25),
    "epochs": Data("rows", 100, 24, repeat=False),
    "epochs that are read": Data("packed", 120, 12, repeat=False),
}
POINTS = (0, 1, 3, 5, -3, -1, 0)
"""Micro batches before a save, the negative ones from the epoch's end."""


class Saved(NamedTuple):
    before: list[Taken]
    whole: dict[str, Any]


def on_2_ranks(folder: Path) -> dict[str, list[Saved]]:
    return {name: [_save(data, point, folder / f"{name} {point}") for point in POINTS] for name, data in CASES.items()}


def _save(data: Data, point: int, folder: Path) -> Saved:
    loader = data.loader(O, 3)
    if point < 0:
        point += 6 if data.repeat else len(take_epoch(data.loader(O, 3)))
    before = take(loader, point)
    folder.mkdir(exist_ok=True)
    whole, local = loader.state_dict(), loader.local_state_dict()
    if dist.get_rank() == 0:
        torch.save(whole, folder / "pickled.pt")
    dcp.save({"loader": loader}, checkpoint_id=folder / "whole")
    again = data.loader(O, 3)
    dcp.load({"loader": again}, checkpoint_id=folder / "whole")
    assert same_state(again.state_dict(), whole)
    live = data.loader(O, 3)
    take(live, 1 + dist.get_rank())  # the ranks stand apart
    dcp.load({"loader": live}, checkpoint_id=folder / "whole")
    assert same_state(live.state_dict(), whole)
    assert take(live, 4) == take(again, 4)
    for state in (torch.load(folder / "pickled.pt", weights_only=True) if dist.get_rank() == 0 else whole, local):
        again = data.loader(O, 3)
        again.load_state_dict(state)
        assert same_state(again.state_dict(), whole)
    return Saved(before, whole)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, list[Saved]]]]:
    folder = tmp_path_factory.mktemp("forms")
    return folder, run_ranks(2, folder, on_2_ranks, folder)


@pytest.mark.parametrize("name", CASES)
def test_the_state_is_the_same_on_every_rank_in_every_form_and_loads_in_one_process(ranks: Any, name: str) -> None:
    folder, data = ranks[0], CASES[name]
    for point, saves in zip(POINTS, zip(*(rank[name] for rank in ranks[1]), strict=True), strict=True):
        assert same_state(saves[0].whole, saves[1].whole)
        assert type(saves[0].whole["table"]) is torch.Tensor
        before: ByRank = [saved.before for saved in saves]
        afters: list[list[Taken]] = []
        for form in ("pickled.pt", "whole"):
            alone, path = data.loader(O), folder / f"{name} {point}" / form
            if form == "pickled.pt":
                alone.load_state_dict(torch.load(path, weights_only=True))
            else:
                dcp.load({"loader": alone}, checkpoint_id=path)
            after = take(alone, 6) if data.repeat else take_epoch(alone)
            check_exactly_once(data, before, [after])
            afters.append(after)
            assert data.repeat or data.num_samples(0) - num_real(before, [after], epoch=0) < O
        assert afters[0] == afters[1]


def local_states() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, data in CASES.items():
        found[name] = _under_torchdata(data)
    loader = CASES["endless"].loader(O, 3)
    take(loader, 2)
    for way, keep in {"pickle": pickle.dumps, "torch.save": lambda state: torch.save(state, "/dev/null")}.items():
        with pytest.raises(TypeError) as refused:
            keep(loader.local_state_dict())
        found[way] = str(refused.value)
    return found


def _under_torchdata(data: Data) -> Any:
    """What is taken by a torchdata Loader after its state, made whole, was loaded: by this rank, and as it goes on."""

    def make() -> Loader[Any]:
        shards = rd.LogicalShards(
            pipeline_of(data.kind, data_for(data.kind, data.num_rows)),
            num_logical_shards=data.n,
            global_batch_size=O,
            micro_batch_size=3,
            seed=SEED,
            repeat=data.repeat,
        )
        return Loader(Prefetcher(shards, 2))

    loader = make()
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    local = loader.state_dict()
    expected = [[plain(sample) for sample in next(batches)] for _ in range(3)]
    whole = rd.whole_state(local)
    assert pickle.loads(pickle.dumps(whole)).keys() == whole.keys()
    again = make()
    again.load_state_dict(whole)
    batches = iter(again)
    assert [[plain(sample) for sample in next(batches)] for _ in range(3)] == expected
    return whole


def test_states_of_one_rank_are_made_whole_and_refuse_to_be_pickled(tmp_path: Path) -> None:
    found = run_ranks(2, tmp_path, local_states)
    for name in CASES:
        assert same_state(*(_state(rank[name]) for rank in found))
    for rank in found:
        assert "Keep loader.state_dict(), which is whole" in rank["pickle"]
        assert rank["torch.save"] == rank["pickle"]


def _state(nested: Any) -> dict[str, Any]:
    while "table" not in nested:
        (nested,) = [value for value in nested.values() if isinstance(value, dict)]
    return nested


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: rows[torch.arange(len(rows)) % (len(rows) // 2)], "are those of other logical shards"),
        (lambda rows: rows.flip(0), r"\(the first: row 0 is that of shard"),
        (lambda rows: rows.roll(1, 0), "kept for all, or rows changed places"),
    ],
)
def test_rows_of_another_rank_permuted_or_repeated_are_an_error(name: str, change: Any, message: str) -> None:
    loader = CASES[name].loader(O)
    take(loader, 3)
    state = loader.state_dict()
    state["table"] = change(state["table"])
    with pytest.raises(rd.DataStateError, match=message):
        CASES[name].loader(O).load_state_dict(state)
