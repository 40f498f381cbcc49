"""Checkpoints of an older commit load by plain `dcp.load`, and go on with the batch that came next."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp

import rescale_data as rd

FOLDER = Path(__file__).parent / "data" / "28e1744"
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def rows(first: int, count: int) -> list[dict[str, int]]:
    return [{"row": row} for row in range(first, first + count)]


def mixture(shard: rd.Shard) -> rd.BaseNode[Any]:
    parts = {"a": rows(0, 60), "b": rows(100, 40)}
    nodes = {name: rd.Reader(rd.DatasetSource(part, name=name), shard) for name, part in parts.items()}
    return rd.WeightedSampler(nodes, {"a": 2, "b": 1}, stop="all")


def test_a_mixture_is_refused_with_the_cure() -> None:
    """Its order has changed since."""
    with pytest.raises(rd.DataStateError, match=r"a mixture of an older rescale_data.*or begin a new one"):
        rd.check_checkpoint(FOLDER / "mixture", loader_of("mixture"))


def loader_of(name: str, **arguments: Any) -> rd.DataLoader:
    pipeline = mixture if name == "mixture" else rd.DatasetSource(rows(0, 101), name="rows")
    topology = {"global_batch_size": 4, "micro_batch_size": 2, "num_logical_shards": 12, "seed": 1}
    return rd.DataLoader(pipeline, **{**topology, **arguments})


TAKEN = {"plain": 11, "deal": 49, "after_the_last_batch": 50}
"""Micro batches before the save; of 101 rows an epoch has 50 of them, and the last 2 are dealt."""


@pytest.mark.parametrize("name", TAKEN)
def test_it_loads_and_goes_on(name: str) -> None:
    whole = loader_of(name)
    taken = [batch["row"].tolist() for batch in itertools.chain(whole, whole)]
    loader = loader_of(name)
    rd.check_checkpoint(FOLDER / name, loader)
    dcp.load({"loader": loader}, checkpoint_id=FOLDER / name)
    assert loader.step == TAKEN[name] // 2
    assert loader.epoch == TAKEN[name] // 50, "a state after the last batch was the beginning of the next epoch"
    state = loader.state_dict()
    assert (state["version"], state["step"]) == (2, loader.step)
    again = [batch["row"].tolist() for batch in loader]
    if loader.epoch == 1:
        again += [batch["row"].tolist() for batch in loader]
    assert again == taken[TAKEN[name] :]


@pytest.mark.parametrize("name", TAKEN)
def test_it_loads_on_another_topology_in_the_sharded_form(name: str) -> None:
    loader = loader_of(name, global_batch_size=6, micro_batch_size=6)
    dcp.load({"loader": loader.sharded}, checkpoint_id=FOLDER / name)
    loader.skip(6)
    assert loader.step == TAKEN[name] // 2 + 1


def test_what_a_state_says_of_its_rows_is_pinned() -> None:
    """In numbers: a formula that the writer and the check share could change in both."""
    loader = loader_of("plain")
    for _ in zip(range(11), loader, strict=False):
        pass
    state = loader.state_dict()
    assert state["shards"]["stamp"].tolist() == [-265 - shard for shard in range(12)]
    loader_of("plain").load_state_dict(state)
    assert {key: state[key] for key in ("samples", "origin", "step", "epoch", "version")} == {
        "samples": 22, "origin": 0, "step": 5, "epoch": 0, "version": 2,
    }  # fmt: skip
    assert list(state["shards"]) == ["stamp", "samples", "dealt", "epoch", "row", "skipped"]
