"""One corpus of documents in every layout that a source can read."""

from pathlib import Path

import numpy as np
import pyarrow as pa

from rescale_data.order import FragmentOrder, permuted_fragments
from rescale_data.sources.arrow import ArrowSource
from rescale_data.sources.dataset import DatasetSource
from rescale_data.sources.parquet import ParquetSource
from rescale_data.sources.source import Source
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
