"""Pipelines of every kind of node, alone and combined, over small corpora."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

import rescale_data as rd


def corpus(name: str, lengths: list[int]) -> list[dict[str, Any]]:
    """Documents as text and as tokens; no token occurs twice."""
    ends = np.cumsum([len(name) * 1000, *lengths])
    return [
        {"id": 1000 * len(name) + i, "text": "x" * (1 + n % 7), "tokens": np.arange(a, a + n, dtype=np.uint16)}
        for i, (a, n) in enumerate(zip(ends[:-1], lengths, strict=True))
    ]


WEB = rd.DatasetSource(corpus("web", 4 * [3, 9, 0, 5, 14, 2, 7, 1, 6, 4, 11, 3, 8, 2, 5, 23, 1]), name="web")
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


def by_letters(texts: list[str]) -> list[list[int]]:
    return [[len(text), *map(ord, text)] for text in texts]


def read(source: Any, shard: rd.Shard, **kwargs: Any) -> rd.Reader:
    return rd.Reader(source, shard, shuffle=4, **kwargs)


def mixture(shard: rd.Shard, weights: dict[str, float] | None = None, **kwargs: Any) -> rd.WeightedSampler:
    sources = {"web": WEB, "code": CODE, "books": BOOKS}
    weights = weights or {"web": 0.5, "code": 0.3, "books": 0.2}
    return rd.WeightedSampler({name: read(sources[name], shard) for name in weights}, weights, **kwargs)


def mapped(shard: rd.Shard) -> rd.BaseNode[Any]:
    return rd.Map(read(WEB, shard), without_arrays)


def skipping(shard: rd.Shard) -> rd.BaseNode[Any]:
    return rd.Map(rd.Map(read(WEB, shard), fails_on_some, on_error="skip"), without_arrays)


def filtered(shard: rd.Shard) -> rd.BaseNode[Any]:
    return rd.Map(rd.Filter(read(WEB, shard), is_kept), without_arrays)


def random(shard: rd.Shard) -> rd.BaseNode[Any]:
    return rd.RandomMap(rd.RandomMap(rd.Map(read(WEB, shard), without_arrays), noisy), _renamed)


def _renamed(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {**sample, "second": float(rng.random())}


def mixed(shard: rd.Shard, **kwargs: Any) -> rd.BaseNode[Any]:
    return rd.Map(mixture(shard, **kwargs), without_arrays)


def tokenized(shard: rd.Shard) -> rd.BaseNode[Any]:
    rows = rd.Tokenize(read(WEB, shard), by_letters, "text", into="ids", batch_size=3)
    return rd.TokenPacker(rows, column="ids", seq_len=6, eos_id=1, labels=True)


def cleaned(shard: rd.Shard) -> rd.BaseNode[Any]:
    rows = rd.CleanDocuments(read(WEB, shard), "tokens", min_length=2, max_length=4)
    return rd.TokenPacker(rows, column="tokens", seq_len=6, eos_id=1)


def whole(shard: rd.Shard) -> rd.BaseNode[Any]:
    return rd.WholeDocumentPacker(read(WEB, shard), column="tokens", seq_len=12, eos_id=1, window=5, labels=True)


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


PIPELINES: dict[str, Callable[[rd.Shard], rd.BaseNode[Any]]] = {
    "map": mapped,
    "skip": skipping,
    "filter": filtered,
    "random": random,
    "mixture": mixed,
    "first": functools.partial(mixed, stop="first"),
    "all": functools.partial(mixed, stop="all"),
    "tokens": functools.partial(mixed, unit="tokens", column="tokens"),
    "tokenize": tokenized,
    "clean": cleaned,
    "whole": whole,
    "everything": everything,
}
ENDLESS = ("mixture", "tokens", "everything")
"""Those that no epoch ends."""
