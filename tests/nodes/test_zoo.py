"""Every pipeline goes on from every position of its stream. That it rescales: `tests.test_histories`."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torchdata import nodes
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

import rescale_data as rd
from rescale_data.nodes.base import as_node
from tests.nodes.resume import assert_resumes, plain
from tests.nodes.zoo import ENDLESS, FEW, PIPELINES, STOCK, Counting, Ids


class Turning(Ids):
    """A sampler with epochs that keeps its own place."""

    def __init__(self, shard: rd.Shard) -> None:
        super().__init__(shard)
        self.at, self.is_loaded = 0, False

    def __iter__(self) -> Iterator[int]:
        self.at, self.is_loaded = self.at if self.is_loaded else 0, False
        return self._rest(list(super().__iter__()))

    def _rest(self, ids: list[int]) -> Iterator[int]:
        while self.at < len(ids):
            self.at += 1
            yield ids[self.at - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.epoch, self.is_loaded = state["at"], state["epoch"], True


def _turning(shard: rd.Shard) -> nodes.BaseNode[Any]:
    sources = {"a": nodes.SamplerWrapper(Turning(shard)), "b": nodes.SamplerWrapper(Ids(shard))}
    where = {"rank": shard.index, "world_size": shard.num_logical_shards}
    return nodes.MultiNodeWeightedSampler(sources, {"a": 2.0, "b": 1.0}, "ALL_DATASETS_EXHAUSTED", **where)


CHAINED: dict[str, Callable[[rd.Shard], nodes.BaseNode[Any]]] = {
    "Unbatcher-Weighted": lambda shard: nodes.Unbatcher(
        nodes.Batcher(STOCK["Weighted-cycle"](shard), 3, drop_last=False)
    ),
    "Unbatcher-Unbatcher": lambda shard: nodes.Unbatcher(
        nodes.Unbatcher(nodes.Batcher(nodes.Batcher(STOCK["Weighted-all"](shard), 2), 2))
    ),
    "Unbatcher-IterableWrapper": lambda shard: nodes.Unbatcher(
        nodes.Batcher(nodes.IterableWrapper(Counting(shard)), 3)
    ),
    "Weighted-SamplerWrapper": _turning,
}
"""Where a torchdata node goes on writing in the state it was given, or begins an epoch that nobody has asked it for."""


@pytest.mark.parametrize("name", [*PIPELINES, *CHAINED])
@pytest.mark.parametrize("repeat", [False, True])
def test_resumes_at_every_position(name: str, repeat: bool) -> None:
    shard = rd.Shard(1, 6, seed=5, repeat=repeat)
    assert_resumes(lambda: as_node({**PIPELINES, **CHAINED}[name](shard)), num_samples=40)


@pytest.mark.parametrize("name", [name for name in PIPELINES if name not in (*ENDLESS, "Weighted-foreign")])
def test_under_loader_of_torchdata(name: str) -> None:
    """Epoch after epoch, and from every state, those at an end too, what our own contract says.

    Not torchdata's mixture over its `SamplerWrapper`, whose epoch torchdata itself does not always advance after a resume.
    """
    shard = rd.Shard(1, 4, seed=2)
    node = as_node(PIPELINES[name](shard))
    epochs = []
    for _ in range(3):
        epochs.append([plain(sample) for sample in node])
        node.reset(node.get_state())
    loader = nodes.Loader(PIPELINES[name](shard))
    for number, expected in enumerate(epochs):
        states = [(0, loader.state_dict())] if not number else []
        found = []
        for sample in loader:
            found.append(plain(sample))
            states.append((len(found), loader.state_dict()))
        assert found == expected
        states.append((len(found), loader.state_dict()))
        for drawn, state in states:
            resumed = nodes.Loader(PIPELINES[name](shard))
            resumed.load_state_dict(state)
            rest = [plain(sample) for sample in resumed]
            assert rest == (expected[drawn:] or epochs[number + 1] if number < 2 else rest)


class Twice(nodes.BaseNode[Any]):
    def __init__(self, shard: rd.Shard, rank: int, world_size: int) -> None:
        super().__init__()
        self.source, self.rank, self.world_size = STOCK["Mapper"](shard), rank, world_size

    def get_state(self) -> dict[str, Any]:
        return {"source": self.source.state_dict()}

    def next(self) -> Any:
        return next(self.source)


def _prefetcher(shard: rd.Shard) -> nodes.BaseNode[Any]:
    return nodes.Unbatcher(nodes.Batcher(nodes.Prefetcher(STOCK["Mapper"](shard), 2), 4))


REFUSED: dict[str, tuple[Callable[[rd.Shard], Any], str]] = {
    "prefetcher": (_prefetcher, "^Prefetcher owns threads .* Put it above rd.LogicalShards"),
    "threads": (
        lambda shard: nodes.ParallelMapper(STOCK["Mapper"](shard), id, num_workers=1),
        "^ParallelMapper owns thr",
    ),
    "prebatch": (lambda shard: nodes.ParallelMapper(STOCK["Mapper"](shard), id, 0, prebatch=2), "Leave prebatch out"),
    "generator": (lambda shard: nodes.IterableWrapper(i for i in range(9)), "a generator, which can be read once"),
    "random": (
        lambda shard: nodes.SamplerWrapper(torch.utils.data.RandomSampler(range(99))),
        "RandomSampler .* rd.Reader",
    ),
    "ranks": (lambda shard: Twice(shard, 1, 4), "Twice reads as rank 1 of 4, .* rank=shard.index"),
    "distributed": (
        lambda shard: nodes.SamplerWrapper(torch.utils.data.DistributedSampler(range(99), 2, 1)),
        "DistributedSampler reads as rank 1 of 2",
    ),
    "stateful distributed": (
        lambda shard: nodes.MapStyleWrapper(FEW.dataset, StatefulDistributedSampler(range(9), 3, shard.index)),
        "^The StatefulDistributedSampler of SamplerWrapper yields nothing in its second .* torch.utils.data.DistributedSampler",
    ),
    "nested": (
        lambda shard: nodes.MultiNodeWeightedSampler(
            {"a": STOCK["Weighted-all"](shard)}, {"a": 1.0}, rank=0, world_size=1
        ),
        "one of both with the products",
    ),
    "loader": (lambda shard: nodes.Loader(STOCK["Mapper"](shard)), "made of nodes, but it was given a Loader"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_rescale_is_refused_when_the_loader_is_built(name: str) -> None:
    pipeline, message = REFUSED[name]
    with pytest.raises(TypeError, match=message):
        rd.DataLoader(pipeline, global_batch_size=2, num_logical_shards=3)
