"""What does a mixture cost, by the number of its sources?

    python benchmarks/bench_mixture.py [--quick]

The same documents, 250 tokens on average, packed into samples of 4,096 from 8 logical shards: by one `rd.Reader` of all files,
and by mixtures of 1, 2, 16, 64 and 200 sources that share the files, from Arrow IPC and Parquet, by samples and by tokens. Each
contender runs in a process of its own, round after round in turns: CPU time of a document in the 150 batches after the first
few, in which each source is read for the first times, and in 6,000 later ones (Parquet, which is decoded: 600); the time to the
first batch, and the largest resident memory. Ratios are those to the one reader of the same format.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from corpora import Corpus, source_of, write

import rescale_data as rd

NUM_FILES, SIZES = 200, (1, 2, 16, 64, 200)
SEQ_LEN, SHARDS, BATCH, EARLY = 4096, 8, 8, 150


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="few documents, one round, few sizes")
    parser.add_argument("--one", nargs=5, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(run(*given.one)))
        return
    rounds, rows, sizes = (1, 256, (1, 16, 200)) if given.quick else (3, 1024, SIZES)
    print(f"{platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}, torch {torch.__version__}")
    contenders = [(0, "samples"), *((size, unit) for unit in ("samples", "tokens") for size in sizes)]
    with tempfile.TemporaryDirectory() as folder:
        for kind in ("arrow", "parquet"):
            for number in range(NUM_FILES):
                write(kind, Path(folder) / kind / f"{number:03d}", Corpus(rows, seed=number))
        for kind in ("arrow", "parquet"):
            batches = str(50 if given.quick else 6000 if kind == "arrow" else 600)
            found: dict[Any, list[dict[str, float]]] = {}
            for _ in range(rounds):
                for size, unit in contenders:
                    found.setdefault((size, unit), []).append(child(kind, size, unit, folder, batches))
            show(kind, found)


def child(kind: str, size: int, unit: str, folder: str, batches: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--one", kind, str(size), unit, folder, batches]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def run(kind: str, size: str, unit: Any, folder: str, batches: str) -> dict[str, float]:
    """One contender: microseconds of CPU a document, at first and later, seconds to the first batch, MiB."""
    torch.set_num_threads(1)
    num, paths = int(size), [f"{folder}/{kind}/{number:03d}" for number in range(NUM_FILES)]
    parts = [[f"{path}/*" for path in paths[first :: max(1, num)]] for first in range(max(1, num))]
    sources = {f"s{i:03d}": source_of(kind, part, Path(folder) / "index") for i, part in enumerate(parts)}

    def pipeline(shard: rd.Shard) -> rd.BaseNode[Any]:
        nodes: dict[str, Any] = {name: rd.Reader(source, shard) for name, source in sources.items()}
        weights = {name: 1 + i % 3 for i, name in enumerate(nodes)}
        column = "tokens" if unit == "tokens" else None
        rows = rd.WeightedSampler(nodes, weights, unit=unit, column=column) if num else nodes["s000"]
        return rd.TokenPacker(rows, column="tokens", seq_len=SEQ_LEN, eos_id=0)

    before = _now()
    loader = rd.DataLoader(pipeline, global_batch_size=BATCH, num_logical_shards=SHARDS, repeat=True)
    stream = iter(loader)
    next(stream)
    first = _now() - before
    for _ in range(2 * SHARDS // BATCH):
        next(stream)
    early = _a_document(stream, EARLY)
    _a_document(stream, int(batches) // 6)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"early": early, "cpu": _a_document(stream, int(batches)), "first": float(first[0]), "memory": memory}


def _a_document(stream: Iterator[Any], num_batches: int) -> float:
    """Microseconds of CPU."""
    before = _now()
    for _ in range(num_batches):
        next(stream)
    return float((_now() - before)[0]) / (num_batches * BATCH * SEQ_LEN / 250) * 1e6


def _now() -> np.ndarray:
    return np.array([time.process_time(), time.perf_counter()])


def show(kind: str, found: dict[Any, list[dict[str, float]]]) -> None:
    one = found[0, "samples"]
    print(f"\n{kind}: median (least - most) of {len(one)} rounds; ratios are of CPU time, round by round")
    print("sources by       us a document: at first        running    x one reader         first batch, x      MiB")
    for (size, unit), rounds in found.items():
        early, cpu, memory = ([each[key] for each in rounds] for key in ("early", "cpu", "memory"))
        ratio, first = ([a[key] / b[key] for a, b in zip(rounds, one, strict=True)] for key in ("cpu", "first"))
        print(
            f"{size or 'reader':>7} {unit if size else '':8} {statistics.median(early):8.2f} {_spread(cpu, 2):>22} "
            f"{_spread(ratio, 2):>22} {_spread(first, 1):>20} {statistics.median(memory):8.0f}"
        )


def _spread(values: list[float], digits: int) -> str:
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} - {max(values):.{digits}f})"


if __name__ == "__main__":
    main()
