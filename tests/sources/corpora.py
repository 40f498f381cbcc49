"""`DOCS` in files of each format, and loaders of any topology."""

from pathlib import Path
from typing import Any

import pyarrow as pa

import rescale_data as rd
from tests.laws.tables import FILES, write

DOCS = [[300 * i + j for j in range(i % 11 + 1)] for i in range(200)]
FORMATS = [*FILES, "jsonl.gz"]


def make_source(kind: str, folder: Path) -> rd.Source:
    """Write `DOCS` as two files of several fragments."""
    name, suffix = ("jsonl", ".jsonl.gz") if kind == "jsonl.gz" else (kind, "")
    for file, docs in (("a", DOCS[:130]), ("b", DOCS[130:])):
        write(name, folder / file, pa.table({"tokens": pa.array(docs, pa.list_(pa.uint16()))}), 17, suffix)
    source: rd.Source = FILES[name][0](folder)
    return source


def loader_of(pipeline: Any, rank: int, world: int, micro: int, workers: int, **kwargs: Any) -> rd.DataLoader:
    """Open a loader as `assert_rescalable` asks for it."""
    where = {"dp_rank": rank, "dp_world_size": world, "micro_batch_size": micro, "num_workers": workers}
    sizes = {"global_batch_size": 12, "num_logical_shards": 24, "repeat": True}
    return rd.DataLoader(pipeline, **{**sizes, **where, **kwargs})
