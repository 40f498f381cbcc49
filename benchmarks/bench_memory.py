"""What does one process cost that serves the logical shards of many?

    python benchmarks/bench_memory.py [--quick]

Parquet with row groups of 64 MB decoded, N = 2048 logical shards, a cache of 256 MB: less than the row groups that are open at
once. One epoch of rank 0 of W = 64 (32 shards), and the same number of steps, all of it, on W = 1 (2048 shards), as a
64-GPU run is debugged on one. Read amplification is what was decoded over what was drawn; memory is the most that was
resident above the start, in a fresh process each: what only this process holds, and what it has mapped of files, which the
system takes back when it needs room. "again" decodes a row group anew whenever it has left the cache. Two epochs show
whether memory grows.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import platform
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import rescale_data as rd
from rescale_data.sources.parquet import ParquetSource

SHARDS, BATCH = 2048, 512
GROUP_BYTES, TOKENS_A_ROW = 2**26, 1024
CACHE = 2**28
MIB = 2**20


@dataclass(frozen=True)
class Case:
    name: str
    world_size: int
    on_disk: bool
    epochs: int = 1
    steps: int | None = None  # of an epoch; None: all


def write_corpus(folder: Path, groups: int) -> None:
    rows = GROUP_BYTES // (4 * TOKENS_A_ROW)
    rng = np.random.default_rng(0)
    offsets = pa.array(np.arange(rows + 1, dtype=np.int32) * TOKENS_A_ROW)
    for number in range(groups):
        tokens = pa.array(rng.integers(0, 50_000, rows * TOKENS_A_ROW, dtype=np.int32))
        table = pa.table({"tokens": pa.ListArray.from_arrays(offsets, tokens)})
        pq.write_table(table, folder / f"{number:03d}.parquet", row_group_size=rows, use_dictionary=False)


def measure(case: Case, folder: str, cache_dir: str, answers: Any) -> None:
    """One case, in a process of its own."""
    decoded = [0]
    decode = ParquetSource._decode

    def count(self: Any, fragment: int, columns: Any) -> Any:
        table = decode(self, fragment, columns)
        decoded[0] += table.nbytes
        return table

    ParquetSource._decode = count  # type: ignore[method-assign]
    source = rd.ParquetSource(folder, cache_bytes=CACHE, cache_dir=cache_dir if case.on_disk else None)
    loader = rd.DataLoader(
        source,
        global_batch_size=BATCH,
        micro_batch_size=BATCH // case.world_size,
        num_logical_shards=SHARDS,
        dp_rank=0,
        dp_world_size=case.world_size,
    )
    with Peak() as peak:
        for _ in range(case.epochs):
            decoded[0], rows, started = 0, 0, time.perf_counter()
            for batch in itertools.islice(loader, case.steps):
                rows += len(batch["tokens"])
            seconds = time.perf_counter() - started
            answers.put((rows / seconds, decoded[0] / (rows * TOKENS_A_ROW * 4), *peak.since_last()))


class Peak:
    """The most resident memory while it is open, above what it was: of this process alone, and of mapped files."""

    def __enter__(self) -> Peak:
        self._start, self._done = _resident(), threading.Event()
        self._most = np.zeros_like(self._start)
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def since_last(self) -> list[int]:
        """Bytes of both, since this was last asked."""
        most, self._most = self._most, np.zeros_like(self._start)
        return most.tolist()

    def _watch(self) -> None:
        while not self._done.wait(0.005):
            self._most = np.maximum(self._most, _resident() - self._start)


def _resident() -> np.ndarray:
    resident, mapped = (int(field) for field in Path("/proc/self/statm").read_text().split()[1:3])
    return np.array([resident - mapped, mapped]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--quick", action="store_true", help="a quarter of the data")
    groups = 8 if arguments.parse_args().quick else 32
    context = multiprocessing.get_context("spawn")
    print(f"{platform.machine()}, {os.cpu_count()} cores; {groups} row groups of {GROUP_BYTES // MIB} MB, N={SHARDS}")
    print(f"{'':34}{'rows/s':>10}{'amplification':>15}{'MB above start':>16}{'MB mapped':>12}")
    with tempfile.TemporaryDirectory() as folder:
        write_corpus(Path(folder), groups)
        for case in (
            Case("W=64, rank 0", 64, on_disk=False),
            Case("W=1, decoded again", 1, on_disk=False, steps=1),
            Case("W=1, cut up, beyond it on disk", 1, on_disk=True, epochs=2),
        ):
            answers: Any = context.Queue()
            with tempfile.TemporaryDirectory() as cache_dir:
                process = context.Process(target=measure, args=(case, folder, cache_dir, answers))
                process.start()
                for epoch in range(case.epochs):
                    rate, amplification, *most = answers.get()
                    own, mapped = (nbytes / MIB for nbytes in most)
                    name = case.name if not epoch else "    its next epoch"
                    print(f"{name:34}{rate:>10,.0f}{amplification:>15.2f}{own:>16,.0f}{mapped:>12,.0f}", flush=True)
                process.join()


if __name__ == "__main__":
    main()
