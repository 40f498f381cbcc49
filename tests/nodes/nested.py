"""Pipelines of any nodes, one in another, drawn at random: a plan is plain data, so that a failing one can be read.

("Filter", plan) | ("Reader", source, shuffle) | ("WeightedSampler", unit, stop, weights, feature, [plan, ...]) | ...
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import strategies as st
from torchdata import nodes

import rescale_data as rd
from tests.nodes.zoo import BOOKS, CODE, FEW, WEB, by_letters, is_kept, noisy

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
Plan = tuple[Any, ...]


class Ids:
    """Where a shard's rows of a source lie."""

    def __init__(self, source: rd.DatasetSource, shard: rd.Shard) -> None:
        self._rows = range(shard.index, source.num_rows, shard.num_logical_shards)

    def __iter__(self) -> Any:
        return iter(self._rows)


def _stock_leaf(source: int, shard: rd.Shard) -> nodes.BaseNode[Any]:
    return nodes.MapStyleWrapper(SOURCES[source].dataset, Ids(SOURCES[source], shard))


def _mixture(plan: Plan, shard: rd.Shard) -> rd.BaseNode[Any]:
    _, unit, stop, weights, feature, below = plan
    children = {f"s{i}": build(child, shard) for i, child in enumerate(below)}
    given: Any = dict(zip(children, weights, strict=False))
    max_epochs = None
    if feature in ("step", "linear"):
        later = {name: weight + 3 * i for i, (name, weight) in enumerate(reversed(given.items()))}
        given = rd.Schedule([(0, given), (40, later), (100, {**given, "s0": 9.0})], feature)
    if feature == "epochs":
        max_epochs = {f"s{i}": 2 for i, child in enumerate(below) if i and _has_one_reader(child)}
    column = "tokens" if unit == "tokens" else None
    return rd.WeightedSampler(children, given, unit=unit, column=column, stop=stop, max_epochs=max_epochs)


def _has_one_reader(plan: Plan) -> bool:
    """True of a reader with nodes of ours above it, whose epochs are those of the reader."""
    if plan[0] in ("Reader", "Exclude"):
        return True
    return (
        isinstance(plan[1], tuple)
        and "Mapper" not in plan[0]
        and "Unbatcher" not in plan[0]
        and _has_one_reader(plan[1])
    )


def _stock_mixture(plan: Plan, shard: rd.Shard) -> rd.BaseNode[Any]:
    _, stop, below = plan
    children = {f"s{i}": build(child, shard) for i, child in enumerate(below)}
    weights = {name: 1.0 + i for i, name in enumerate(children)}
    where = {"rank": shard.index, "world_size": shard.num_logical_shards}
    return nodes.MultiNodeWeightedSampler(children, weights, stop, **where)


def _cut(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {**sample, "tokens": sample["tokens"][: 1 + int(rng.integers(8))]}


def _some(sample: dict[str, Any]) -> dict[str, Any]:
    if sample["id"] % 5 == 2:
        raise ValueError(f"bad row {sample['id']}")
    return sample


def _with_text(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "text": "x" * (1 + len(sample["tokens"]) % 7)}


def _twice(sample: Any) -> list[Any]:
    return [sample, sample]


def _same(sample: Any) -> Any:
    return sample


UNARY: dict[str, Callable[..., Any]] = {
    "Map": lambda node, _: rd.Map(node, _same),
    "Map-skip": lambda node, _: rd.Map(node, _some, on_error="skip"),
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

LAST: dict[str, Callable[..., Any]] = {
    "TokenPacker": lambda node, _: rd.TokenPacker(node, column="tokens", seq_len=6, eos_id=1, labels=True),
    "TokenPacker-pad": lambda node, _: rd.TokenPacker(node, column="tokens", seq_len=5, eos_id=None, last="pad"),
    "Shuffle-TokenPacker": lambda node, shard: rd.Shuffle(LAST["TokenPacker-pad"](node, shard), 4, shard=shard),
    "WholeDocumentPacker": lambda node, _: rd.WholeDocumentPacker(
        node, column="tokens", seq_len=12, eos_id=1, window=5
    ),
    "Batcher": lambda node, _: nodes.Batcher(node, 3, drop_last=False),
    "Batcher-drop": lambda node, _: nodes.Batcher(node, 3),
}
"""From a node that yields documents to samples."""


def build(plan: Plan, shard: rd.Shard, exclude: Any = None) -> rd.BaseNode[Any]:
    """The node that a plan stands for."""
    kind = plan[0]
    if kind == "Reader":
        return rd.Reader(SOURCES[plan[1]], shard, shuffle=plan[2], exclude=exclude)
    if kind == "Exclude":
        return rd.Reader(SOURCES[plan[1]], shard, shuffle=plan[2], exclude=range(0, 40, 3))
    if kind == "StreamReader":
        return rd.StreamReader(STREAMS[plan[1]], shard)
    if kind == "MapStyleWrapper":
        return _stock_leaf(plan[1], shard)
    if kind == "WeightedSampler":
        return _mixture(plan, shard)
    if kind == "MultiNodeWeightedSampler":
        return _stock_mixture(plan, shard)
    return (UNARY | LAST)[kind](build(plan[1], shard), shard)


def is_endless(plan: Plan) -> bool:
    """Whether some mixture in it has no end."""
    if "never" in plan[:3] or "CYCLE_FOREVER" in plan[:2]:
        return True
    below = plan[-1] if isinstance(plan[-1], list) else [part for part in plan if isinstance(part, tuple)]
    return any(is_endless(child) for child in below)


def _has_mixture(plan: Plan) -> bool:
    below = plan[-1] if isinstance(plan[-1], list) else [part for part in plan if isinstance(part, tuple)]
    return plan[0] == "MultiNodeWeightedSampler" or any(_has_mixture(child) for child in below)


_numbers = st.integers(0, len(SOURCES) - 1)
_leaves = st.one_of(
    st.tuples(st.sampled_from(["Reader", "Exclude"]), _numbers, st.sampled_from([False, True, 4])),
    st.tuples(st.just("StreamReader"), _numbers),
    st.tuples(st.just("MapStyleWrapper"), _numbers),
)


def _mixtures(below: st.SearchStrategy[Plan]) -> st.SearchStrategy[Plan]:
    weights = st.sampled_from([(1, 1, 1), (3, 1, 2), (0.5, 0.05, 0.45), (1, 0, 1)])
    several = st.lists(below, min_size=2, max_size=3)
    units, stops = st.sampled_from(["samples", "tokens"]), st.sampled_from(["never", "first", "all"])
    features = st.sampled_from([None, None, "step", "linear", "epochs"])
    ours = st.tuples(st.just("WeightedSampler"), units, stops, weights, features, several)
    criteria = st.sampled_from(
        ["ALL_DATASETS_EXHAUSTED", "FIRST_DATASET_EXHAUSTED", "CYCLE_UNTIL_ALL_DATASETS_EXHAUSTED"]
    )
    flat = several.filter(lambda plans: not any(map(_has_mixture, plans)))  # torchdata's does not nest
    return ours | st.tuples(st.just("MultiNodeWeightedSampler"), criteria, flat)


_documents = st.recursive(
    _leaves, lambda below: st.tuples(st.sampled_from(sorted(UNARY)), below) | _mixtures(below), max_leaves=4
)
PLANS = _documents | st.tuples(st.sampled_from(sorted(LAST)), _documents)
