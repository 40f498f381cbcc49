"""The same corpus as Parquet, Arrow, JSON lines, tar and Megatron files: the same batches, whatever it is read from.

    python examples/all_formats.py

What the order depends on is which rows lie in a fragment: a row group, some record batches, 1,024 lines. The files here agree
in that, and so in every batch; files that do not still agree in the rows of an epoch.
"""

from __future__ import annotations

import functools
import gzip
import io
import json
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

import rescale_data as rd

ROWS, ROWS_A_FILE, ROWS_A_FRAGMENT = 6144, 3072, 1024

Documents = list[list[int]]


def parquet(path: Path, documents: Documents) -> None:
    pq.write_table(pa.table({"tokens": documents}), f"{path}.parquet", row_group_size=ROWS_A_FRAGMENT)


def arrow(path: Path, documents: Documents) -> None:
    table = pa.table({"tokens": documents})
    with pa.ipc.new_file(f"{path}.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=ROWS_A_FRAGMENT)


def jsonl(path: Path, documents: Documents) -> None:
    path.with_suffix(".jsonl").write_text("".join(json.dumps({"tokens": d}) + "\n" for d in documents))


def jsonl_gz(path: Path, documents: Documents) -> None:
    lines = "".join(json.dumps({"tokens": d}) + "\n" for d in documents)
    path.with_suffix(".jsonl.gz").write_bytes(gzip.compress(lines.encode()))


def tar(path: Path, documents: Documents) -> None:
    with tarfile.open(path.with_suffix(".tar"), "w") as file:
        for number, document in enumerate(documents):
            data = json.dumps(document).encode()
            info = tarfile.TarInfo(f"{number:06d}.json")
            info.size = len(data)
            file.addfile(info, io.BytesIO(data))


def megatron(path: Path, documents: Documents) -> None:
    """As Megatron-LM's ``tools/preprocess_data.py`` writes them, in int64."""
    lengths = np.array([len(d) for d in documents], dtype=np.int32)
    places = (np.cumsum(lengths.astype(np.int64)) - lengths) * 8
    header = b"MMIDIDX\0\0" + np.int64(1).tobytes() + np.uint8(5).tobytes()
    counts = np.array([len(documents), len(documents) + 1], dtype=np.int64)
    parts = (counts, lengths, places, np.arange(len(documents) + 1, dtype=np.int64))
    path.with_suffix(".bin").write_bytes(np.concatenate(documents).astype(np.int64).tobytes())
    path.with_suffix(".idx").write_bytes(header + b"".join(part.tobytes() for part in parts))


Write = Callable[[Path, Documents], None]
FORMATS: dict[str, tuple[Write, Callable[[Path], Any]]] = {
    "Parquet": (parquet, rd.ParquetSource),
    "Arrow": (arrow, rd.ArrowSource),
    "JSON lines": (jsonl, rd.JsonlSource),
    "JSON lines, .gz": (jsonl_gz, rd.JsonlSource),
    "tar": (tar, rd.WebDatasetSource),
    "Megatron": (megatron, rd.MegatronSource),
}


def pipeline(shard: rd.Shard, source: Any) -> rd.BaseNode[Any]:
    rows = rd.Map(rd.Reader(source, shard, shuffle=256), tokens)
    return rd.TokenPacker(rows, column="tokens", seq_len=128, eos_id=0)


def tokens(row: dict[str, Any]) -> dict[str, Any]:
    return {"tokens": np.array(json.loads(row["json"])) if "json" in row else row["tokens"]}


def batches(source: Any, steps: int = 40) -> torch.Tensor:
    loader = rd.DataLoader(functools.partial(pipeline, source=source), global_batch_size=8, repeat=True)
    return torch.cat([batch["tokens"] for _, batch in zip(range(steps), loader, strict=False)])


def main() -> int:
    rng = np.random.default_rng(0)
    documents = [rng.integers(1, 1000, length).tolist() for length in rng.integers(5, 100, ROWS)]
    found: dict[str, torch.Tensor] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, (write, source_of) in FORMATS.items():
            files = Path(folder) / name
            files.mkdir()
            for number, first in enumerate(range(0, ROWS, ROWS_A_FILE)):
                write(files / f"part-{number}", documents[first : first + ROWS_A_FILE])
            source = source_of(files)
            found[name] = batches(source)
            same = torch.equal(found[name], found["Parquet"])
            print(
                f"{name:16} {source.num_rows} rows, {len(source.fragments) - 1} fragments, the batches of Parquet: {same}"
            )
    return 0 if all(torch.equal(batch, found["Parquet"]) for batch in found.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
