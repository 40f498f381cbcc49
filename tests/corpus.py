"""One corpus of documents in every layout that a source can read, and lists of its rows."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from rescale_data.order import FragmentOrder, permuted_fragments
from rescale_data.sources.arrow import ArrowSource
from rescale_data.sources.dataset import DatasetSource
from rescale_data.sources.parquet import ParquetSource
from rescale_data.sources.source import FiledSource, Source
from rescale_data.state import Ints
from tests.formats import write_table

LAYOUTS = ("parquet", "arrow", "stream", "dataset")


def documents(lengths: list[int], *, first: int = 10) -> list[list[int]]:
    """Documents of the given lengths in which no token occurs twice."""
    ends = np.cumsum([first, *lengths])
    return [list(range(a, b)) for a, b in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)]


def fragment_order(fragments: Ints, seed: int, epoch: int) -> FragmentOrder:
    """The fragments, given by their first rows and the number of rows, as the epoch permutes them."""
    return permuted_fragments(fragments[:-1], np.diff(fragments), seed, epoch)


def write(layout: str, folder: Path, docs: list[list[int]], per_file: int = 7, per_fragment: int = 3) -> Source:
    """The documents as files of ``per_file`` rows with fragments of ``per_fragment``, as a source with the column "tokens"."""
    if layout == "dataset":
        return DatasetSource([{"tokens": np.array(doc, dtype=np.uint16)} for doc in docs])
    suffix = "parquet" if layout == "parquet" else "arrow"
    for number, start in enumerate(range(0, len(docs), per_file)):
        table = pa.table({"tokens": pa.array(docs[start : start + per_file], pa.list_(pa.uint16()))})
        write_table(folder / f"{number:03d}.{suffix}", table, per_fragment, is_stream=layout == "stream")
    return ParquetSource(folder) if layout == "parquet" else ArrowSource(folder)


def listed(source: Any, rows: Iterable[int]) -> Any:
    """Return row numbers of any source as `Reader(exclude=)` takes them."""
    if not isinstance(source, FiledSource):
        return list(rows)
    found = defaultdict(list)
    for file, row in map(source.file_row, rows):
        found[file].append(row)
    return dict(found)


# Map-style datasets that do something where a row is read


class Hooked(list[Any]):
    """Rows that call a function with the index of each row before it is read."""

    def __init__(self, rows: Iterable[Any], hook: Callable[[int], object]) -> None:
        super().__init__(rows)
        self.hook = hook

    def __getitem__(self, index: Any) -> Any:
        self.hook(index)
        return super().__getitem__(index)


def unreadable(rows: Iterable[Any], bad: Iterable[int]) -> Hooked:
    """Return rows of which those numbered in `bad` cannot be read."""
    return Hooked(rows, partial(_fail_at, frozenset(bad)))


def _fail_at(bad: frozenset[int], index: int) -> None:
    if index in bad:
        raise ValueError(f"row {index} cannot be read")
