"""Pipelines drawn at random, as plain data: those of `tests.nodes.nested`, packers, epochs, schedules, data that changes."""

import functools
import random
import tempfile
from collections.abc import Mapping
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import pyarrow as pa
from pyarrow import compute
from pyarrow import parquet as pq
from torchdata import nodes

import rescale_data as rd
from rescale_data.sources.source import FiledSource, Tokens
from rescale_data.state import Ints
from tests.nodes import nested, zoo
from tests.nodes.resume import plain
from tests.pipelines import PIPELINES, data_for, pipeline_of

Plan = tuple[Any, ...]
FRAGMENT_ROWS = 7


class Files(FiledSource):
    """Documents in files, to which others are added; no token occurs twice.

    Args:
        files: By name, the number of its rows. Which documents they are follows from the name.
    """

    name, cache_bytes = "files", 2**20

    def __init__(self, files: Mapping[str, int]) -> None:
        self.files = dict(sorted(files.items()))
        self.documents = [document for name, size in self.files.items() for document in _documents(name, size)]
        self.num_rows, self.of_fragment, starts, first = len(self.documents), list[str](), list[int](), 0
        for name, size in self.files.items():
            for start in range(0, size, FRAGMENT_ROWS):
                self.of_fragment.append(name)
                starts.append(first + start)
            first += size
        self.fragments = np.array([*starts, self.num_rows])

    def manifest(self) -> Mapping[str, Any]:
        return {"format": "fuzz", "files": [[name, size] for name, size in self.files.items()]}

    def subset(self, manifest: Mapping[str, Any]) -> Ints:
        named = {name for name, *_ in manifest["files"]}
        return np.flatnonzero([name in named for name in self.of_fragment])

    def rows_of_file(self, name: str) -> range:
        sizes = np.cumsum([0, *self.files.values()]).tolist()
        at = [*self.files].index(name)
        return range(sizes[at], sizes[at + 1])

    def rows_in_file(self, name: str, rows: Ints) -> Ints:
        return self.rows_of_file(name).start + rows

    def file_row(self, index: int) -> tuple[str, int]:
        name = self.of_fragment[int(np.searchsorted(self.fragments, index, side="right")) - 1]
        return name, index - self.rows_of_file(name).start

    def row(self, index: int) -> dict[str, Any]:
        return dict(self.documents[index])

    def locate(self, index: int) -> str:
        return f"row {index}"

    def check_tokens(self, column: str) -> None:
        assert column == "tokens"

    def tokens(self, column: str, fragment: int) -> Tokens:
        documents = self.documents[self.fragments[fragment] : self.fragments[fragment + 1]]
        offsets = np.cumsum([0, *(len(document[column]) for document in documents)])
        return Tokens(np.concatenate([document[column] for document in documents]), offsets)


@functools.cache
def _documents(name: str, size: int) -> list[dict[str, Any]]:
    number = int(name[1:])
    lengths = np.random.default_rng(number).integers(0, 9, size)
    ends = np.cumsum([10_000 + 400 * number, *lengths])
    return [
        {"id": 1000 * (number + 20) + i, "text": "x" * (1 + n % 7), "tokens": np.arange(a, a + n, dtype=np.int32)}
        for i, (a, n) in enumerate(zip(ends[:-1].tolist(), lengths.tolist(), strict=True))
    ]


_FOLDER = tempfile.TemporaryDirectory()


