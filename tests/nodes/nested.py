"""Nodes that read, and nodes over documents, as `tests.histories.plans` puts one in another."""

from collections.abc import Callable
from typing import Any

import numpy as np
from torchdata import nodes

import rescale_data as rd
from tests.laws.tables import letters as by_letters
from tests.nodes.zoo import BOOKS, CODE, FEW, WEB, fails_on_some, is_kept, noisy

SOURCES = [WEB, CODE, BOOKS, FEW]


class Stream:
    """Rows in their order; its state is how many were drawn."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows, self.at = rows, 0

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> Any:
        if self.at >= len(self.rows):
            raise StopIteration
        self.at += 1
        return self.rows[self.at - 1]

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def _streams(source: rd.DatasetSource, kinds: list[Any]) -> rd.IterableSource:
    streams = [kind(source.dataset[i::4]) for i, kind in enumerate(kinds)]
    return rd.IterableSource(streams, name=f"streams of {source.name}", state_bytes=64)


KINDS = [[list] * 4, [Stream] * 4, [Stream, list, list, Stream], [list] * 4]
"""Of each source, the streams that have a state and those that are read again."""
STREAMS = [_streams(source, kinds) for source, kinds in zip(SOURCES, KINDS, strict=True)]


def _cut(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {**sample, "tokens": sample["tokens"][: 1 + int(rng.integers(8))]}


def _with_text(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "text": "x" * (1 + len(sample["tokens"]) % 7)}


def _twice(sample: Any) -> list[Any]:
    return [sample, sample]


def _same(sample: Any) -> Any:
    return sample


UNARY: dict[str, Callable[..., Any]] = {
    "Map": lambda node, _: rd.Map(node, _same),
    "Map-skip": lambda node, _: rd.Map(node, fails_on_some, on_error="skip"),
    "Filter": lambda node, _: rd.Filter(node, is_kept),
    "RandomMap": lambda node, shard: rd.RandomMap(node, noisy, shard=shard),
    "RandomMap-cut": lambda node, shard: rd.RandomMap(node, _cut, shard=shard),
    "CleanDocuments": lambda node, _: rd.CleanDocuments(node, "tokens", min_length=2, max_length=4),
    "Tokenize": lambda node, _: rd.Map(rd.Tokenize(node, by_letters, "text", into="tokens", batch_size=3), _with_text),
    "Mapper": lambda node, _: nodes.Mapper(node, _same),
    "Shuffle": lambda node, shard: rd.Shuffle(node, 3, shard=shard),
    "Unbatcher-Batcher": lambda node, _: nodes.Unbatcher(nodes.Batcher(node, 3, drop_last=False)),
    "Unbatcher-Batcher-drop": lambda node, _: nodes.Unbatcher(nodes.Batcher(node, 2)),
    "Unbatcher-Map": lambda node, _: nodes.Unbatcher(rd.Map(nodes.Batcher(node, 2, drop_last=False), _same)),
    "Unbatcher-Mapper": lambda node, _: nodes.Unbatcher(nodes.Mapper(node, _twice)),
}
"""From a node that yields documents to another."""


def build(plan: tuple[Any, ...], shard: rd.Shard, exclude: Any = None) -> rd.BaseNode[Any]:
    """The node that reads the source of a plan."""
    kind, source = plan[0], SOURCES[plan[1]]
    if kind == "Reader":
        return rd.Reader(source, shard, shuffle=plan[2], exclude=exclude)
    if kind == "StreamReader":
        return rd.StreamReader(STREAMS[plan[1]], shard)
    return nodes.MapStyleWrapper(source.dataset, range(shard.index, source.num_rows, shard.num_logical_shards))
