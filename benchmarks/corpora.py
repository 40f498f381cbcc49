"""One corpus of tokens and text in every format, written by what writes that format, for the benchmarks beside this file."""

from __future__ import annotations

import functools
import io
import json
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import rescale_data as rd

FORMATS = ("parquet", "arrow", "jsonl", "tar", "megatron")
ROWS_A_FILE, ROWS_A_GROUP = 10_000, 1024


@dataclass(frozen=True)
class Corpus:
    """Rows of 100 to 400 int32 tokens."""

    num_rows: int = 40_000
    seed: int = 0

    @functools.cached_property
    def documents(self) -> list[np.ndarray]:
        rng = np.random.default_rng(self.seed)
        lengths = rng.integers(100, 400, self.num_rows)
        tokens = rng.integers(0, 32_000, int(lengths.sum()), dtype=np.int32)
        return np.split(tokens, np.cumsum(lengths)[:-1])

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.documents))


def write(kind: str, folder: Path, corpus: Corpus) -> None:
    """The files of one format."""
    folder.mkdir(parents=True)
    for number, first in enumerate(range(0, corpus.num_rows, ROWS_A_FILE)):
        _WRITERS[kind](folder / f"{number:03d}", corpus.documents[first : first + ROWS_A_FILE])


def table_of(documents: list[np.ndarray]) -> pa.Table:
    offsets = np.concatenate([[0], np.cumsum([len(d) for d in documents])]).astype(np.int32)
    return pa.table({"tokens": pa.ListArray.from_arrays(offsets, np.concatenate(documents))})


def _parquet(path: Path, documents: list[np.ndarray]) -> None:
    pq.write_table(table_of(documents), f"{path}.parquet", row_group_size=ROWS_A_GROUP, use_dictionary=False)


def _arrow(path: Path, documents: list[np.ndarray]) -> None:
    table = table_of(documents)
    with pa.ipc.new_file(f"{path}.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=ROWS_A_GROUP)


def _jsonl(path: Path, documents: list[np.ndarray]) -> None:
    path.with_suffix(".jsonl").write_text("".join(f"{json.dumps({'tokens': d.tolist()})}\n" for d in documents))


def _tar(path: Path, documents: list[np.ndarray]) -> None:
    with tarfile.open(path.with_suffix(".tar"), "w") as tar:
        for number, document in enumerate(documents):
            info = tarfile.TarInfo(f"{number:06d}.bin")
            info.size = document.nbytes
            tar.addfile(info, io.BytesIO(document.tobytes()))


def _megatron(path: Path, documents: list[np.ndarray]) -> None:
    write_megatron(path, np.concatenate(documents), np.cumsum([0, *map(len, documents)]))


def write_megatron(path: Path, tokens: np.ndarray, ends: np.ndarray) -> None:
    """Documents end to end, and where each of them begins, and the last ends."""
    lengths, width = np.diff(ends).astype(np.int32), tokens.itemsize
    counts = np.array([len(lengths), len(lengths) + 1], dtype=np.int64)
    path.with_suffix(".bin").write_bytes(tokens.tobytes())
    header = b"MMIDIDX\0\0" + np.int64(1).tobytes() + np.uint8({2: 8, 4: 4}[width]).tobytes()
    parts = (counts, lengths, (ends[:-1] * width).astype(np.int64), np.arange(len(lengths) + 1, dtype=np.int64))
    path.with_suffix(".idx").write_bytes(header + b"".join(part.tobytes() for part in parts))


_WRITERS = {"parquet": _parquet, "arrow": _arrow, "jsonl": _jsonl, "tar": _tar, "megatron": _megatron}
_SOURCES: dict[str, Any] = {
    "parquet": rd.ParquetSource,
    "arrow": rd.ArrowSource,
    "jsonl": rd.JsonlSource,
    "tar": rd.WebDatasetSource,
    "megatron": rd.MegatronSource,
}


def source_of(kind: str, paths: str, index: Path, **kwargs: Any) -> Any:
    """The source of the files in a folder or behind a URL."""
    return _SOURCES[kind](paths, **({"index_dir": index} if kind in ("jsonl", "tar") else {}), **kwargs)


def rows_of(source: Any, kind: str) -> Any:
    """A pipeline of rows with an array of tokens."""
    return functools.partial(_rows, source=source, kind=kind)


def _rows(shard: rd.Shard, source: Any, kind: str) -> rd.BaseNode[Any]:
    reader = rd.Reader(source, shard)
    return rd.Map(reader, _tokens_of_bytes) if kind == "tar" else reader


def _tokens_of_bytes(row: dict[str, Any]) -> dict[str, Any]:
    return {"tokens": np.frombuffer(row["bin"], dtype=np.int32)}