@functools.cache
def _parquet_file(name: str, size: int) -> str:
    rows, path = _documents(name, size), f"{_FOLDER.name}/{name} of {size}.parquet"
    table = pa.table({key: [row[key] for row in rows] for key in rows[0]})
    table = table.append_column("kind", pa.array([row["id"] // 5 % 3 for row in rows]))
    pq.write_table(table, path, row_group_size=FRAGMENT_ROWS)
    return path


def _parquet(files: tuple[tuple[str, int], ...], kept: int | None) -> rd.ParquetSource:
    """The same documents as of `Files`, at rest; ``kept``: rows of this kind or above it alone."""
    found = _sources.get((files, kept))
    if found is None:
        paths = [_parquet_file(name, size) for name, size in files]
        where = None if kept is None else compute.field("kind") >= kept
        found = rd.ParquetSource(paths, columns=["id", "text", "tokens"], filter=where, cache_bytes=5_000)
        _sources[files, kept] = found
    return found


_sources: WeakValueDictionary[Any, rd.ParquetSource] = WeakValueDictionary()


class Pipeline:
    """What a plan stands for, with the files that there are and the rows that are left out.

    Args:
        listed: The files of whose rows an Exclude leaves out some, and no others, so that its list stays when files join;
            without, all.
    """

    def __init__(
        self,
        plan: Plan,
        files: Mapping[str, int] | None = None,
        blocked: Any = (),
        listed: Mapping[str, int] | None = None,
    ) -> None:
        self.plan, self.blocked, self._listed = plan, tuple(blocked), files if listed is None else listed
        self.source = Files(files) if files else None
        self._lists: dict[Any, Any] = {}

    def __call__(self, shard: rd.Shard) -> rd.BaseNode[Any]:
        return self.build(self.plan, shard)

    def build(self, plan: Plan, shard: rd.Shard, exclude: Any = None) -> rd.BaseNode[Any]:
        kind = plan[0]
        if kind == "Kind":
            return _of_kind(plan[1], plan[2])(shard)
        if kind == "Files":
            return rd.Reader(self.source, shard, shuffle=plan[1], exclude=exclude)
        if kind == "Parquet":
            return rd.Reader(_parquet(tuple(self.source.files.items()), plan[2]), shard, shuffle=plan[1])
        if kind == "Exclude":
            if plan[1][0] == "Files":
                ids = range(20_000 + plan[3], 30_000, plan[2])
                return self.build(plan[1], shard, self._with(ids, plan[1], self._listed))
            source = nested.SOURCES[plan[1][1]]
            return self.build(plan[1], shard, range(plan[3], source.num_rows, plan[2]))
        if kind == "Blocked":
            return self.build(plan[1], shard, self._with(self.blocked, plan[1]))
        if kind == "Shuffle" and len(plan) == 3:
            return rd.Shuffle(self.build(plan[1], shard), plan[2])
        if kind == "Mix":
            return self._mixture(plan, shard)
        if kind == "Pack":
            return rd.TokenPacker(self.build(plan[2], shard), column="tokens", **dict(plan[1]))
        if kind == "Whole":
            return rd.WholeDocumentPacker(self.build(plan[2], shard), column="tokens", **dict(plan[1]))
        if kind == "Stock":
            below = {f"s{i}": self.build(child, shard) for i, child in enumerate(plan[2])}
            where = {"rank": shard.index, "world_size": shard.num_logical_shards}
            weights = {name: 1.0 + i for i, name in enumerate(below)}
            return nodes.MultiNodeWeightedSampler(below, weights, plan[1], **where)
        if kind in ("Reader", "StreamReader", "MapStyleWrapper"):
            return nested.build(plan, shard, exclude)
        return nested.UNARY[kind](self.build(plan[1], shard), shard)

    def _with(self, ids: Any, plan: Plan, files: Mapping[str, int] | None = None) -> Any:
        """Return the rows that have some ids, the same object for all logical shards; no read of them can fail."""
        if (key := (plan, ids)) not in self._lists:
            wanted = frozenset(ids)
            if plan[0] == "Files":
                named = {name: _documents(name, size) for name, size in (files or self.source.files).items()}
                self._lists[key] = {name: _rows_with(wanted, documents) for name, documents in named.items()}
            else:
                self._lists[key] = _rows_with(wanted, nested.SOURCES[plan[1]].dataset)
        return self._lists[key]

    def _mixture(self, plan: Plan, shard: rd.Shard) -> rd.BaseNode[Any]:
        _, unit, stop, weights, epochs, schedule, below = plan
        children = {f"s{i}": self.build(child, shard) for i, child in enumerate(below)}
        given: Any = dict(zip(children, weights, strict=False))
        if schedule:
            other = dict(zip(children, reversed(weights[: len(children)]), strict=False))
            given = rd.Schedule([(0, given), (schedule[0], other)], schedule[1])
        column = "tokens" if unit == "tokens" else None
        more: Any = {"max_epochs": {"s0": epochs}} if epochs else {}
        return rd.WeightedSampler(children, given, unit=unit, column=column, stop=stop, **more)


def _rows_with(ids: Any, documents: Any) -> list[int]:
    return [row for row, document in enumerate(documents) if document["id"] in ids]


@functools.cache
def _of_kind(name: str, num_rows: int) -> Any:
    return pipeline_of(name, data_for(name, num_rows))


_PACKED = ("seq_len", "eos_id", "bos_id", "labels", "doc_ids", "last")


def _leaf(r: random.Random) -> Plan:
    x = r.random()
    if x < 0.55:
        return ("Reader", r.randrange(4), r.choice([False, True, 4]))
    if x < 0.77:
        return ("Files", r.choice([False, True, 4, 12]))
    if x < 0.85:
        return ("Parquet", r.choice([False, True, 4]), r.choice([None, None, 1]))
    return ("StreamReader", r.randrange(4)) if x < 0.93 else ("MapStyleWrapper", r.randrange(4))


def _documents_of(r: random.Random, depth: int, tokens_only: bool) -> Plan:
    x = r.random()
    if depth == 0 or x < 0.3:
        plan = _leaf(r)
        if plan[0] in ("Reader", "Files") and r.random() < 0.25:
            plan = ("Exclude", plan, r.choice([2, 5, 9]), r.randrange(2))
        return plan
    if x < 0.6:
        kinds = ["CleanDocuments"] if tokens_only else sorted(nested.UNARY)
        return (r.choice(kinds), _documents_of(r, depth - 1, tokens_only))
    if x < 0.7:
        return ("Shuffle", _documents_of(r, depth - 1, tokens_only), r.choice([1, 3, 5, 8]))
    below = [_documents_of(r, depth - 1, tokens_only) for _ in range(r.randint(2, 3))]
    if x < 0.95 or tokens_only or "Stock" in repr(below):
        epochs = r.choice([None, None, 1, 2])
        schedule = r.choice([None, None, None, (r.choice([50, 300]), r.choice(["step", "linear"]))])
        weights = r.choice([(1, 1, 1), (3, 1, 2), (0.5, 0.05, 0.45), (2, 0.5, 1)])
        unit, stop = r.choice(["samples", "tokens"]), r.choice(["never", "first", "all"])
        return ("Mix", unit, stop, weights, epochs, schedule, below)
    stops = ["ALL_DATASETS_EXHAUSTED", "FIRST_DATASET_EXHAUSTED", "CYCLE_UNTIL_ALL_DATASETS_EXHAUSTED"]
    return ("Stock", r.choice(stops), below)


def plan_of(r: random.Random) -> tuple[Plan, bool]:
    """A plan, and whether its samples collate."""
    plan: Plan
    x = r.random()
    if x < 0.15:
        name = r.choice([*PIPELINES, *zoo.PACKED])
        return ("Kind", name, r.choice([40, 113]), "never" if name in zoo.ENDLESS else ""), False
    if x < 0.25:
        return r.choice(
            [("Reader", r.randrange(4), r.choice([False, True, 4])), ("Files", r.choice([False, 4, 12]))]
        ), False
    if x < 0.45:
        return _documents_of(r, r.randint(0, 3), False), False
    tokens_only = r.random() < 0.5
    below = _documents_of(r, r.randint(0, 2), tokens_only)
    if x < 0.8:
        labels, ids, last = r.random() < 0.5, r.random() < 0.3, r.choice(["drop", "pad"])
        values = (r.choice([3, 6, 11, 40]), r.choice([None, 1]), r.choice([None, None, 2]), labels, ids, last)
        plan = ("Pack", tuple(zip(_PACKED, values, strict=True)), below)
    else:
        sizes = {"seq_len": r.choice([8, 12, 30]), "eos_id": r.choice([None, 1]), "window": r.choice([1, 5, 9])}
        kinds = {"long": r.choice(["split", "truncate", "drop"]), "labels": r.random() < 0.3}
        more = {"max_documents": r.choice([None, 2, 5])}
        plan = ("Whole", tuple({**sizes, **kinds, **more}.items()), below)
    return (("Shuffle", plan, r.choice([2, 5])) if r.random() < 0.15 else plan), True


def split(batch: Any, count: int) -> list[Any]:
    """The samples of a batch, as what compares."""
    if isinstance(batch, dict) and isinstance(batch.get("samples"), list):
        return [plain(sample) for sample in batch["samples"]]
    return [{key: plain(value[i]) for key, value in batch.items() if key != "valid"} for i in range(count)]
