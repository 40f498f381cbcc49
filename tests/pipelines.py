"""Pipelines of every kind of node, all of which yield ``{"shard": int, ...}``, so that it can be said whose sample it is.

They live in a module, so that worker processes and ranks can import them.
"""

import functools
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torchdata.nodes import BaseNode, Batcher, Mapper

import rescale_data as rd
from rescale_data.state import Field
from tests.nodes import zoo


class Rows:
    """A map-style dataset that counts how often it is read, and of which some rows are broken."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows, self.num_read, self.broken = num_rows, 0, set[int]()

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index in self.broken:
            raise OSError(f"cannot read row {index}")
        self.num_read += 1
        return {"row": index}


class Documents(Rows):
    """Documents of 0 to 6 tokens, in which no token occurs twice."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        super().__getitem__(index)
        return {"tokens": torch.arange(index * 7, index * 7 + (index * 5) % 7) + 10}


class Kept(BaseNode[Any]):
    """A filter as a user would write it for torchdata: a dict of numbers and a tensor as its state."""

    def __init__(self, source: BaseNode[Any], modulus: int) -> None:
        super().__init__()
        self.source, self.modulus = source, modulus

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        super().reset(initial_state)
        state = initial_state or {}
        self.seen, self.mean = state.get("seen", 0), state.get("mean", 0.5)
        self.last = state.get("last", torch.zeros(3, dtype=torch.uint8))
        self.source.reset(state.get("source"))

    def next(self) -> Any:
        while True:
            sample = next(self.source)
            self.seen += 1
            self.mean = (self.mean + sample["row"]) / 2
            if sample["row"] % self.modulus:
                self.last = torch.tensor([sample["row"] % 200] * 3, dtype=torch.uint8)
                return {**sample, "seen": self.seen, "mean": self.mean, "last": self.last}

    def get_state(self) -> dict[str, Any]:
        return {"source": self.source.state_dict(), "seen": self.seen, "mean": self.mean, "last": self.last}


class Every(rd.Node[Any]):
    """A filter as a node of our own: two integers in the table."""

    FIELDS: ClassVar[tuple[Field, ...]] = (Field(("seen",)), Field(("kept",)))

    def __init__(self, source: BaseNode[Any], modulus: int) -> None:
        super().__init__(source=source)
        self.modulus = modulus

    def next(self) -> Any:
        while True:
            sample = next(self.children["source"])
            self.position[0] += 1
            if sample["row"] % self.modulus:
                self.position[1] += 1
                return {**sample, "seen": self.position[0], "kept": self.position[1]}

    def parameters(self) -> Mapping[str, Any]:
        return {"modulus": self.modulus}


def tag(shard: int, sample: Any) -> dict[str, Any]:
    return {"shard": shard, **(sample if isinstance(sample, dict) else {"rows": [part["row"] for part in sample]})}


def tagged(node: BaseNode[Any], shard: rd.Shard) -> BaseNode[Any]:
    return Mapper(node, functools.partial(tag, shard.index))


def rows(data: Rows, shard: rd.Shard) -> BaseNode[Any]:
    return tagged(rd.Reader(data, shard), shard)


def batched(data: Rows, shard: rd.Shard) -> BaseNode[Any]:
    return tagged(Batcher(rd.Reader(data, shard), 2), shard)


def packed(data: Rows, shard: rd.Shard) -> BaseNode[Any]:
    documents = rd.Reader(data, shard)
    return tagged(rd.TokenPacker(documents, column="tokens", seq_len=5, eos_id=2, labels=True, last="pad"), shard)


def kept(data: Rows, shard: rd.Shard) -> BaseNode[Any]:
    return tagged(Kept(rd.Reader(data, shard), 5), shard)


def every(data: Rows, shard: rd.Shard) -> BaseNode[Any]:
    return tagged(Every(rd.Reader(data, shard), 5), shard)


def mixed(data: Rows, shard: rd.Shard) -> BaseNode[Any]:
    """Twice as many of the one as of the other, which are the same rows."""
    readers = {"one": rd.Reader(data, shard), "other": rd.Reader(data, shard, shuffle=False)}
    return tagged(rd.WeightedSampler(readers, {"one": 2, "other": 1}, stop="all"), shard)


def skewed(data: Rows, shard: rd.Shard) -> BaseNode[Any]:
    """Shards of the first half end long before the others."""
    return tagged(rd.Filter(rd.Reader(data, shard, shuffle=False), functools.partial(is_late, data.num_rows)), shard)


def is_late(num_rows: int, sample: dict[str, Any]) -> bool:
    return 2 * sample["row"] >= num_rows or sample["row"] % 3 == 0


def of_zoo(name: str, _: Rows, shard: rd.Shard) -> BaseNode[Any]:
    return tagged(zoo.PACKED[name](shard), shard)


PIPELINES = {
    "rows": rows,
    "batched": batched,
    "packed": packed,
    "kept": kept,
    "every": every,
    "mixed": mixed,
    "skewed": skewed,
}
ZOO = {name: functools.partial(of_zoo, name) for name in zoo.PACKED}
"""Those of `tests.nodes.zoo`, which have data of their own."""


def data_for(kind: str, num_rows: int) -> Rows:
    return Documents(num_rows) if kind == "packed" else Rows(num_rows)


def pipeline_of(kind: str, data: Rows) -> Any:
    return functools.partial((PIPELINES | ZOO)[kind], data)


def as_samples(samples: list[Any]) -> dict[str, Any]:
    """A ``collate_fn`` that keeps samples apart."""
    return {"samples": samples}


def plain(value: Any) -> Any:
    """A sample as something that compares and hashes."""
    if isinstance(value, torch.Tensor):
        return tuple(value.tolist())
    if isinstance(value, dict):
        return tuple((key, plain(item)) for key, item in sorted(value.items()))
    return tuple(map(plain, value)) if isinstance(value, list | tuple) else value
