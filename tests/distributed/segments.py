"""Segments of a run, as each rank takes them and as they are put together again."""

import logging
from dataclasses import dataclass
from typing import Any

import rescale_data as rd
from tests.pipelines import as_samples, data_for, pipeline_of, plain

MicroBatch = list[Any]
"""The samples of one rank's micro batch."""


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

    def loader(self, o: int, b: int | None = None, **others: Any) -> rd.DataLoader:
        data = pipeline_of(self.kind, data_for(self.kind, self.num_rows))
        sizes = {"global_batch_size": o, "micro_batch_size": b, "num_logical_shards": self.n}
        how = {"seed": 7, "repeat": self.repeat, "collate_fn": as_samples}
        return rd.DataLoader(data, **{**sizes, **how, **others})


def take(loader: rd.DataLoader, num_micro_batches: int) -> list[MicroBatch]:
    found: list[MicroBatch] = []
    batches = iter(loader)
    while len(found) < num_micro_batches:
        if (batch := next(batches, None)) is None:
            batches = iter(loader)
        else:
            found.append([plain(sample) for sample in batch["samples"]])
    return found


def global_batches(ranks: list[list[MicroBatch]], o: int) -> list[list[Any]]:
    a = o // (len(ranks) * len(ranks[0][0]))
    steps = [[rank[t : t + a] for rank in ranks] for t in range(0, len(ranks[0]), a)]
    return [[sample for rank in step for samples in rank for sample in samples] for step in steps]


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
