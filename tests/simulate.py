"""A training run over a chain of topologies, with all ranks of each in one process."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import rescale_data as rd
from rescale_data.engine.states.codec import has_remainder
from rescale_data.testing import full_state_dict
from tests.pipelines import plain
from tests.states import opened


class Topology(NamedTuple):
    """W, b, O, K, and micro batches that a thread is ahead."""

    w: int
    b: int
    o: int
    k: int = 0
    ahead: int = 0


class GlobalBatch(NamedTuple):
    """Rows in rank order, each a sample and whether it is real; and whether they are of the remainder of an epoch."""

    rows: list[tuple[Any, bool]]
    has_remainder: bool


MakeLoader = Callable[[int, Topology], rd.DataLoader]


class Run:
    """What a run is given: by shard in the order of time, and as global batches with their rows in rank order.

    Every micro batch is taken on all ranks, and all ranks must end an epoch together.

    Args:
        make: ``(dp_rank, topology) -> DataLoader`` whose batches are `pipelines.as_samples`.
    """

    def __init__(self, make: MakeLoader) -> None:
        self._make = make
        self.loaders: list[rd.DataLoader] = []
        self.delivered: dict[tuple[int, int], list[Any]] = defaultdict(list)  # (epoch, shard) -> samples
        self.global_batches: list[GlobalBatch] = []
        self.dropped: dict[int, int] = defaultdict(int)  # by epoch
        self._open: list[list[Any]] = []

    def resume(self, topology: Topology, state: dict[str, Any] | None = None) -> None:
        """Build the loaders of a topology, and load a state into them."""
        self.loaders = [self._make(rank, topology) for rank in range(topology.w)]
        for loader in self.loaders if state is not None else []:
            loader.load_state_dict(state)
        self.loaded = self.save()
        if not any(self._open) or state is None or opened(self.loaded)["origin"] != opened(state)["origin"]:
            self._open = [[] for _ in self.loaders]
        self.iterate()

    def iterate(self) -> None:
        before = self._lead.epoch, self._lead.progress()["dropped_samples"]
        self.iterators = [iter(loader) for loader in self.loaders]
        self._count_dropped(*before)

    def save(self) -> dict[str, Any]:
        return full_state_dict(self.loaders)

    def take(self, num_micro_batches: int) -> None:
        for _ in range(num_micro_batches):
            batches = self._next()
            if batches is None:
                self.iterate()
                batches = self._next()
            assert batches is not None

    def take_epoch(self) -> None:
        """To the end of the epoch."""
        while self._next() is not None:
            pass

    @property
    def _lead(self) -> rd.DataLoader:
        return self.loaders[0]

    def _next(self) -> list[Any] | None:
        epoch, dropped = self._lead.epoch, self._lead.progress()["dropped_samples"]
        in_remainder = has_remainder(self._lead._stream.table)
        batches = [next(iterator, None) for iterator in self.iterators]
        assert len({batch is None for batch in batches}) == 1, "the ranks end an epoch at different micro batches"
        if batches[0] is None:
            return None
        for rank, (loader, batch) in enumerate(zip(self.loaders, batches, strict=True)):
            self._record(epoch, rank, loader, batch)
        if len(self._open[0]) == len(batches[0]["samples"]) * self._lead.gradient_accumulation_steps:
            self.global_batches.append(GlobalBatch([row for rank in self._open for row in rank], in_remainder))
            self._open = [[] for _ in self.loaders]
        self._count_dropped(epoch, dropped)
        return batches

    def _record(self, epoch: int, rank: int, loader: rd.DataLoader, batch: Any) -> None:
        samples = batch["samples"]
        valid = batch["valid"].tolist() if "valid" in batch else [True] * len(samples)
        assert loader.last_batch_samples == sum(valid)
        for sample, is_real in zip(map(plain, samples), valid, strict=True):
            shard = dict(sample)["shard"]
            if is_real:
                self.delivered[epoch, shard].append(sample)
            self._open[rank].append((sample, is_real))

    def _count_dropped(self, epoch: int, before: float) -> None:
        self.dropped[epoch] += int(self._lead.progress()["dropped_samples"] - before)


def where(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of a state without how it was come by: K, and what was left out."""
    return {name: value for name, value in opened(state).items() if name not in ("num_workers", "skipped")}


def difference(
    one: Mapping[str, Any], other: Mapping[str, Any], besides: tuple[str, ...] = (), *, unbatched: bool = True
) -> str:
    """Return in what two states differ, but for K and what was left out; empty if in nothing.

    Args:
        besides: Keys that may differ, too.
        unbatched: Compare places in a batch, too, where torchdata's Unbatcher puts them to 0 at its source's end.
    """
    one, other = where(one), where(other)
    if one.keys() != other.keys() or one["shards"].keys() != other["shards"].keys():
        return "keys"
    for key, column in one["shards"].items():
        its = other["shards"][key]
        if (column.shape, column.dtype) != (its.shape, its.dtype):
            return f"shards.{key}: {column.dtype} {[*column.shape]}, {its.dtype} {[*its.shape]}"
        differs = column != its
        if not unbatched and key.endswith(".batch_idx"):
            below = key.removesuffix("batch_idx")
            for name, ended in one["shards"].items():
                if name.startswith(below) and name.endswith("_ended"):
                    differs &= ~ended.bool()
        if differs.any():
            return f"shards.{key}: {column.tolist()} {its.tolist()}"
    keys = [key for key in one if key not in ("shards", *besides) and one[key] != other[key]]
    return "; ".join(f"{key}: {one[key]} {other[key]}" for key in keys)


def same_state(one: Mapping[str, Any], other: Mapping[str, Any], besides: tuple[str, ...] = ()) -> bool:
    """True if two states are equal, but for K and what was left out; ``besides`` names keys that may differ, too."""
    return not difference(one, other, besides)
