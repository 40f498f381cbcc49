"""How fast are rows of each format read, beside the library that a user would otherwise read it with?

    python benchmarks/bench_sources.py [--quick]

One corpus in every format; each contender yields an epoch of rows as ``{"tokens": array}``, one process, shuffled as it
knows how to: ours by fragments and windows of 1,024 rows, the others in files' order or, where they have one, through a
buffer of 1,024 rows. Rounds are taken in turns. "ours, packed" is the same source through a TokenPacker of 2,048 tokens.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from corpora import FORMATS, Corpus, rows_of, source_of, write

import rescale_data as rd
from rescale_data.sources.decoded.cache import cache

SHARDS, SEQ_LEN = 16, 2048
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pyarrow_parquet(folder: Path) -> Iterator[Any]:
    for path in sorted(folder.glob("*.parquet")):
        for batch in pq.ParquetFile(path).iter_batches(1024):
            yield from _arrays(batch.column(0))


def pyarrow_arrow(folder: Path) -> Iterator[Any]:
    for path in sorted(folder.glob("*.arrow")):
        with pa.memory_map(str(path)) as file:
            reader = pa.ipc.open_file(file)
            for number in range(reader.num_record_batches):
                yield from _arrays(reader.get_batch(number).column(0))


def _arrays(column: Any) -> Iterator[Any]:
    values, offsets = column.values.to_numpy(), column.offsets.to_numpy()
    return (values[start:stop].copy() for start, stop in itertools.pairwise(offsets))


def hf(kind: str, suffix: str) -> Callable[[Path], Iterator[Any]]:
    def read(folder: Path) -> Iterator[Any]:
        import datasets

        files = sorted(map(str, folder.glob(f"*.{suffix}")))
        stream = datasets.load_dataset(kind, data_files=files, split="train", streaming=True, cache_dir=str(folder))
        return iter(stream.shuffle(seed=0, buffer_size=1024).with_format("numpy"))

    return read


def json_lines(folder: Path) -> Iterator[Any]:
    for path in sorted(folder.glob("*.jsonl")):
        with open(path, "rb") as file:
            for line in file:
                yield np.array(json.loads(line)["tokens"])


def webdataset_tar(folder: Path) -> Iterator[Any]:
    import webdataset

    files = sorted(map(str, folder.glob("*.tar")))
    return (
        np.frombuffer(row["bin"], dtype=np.int32)
        for row in webdataset.WebDataset(files, shardshuffle=False).shuffle(1024)
    )


def memmap(folder: Path) -> Iterator[Any]:
    """As Megatron-LM's ``IndexedDataset`` does, documents permuted as a whole."""
    for path in sorted(folder.glob("*.bin")):
        index = np.memmap(path.with_suffix(".idx"), mode="r", dtype=np.uint8)
        count = int(index[18:26].view(np.int64)[0])
        lengths = index[34 : 34 + 4 * count].view(np.int32)
        places = index[34 + 4 * count : 34 + 12 * count].view(np.int64)
        tokens = np.memmap(path, mode="r", dtype=np.int32)
        for i in np.random.default_rng(0).permutation(count).tolist():
            start = places[i] // 4
            yield np.array(tokens[start : start + lengths[i]])


OTHERS: dict[str, dict[str, Callable[[Path], Iterator[Any]]]] = {
    "parquet": {"pyarrow": pyarrow_parquet, "HF datasets, streaming": hf("parquet", "parquet")},
    "arrow": {"pyarrow, mapped": pyarrow_arrow, "HF datasets, streaming": hf("arrow", "arrow")},
    "jsonl": {"json, line by line": json_lines, "HF datasets, streaming": hf("json", "jsonl")},
    "tar": {"webdataset": webdataset_tar},
    "megatron": {"numpy.memmap": memmap},
}


def ours(source: Any, kind: str) -> int:
    cache().clear()
    pipeline = rows_of(source, kind)
    return sum(1 for shard in range(SHARDS) for _ in pipeline(rd.Shard(shard, SHARDS)))


def packed(source: Any, kind: str) -> int:
    """The rows that a loader has packed."""
    cache().clear()

    def pipeline(shard: rd.Shard) -> rd.BaseNode[Any]:
        return rd.TokenPacker(rows_of(source, kind)(shard), column="tokens", seq_len=SEQ_LEN, eos_id=0)

    loader = rd.DataLoader(pipeline, global_batch_size=8, num_logical_shards=SHARDS)
    for _ in loader:
        pass
    return source.num_rows


def contenders(kind: str, folder: Path) -> dict[str, Callable[[], int]]:
    source = source_of(kind, str(folder), folder.parent / "index")
    run = {name: lambda read=read: sum(1 for _ in read(folder)) for name, read in OTHERS[kind].items()}
    return {**run, "ours, rows": lambda: ours(source, kind), "ours, packed": lambda: packed(source, kind)}


def rate(work: Callable[[], int]) -> float:
    started = time.perf_counter()
    rows = work()
    return rows / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="fewer rows and rounds")
    quick = parser.parse_args().quick
    corpus, rounds = Corpus(num_rows=10_000 if quick else 20_000), 3 if quick else 5
    length = corpus.num_tokens / corpus.num_rows
    machine = f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    print(f"{machine}; {corpus.num_rows:,} rows of {length:.0f} tokens")
    print(f"{'':34}{'rows/s':>10}{'min':>10}{'max':>10}{'Mtokens/s':>12}{'ours, rows, is':>16}")
    with tempfile.TemporaryDirectory() as root:
        for kind in FORMATS:
            write(kind, Path(root) / kind, corpus)
            run = contenders(kind, Path(root) / kind)
            found: dict[str, list[float]] = {name: [] for name in run}
            for _ in range(rounds):
                for name, work in run.items():
                    found[name].append(rate(work))
            for name, rates in found.items():
                middle = statistics.median(rates)
                ratios = [mine / other for mine, other in zip(found["ours, rows"], rates, strict=True)]
                than = "" if name.startswith("ours") else f"{statistics.median(ratios):.2f} x"
                shown = "".join(f"{value:>10,.0f}" for value in (middle, min(rates), max(rates)))
                print(f"{kind + ': ' + name:34}{shown}{middle * length / 1e6:>12.1f}{than:>16}", flush=True)


if __name__ == "__main__":
    main()
