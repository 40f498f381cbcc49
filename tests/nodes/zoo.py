"""Pipelines of every kind of node over small corpora: of the tables of the laws, with columns, and of torchdata's nodes."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torchdata import nodes

import rescale_data as rd
from tests.laws import tables
from tests.laws.pairs import name_of
from tests.laws.tables import letters as by_letters


def corpus(name: str, lengths: list[int]) -> list[dict[str, Any]]:
    """Documents as text and as tokens; no token occurs twice."""
    ends = np.cumsum([len(name) * 1000, *lengths])
    return [
        {"id": 1000 * len(name) + i, "text": "x" * (1 + n % 7), "tokens": np.arange(a, a + n, dtype=np.uint16)}
        for i, (a, n) in enumerate(zip(ends[:-1], lengths, strict=True))
    ]


WEB = rd.DatasetSource(corpus("web", 4 * [3, 9, 0, 5, 14, 2, 7, 1, 6, 4, 11, 3, 8, 2, 5, 23, 1]), name="web")
FEW = rd.DatasetSource(
    corpus("web", 3 * [3, 9, 1, 5, 14, 2, 7, 1, 6, 4, 11, 3, 8, 2, 5, 2, 1, 8, 3, 4, 5, 1]), name="few"
)
CODE = rd.DatasetSource(corpus("code", 5 * [6, 1, 2, 12, 4, 3, 9, 2, 5, 7, 1]), name="code")
BOOKS = rd.DatasetSource(corpus("books", 5 * [17, 5, 30, 8, 2, 21, 9, 3, 12, 6, 4]), name="books")


def noisy(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {**sample, "noise": float(rng.random())}


def without_arrays(sample: dict[str, Any]) -> dict[str, Any]:
    """What collates: a row without what is ragged."""
    return {key: value for key, value in sample.items() if not isinstance(value, np.ndarray)}


def is_kept(sample: dict[str, Any]) -> bool:
    return sample["id"] % 3 != 1


def fails_on_some(sample: Any, *_: Any) -> Any:
    if sample["id"] % 5 == 2:
        raise ValueError(f"bad row {sample['id']}")
    return sample


def read(source: Any, shard: rd.Shard, **kwargs: Any) -> rd.Reader:
    return rd.Reader(source, shard, shuffle=4, **kwargs)


def mixture(shard: rd.Shard, weights: Any = None, **kwargs: Any) -> rd.WeightedSampler:
    sources = {"web": WEB, "code": CODE, "books": BOOKS}
    weights = weights or {"web": 0.5, "code": 0.3, "books": 0.2}
    names = weights.keys[0][1] if isinstance(weights, rd.Schedule) else weights
    return rd.WeightedSampler({name: read(sources[name], shard) for name in names}, weights, **kwargs)


def mapped(shard: rd.Shard) -> rd.BaseNode[Any]:
    return rd.Map(read(FEW, shard), without_arrays)


def filtered(shard: rd.Shard) -> rd.BaseNode[Any]:
    return rd.Map(rd.Filter(read(FEW, shard), is_kept), without_arrays)


def with_columns(row: dict[str, Any]) -> dict[str, Any]:
    images = [f"{row['id']}/{i}".encode() for i in range(len(row["tokens"]) % 4)]
    return {**row, "loss_mask": row["tokens"] % 3 > 0, "images": images}


def columned(shard: rd.Shard) -> rd.BaseNode[Any]:
    rows, columns = rd.Map(read(WEB, shard), with_columns), {"loss_mask": torch.bool}
    return rd.TokenPacker(rows, column="tokens", seq_len=6, eos_id=1, columns=columns, labels=True)


def paid(shard: rd.Shard) -> rd.BaseNode[Any]:
    rows, columns = rd.Map(read(WEB, shard), with_columns), {"loss_mask": torch.bool}
    carried: Any = {"payload": ["images"], "limits": {"images": 4}}
    form: Any = {"seq_len": 12, "window": 5, "long": "truncate", "pad_documents_to": 2, "labels": True}
    return rd.WholeDocumentPacker(rows, column="tokens", columns=columns, **form, **carried)


def everything(shard: rd.Shard) -> rd.BaseNode[Any]:
    """A filter, random augmentation, a mixture by tokens of two tokenized sources and one with tokens, whole documents."""
    text = {
        name: rd.Tokenize(rd.Map(read(source, shard), without_arrays), by_letters, "text", batch_size=4)
        for name, source in (("web", WEB), ("code", CODE))
    }
    books = rd.CleanDocuments(read(BOOKS, shard), "tokens", min_length=3, max_length=10)
    augmented = rd.RandomMap(rd.Filter(text["web"], is_kept), _cut)
    rows = rd.WeightedSampler(
        {"web": augmented, "code": text["code"], "books": books},
        {"web": 3, "code": 1, "books": 2.5},
        unit="tokens",
        column="tokens",
    )
    return rd.WholeDocumentPacker(rows, column="tokens", seq_len=16, window=6, max_documents=5)


def _cut(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {**sample, "tokens": sample["tokens"][: 1 + rng.integers(len(sample["tokens"]))]}


class Ids:
    """The ids of a shard's rows, anew each time it is iterated: as an iterable, and as a sampler with epochs."""

    def __init__(self, shard: rd.Shard) -> None:
        self.ids = [row["id"] for row in FEW.dataset][shard.index :: shard.num_logical_shards]
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        turned = self.epoch % len(self.ids)
        return iter(self.ids[turned:] + self.ids[:turned])


