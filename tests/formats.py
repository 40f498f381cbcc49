"""Files of all formats that a source can read, written as their own tools write them."""

import bz2
import gzip
import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq


def write_table(
    path: Path, columns: Any, rows: int | None = None, *, is_stream: bool = False, compression: str | None = None
) -> Path:
    """Write columns as a Parquet or Arrow file, by the suffix of `path`, in fragments of so many `rows`."""
    table = pa.table(columns) if isinstance(columns, dict) else columns
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=rows)
    else:
        new = pa.ipc.new_stream if is_stream else pa.ipc.new_file
        with new(path, table.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
            writer.write_table(table, max_chunksize=rows)
    return path


def lines(rows: Sequence[Any]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def pack(data: bytes, name: str) -> bytes:
    """As a file of that name is compressed."""
    if name.endswith(".gz"):
        return gzip.compress(data)
    if name.endswith(".bz2"):
        return bz2.compress(data)
    if name.endswith(".zst"):
        sink = pa.BufferOutputStream()
        with pa.CompressedOutputStream(sink, "zstd") as stream:
            stream.write(data)
        return sink.getvalue().to_pybytes()
    return data


def write_jsonl(path: Path, rows: Sequence[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pack(lines(rows), path.name))
    return path


def tar_bytes(members: Sequence[tuple[str, bytes]]) -> bytes:
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w") as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return sink.getvalue()


def write_tar(path: Path, samples: Sequence[Mapping[str, bytes]], first: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    members = [(f"{first + i:06d}.{ext}", data) for i, sample in enumerate(samples) for ext, data in sample.items()]
    path.write_bytes(pack(tar_bytes(members), path.name))
    return path


CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "float64": 6, "float32": 7, "uint16": 8}


def write_megatron(path: Path, docs: Sequence[Sequence[int]], dtype: str = "uint16", sentences: int = 1) -> Path:
    """``path`` without its suffix; with ``sentences`` each document is stored as so many sequences."""
    path.parent.mkdir(parents=True, exist_ok=True)
    parts = [part for doc in docs for part in np.array_split(np.array(doc, dtype=dtype), sentences)]
    lengths = np.array([len(part) for part in parts], dtype=np.int32)
    size = np.dtype(dtype).itemsize
    places = np.concatenate([[0], np.cumsum(lengths.astype(np.int64) * size)])[:-1].astype(np.int64)
    first = np.arange(0, len(parts) + 1, sentences, dtype=np.int64)
    header = b"MMIDIDX\0\0" + np.int64(1).tobytes() + np.uint8(CODES[dtype]).tobytes()
    counts = np.array([len(parts), len(first)], dtype=np.int64).tobytes()
    bin_path = path.with_name(path.name + ".bin")
    bin_path.write_bytes(b"".join(part.tobytes() for part in parts))
    path.with_name(path.name + ".idx").write_bytes(
        header + counts + lengths.tobytes() + places.tobytes() + first.tobytes()
    )
    return bin_path
