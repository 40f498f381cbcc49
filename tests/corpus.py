"""One corpus of documents in every layout that a source can read."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rescale_data.order import FragmentOrder, permuted_fragments
from rescale_data.sources.arrow import ArrowSource
from rescale_data.sources.dataset import DatasetSource
from rescale_data.sources.parquet import ParquetSource
from rescale_data.sources.source import Source
from rescale_data.state import Ints

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
    folder.mkdir(parents=True, exist_ok=True)
    for number, start in enumerate(range(0, len(docs), per_file)):
        _write_file(layout, folder / f"{number:03d}", docs[start : start + per_file], per_fragment)
    if layout == "parquet":
        return ParquetSource(folder)
    if layout == "dataset":
        return DatasetSource([{"tokens": np.array(doc, dtype=np.uint16)} for doc in docs])
    return ArrowSource(folder)


def _write_file(layout: str, path: Path, docs: list[list[int]], per_fragment: int) -> None:
    table = pa.table({"tokens": pa.array(docs, pa.list_(pa.uint16()))})
    if layout == "parquet":
        pq.write_table(table, path.with_suffix(".parquet"), row_group_size=per_fragment)
    elif layout != "dataset":
        new = pa.ipc.new_stream if layout == "stream" else pa.ipc.new_file
        with new(path.with_suffix(".arrow"), table.schema) as writer:
            writer.write_table(table, max_chunksize=per_fragment)
