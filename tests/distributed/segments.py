"""Segments of a run, as each rank takes them and as they are put together again."""

import logging
from collections import defaultdict
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, NamedTuple

import rescale_data as rd
from tests.pipelines import as_samples, data_for, pipeline_of, plain

SEED = 7


@dataclass(frozen=True)
class Data:
    """What a run reads: the same in all of its segments.

    Args:
        kind: Of `tests.pipelines.PIPELINES`.
        n: Logical shards.
    """

    kind: str
    num_rows: int
    n: int
    repeat: bool = True
    tail: Literal["drop", "pad"] = "drop"

    def loader(self, o: int, b: int | None = None, **others: Any) -> rd.DataLoader:
        return rd.DataLoader(
            pipeline_of(self.kind, data_for(self.kind, self.num_rows)),
            **{
                "global_batch_size": o,
                "micro_batch_size": b,
                "num_logical_shards": self.n,
                "seed": SEED,
                "repeat": self.repeat,
                "tail": self.tail,
                "collate_fn": as_samples,
                **others,
            },
        )

    def stream(self, shard: int, epoch: int, count: int) -> list[Any]:
        """The first samples of a shard (of an epoch, where the stream has any) if nothing interrupts it."""
        pipeline = pipeline_of(self.kind, data_for(self.kind, self.num_rows))
        node: Any = pipeline(rd.Shard(shard, self.n, seed=SEED, repeat=self.repeat))
        for _ in range(0 if self.repeat else epoch):
            list(node)
            node.reset(None)
        found = list(islice(node, count))
        while self.repeat and len(found) < count:  # into its next epoch
            node.reset(None)
            found += islice(node, count - len(found))
        return [plain(sample) for sample in found]


class Taken(NamedTuple):
    """A micro batch of one rank; its first ``num_real`` samples are real."""

    epoch: int
    samples: list[Any]
    num_real: int


ByRank = list[list[Taken]]


def take(loader: rd.DataLoader, num_micro_batches: int) -> list[Taken]:
    """Micro batches of this rank, over the ends of epochs."""
    found: list[Taken] = []
    batches = iter(loader)
    while len(found) < num_micro_batches:
        epoch = loader.epoch
        batch = next(batches, None)
        if batch is None:
            batches = iter(loader)
        else:
            found.append(taken_from(loader, epoch, batch))
    return found


def take_epoch(loader: rd.DataLoader) -> list[Taken]:
    """What is left of the epoch on this rank."""
    batches = iter(loader)
    epoch = loader.epoch  # a load in mid-step may have left less than a global batch of the one before
    return [taken_from(loader, epoch, batch) for batch in batches]


def taken_from(loader: rd.DataLoader, epoch: int, batch: Any) -> Taken:
    real = batch["valid"].tolist() if "valid" in batch else [True] * len(batch["samples"])
    assert real == sorted(real, reverse=True)
    assert sum(real) == loader.last_batch_samples
    return Taken(epoch, [plain(sample) for sample in batch["samples"]], sum(real))


def global_batches(ranks: ByRank, o: int) -> list[list[Any]]:
    """The rows of each global batch in rank order."""
    a = o // (len(ranks) * len(ranks[0][0].samples))
    steps = [[rank[t : t + a] for rank in ranks] for t in range(0, len(ranks[0]), a)]
    return [[sample for rank in step for taken in rank for sample in taken.samples] for step in steps]


def check_exactly_once(data: Data, *segments: ByRank) -> None:
    """R1: each shard has delivered its next sample and no other, over all segments; ranks of a segment end epochs together."""
    delivered: dict[tuple[int, int], list[Any]] = defaultdict(list)
    for ranks in segments:
        for at_once in zip(*ranks, strict=True):
            assert len({taken.epoch for taken in at_once}) == 1
            for taken in at_once:
                for sample in taken.samples[: taken.num_real]:
                    delivered[taken.epoch, dict(sample)["shard"]].append(sample)
    assert delivered
    for (epoch, shard), samples in delivered.items():
        assert samples == data.stream(shard, epoch, len(samples)), f"shard {shard} in epoch {epoch}"


class Logged(logging.Handler):
    """What the library logs while this is entered, from a level on."""

    def __init__(self, level: int = logging.WARNING) -> None:
        super().__init__(level)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())

    def __enter__(self) -> list[str]:
        logging.getLogger("rescale_data").addHandler(self)
        return self.said

    def __exit__(self, *_: object) -> None:
        logging.getLogger("rescale_data").removeHandler(self)