class Counting(Ids):
    """An iterable that keeps its own place, and goes on writing in the state that it was given."""

    def __init__(self, shard: rd.Shard) -> None:
        super().__init__(shard)
        self.state = {"at": 0}

    def __iter__(self) -> Iterator[int]:
        while self.state["at"] < len(self.ids):
            self.state["at"] += 1
            yield self.ids[self.state["at"] - 1]
        self.state["at"] = 0

    def state_dict(self) -> dict[str, Any]:
        return dict(self.state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def batched(shard: rd.Shard, *, drop_last: bool) -> nodes.BaseNode[Any]:
    return nodes.Batcher(mapped(shard), 4, drop_last=drop_last)


def weighted(shard: rd.Shard, stop: str, *, foreign: bool = False) -> nodes.BaseNode[Any]:
    sources = {"a": by_ids(shard), "b": mapped(shard)} if foreign else {"a": mapped(shard), "b": filtered(shard)}
    where = {"rank": shard.index, "world_size": shard.num_logical_shards}
    return nodes.MultiNodeWeightedSampler(sources, {"a": 1.0, "b": 2.0}, stop, **where)


def by_ids(shard: rd.Shard) -> nodes.BaseNode[Any]:
    return nodes.MapStyleWrapper({i: {"id": i, "text": "x"} for i in Ids(shard).ids}, Ids(shard))


CROSSED = {name_of(case): functools.partial(tables.pipeline, case) for case in tables.CASES}
STOCK: dict[str, Callable[[rd.Shard], nodes.BaseNode[Any]]] = {
    "Mapper": lambda shard: nodes.Mapper(mapped(shard), lambda x: x),
    "ParallelMapper": lambda shard: nodes.ParallelMapper(mapped(shard), lambda x: x, num_workers=0),
    "Batcher": functools.partial(batched, drop_last=False),
    "Batcher-drop": functools.partial(batched, drop_last=True),
    "Batcher-filter": lambda shard: nodes.Batcher(filtered(shard), 3, drop_last=False),
    "Unbatcher": lambda shard: nodes.Unbatcher(batched(shard, drop_last=False)),
    "Unbatcher-drop": lambda shard: nodes.Unbatcher(batched(shard, drop_last=True)),
    "Unbatcher-Mapper": lambda shard: nodes.Mapper(
        nodes.Unbatcher(nodes.Mapper(mapped(shard), lambda x: [x, x])), lambda x: x
    ),
    "Unbatcher-Map": lambda shard: nodes.Unbatcher(rd.Map(batched(shard, drop_last=False), lambda x: x[::-1])),
    "Map-Unbatcher": lambda shard: rd.Filter(
        rd.Map(nodes.Unbatcher(batched(shard, drop_last=False)), lambda x: x), is_kept
    ),
    "IterableWrapper": lambda shard: nodes.IterableWrapper(Ids(shard)),
    "IterableWrapper-state": lambda shard: nodes.IterableWrapper(Counting(shard)),
    "SamplerWrapper": lambda shard: nodes.SamplerWrapper(Ids(shard)),
    "MapStyleWrapper": by_ids,
    "Batcher-MapStyle": lambda shard: nodes.Unbatcher(nodes.Batcher(by_ids(shard), 4, drop_last=False)),
    "Weighted-all": functools.partial(weighted, stop="ALL_DATASETS_EXHAUSTED"),
    "Weighted-first": functools.partial(weighted, stop="FIRST_DATASET_EXHAUSTED"),
    "Weighted-cycle": functools.partial(weighted, stop="CYCLE_UNTIL_ALL_DATASETS_EXHAUSTED"),
    "Weighted-forever": functools.partial(weighted, stop="CYCLE_FOREVER"),
    "Weighted-foreign": functools.partial(weighted, stop="ALL_DATASETS_EXHAUSTED", foreign=True),
}
"""Every node of torchdata that can live in a pipeline, over ours and over its own; all yield ids or samples with them."""

PACKED: dict[str, Callable[[rd.Shard], nodes.BaseNode[Any]]] = {
    "columns": columned,
    "payload": paid,
    "everything": everything,
}
PIPELINES: dict[str, Callable[[rd.Shard], nodes.BaseNode[Any]]] = {**CROSSED, **PACKED, **STOCK}
ENDLESS = ("everything", "Weighted-forever", *(name_of(c) for c in tables.CASES if c["mixture"] in tables.ENDLESS))
"""Those that no epoch ends."""
