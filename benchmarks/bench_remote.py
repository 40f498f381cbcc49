"""Does reading files over a network with 50 ms a request keep up with reading them from a local disk?

    python benchmarks/bench_remote.py [--quick]

One process reads rows of each format, with a cache that holds a part of them: from a local folder, through a filesystem that
waits 50 ms before each request, through the same one without the wait, and without reading ahead. The budget is 90 % of local.
Local files are mapped and cost nothing to fetch; "50 / 0 ms" shows what of the difference is latency.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import fsspec
from corpora import FORMATS, Corpus, rows_of, source_of, write
from fsspec.implementations.local import LocalFileSystem

import rescale_data as rd
from rescale_data.sources.decoded.cache import cache

SHARDS = 8
WARM_UP = 1100
"""Batches: then each shard is in its second window of rows."""


class Far(LocalFileSystem):
    """Local files, as if each request for some of their bytes took a while."""

    protocol = "far"
    cachable = False
    seconds: ClassVar[float] = 0.05

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        time.sleep(type(self).seconds)
        with open(path, "rb", buffering=0) as file:
            file.seek(start or 0)
            return file.read(-1 if end is None else end - file.tell())


class Near(Far):
    """The same without the wait."""

    protocol = "near"
    seconds: ClassVar[float] = 0.0


def rate(source: Any, kind: str, num_rows: int, step: Callable[[], object] = lambda: None) -> float:
    """Rows a second of an endless stream in its course, with a training step after each batch."""
    cache().clear()
    loader = rd.DataLoader(
        rows_of(source, kind), global_batch_size=SHARDS, num_logical_shards=SHARDS, collate_fn=len, repeat=True
    )
    batches = iter(loader)
    for _ in range(WARM_UP):
        next(batches)
    started = time.perf_counter()
    for _ in range(num_rows // SHARDS):
        next(batches)
        step()
    return num_rows / (time.perf_counter() - started)


def contenders(kind: str, folder: Path, num_rows: int) -> dict[str, Callable[[], float]]:
    index = folder.parent / "index"
    room = 4 * SHARDS * source_of(kind, str(folder), index).fragment_bytes
    sources = {
        "local": source_of(kind, str(folder), index, cache_bytes=room),
        "0 ms": source_of(kind, f"near://{folder}", index, cache_bytes=room),
        "50 ms": source_of(kind, f"far://{folder}", index, cache_bytes=room),
        "50 ms, not ahead": source_of(
            kind, f"far://{folder}", index, cache_bytes=room, remote=rd.Remote(read_ahead=False)
        ),
    }
    return {name: lambda source=source: rate(source, kind, num_rows) for name, source in sources.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="fewer rows and rounds")
    quick = parser.parse_args().quick
    fsspec.register_implementation("far", Far, clobber=True)
    fsspec.register_implementation("near", Near, clobber=True)
    corpus, rounds = Corpus(num_rows=80_000), 3 if quick else 9
    print(f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; {corpus.num_rows:,} rows")
    print(f"{'rows/s':10}{'local':>10}{'0 ms':>10}{'50 ms':>10}{'not ahead':>10}{'50 ms / local':>24}{'50 / 0 ms':>24}")
    with tempfile.TemporaryDirectory() as root:
        for kind in FORMATS:
            write(kind, Path(root) / kind, corpus)
            run = contenders(kind, Path(root) / kind, corpus.num_rows)
            found: dict[str, list[float]] = {name: [] for name in run}
            for number in range(rounds):
                for name in run:
                    if name != "50 ms, not ahead" or not number:  # once is enough to wait for that
                        found[name].append(run[name]())
            rates = "".join(f"{statistics.median(values):>10,.0f}" for values in found.values())
            shares = (share(found["50 ms"], found[name]) for name in ("local", "0 ms"))
            print(f"{kind:10}{rates}" + "".join(f"{shown:>24}" for shown in shares), flush=True)


def share(ours: list[float], others: list[float]) -> str:
    """Median and range of the ratio, round by round."""
    ratios = [a / b for a, b in zip(ours, others, strict=True)]
    return f"{statistics.median(ratios):.0%} ({min(ratios):.0%} to {max(ratios):.0%})"


if __name__ == "__main__":
    main()
