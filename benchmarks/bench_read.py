"""How fast are packed batches read, next to what the memory and the file format allow?

    python benchmarks/bench_read.py [--quick]

One process makes packed int64 batches [8, 4096] from shuffled documents. In turns, round after round, so that a noisy machine
is noisy for all: the same tokens copied from a memory map (the limit), a rescalable reader that keeps tokens in Python lists
(what one writes first: its state is a row and what is left of it), and ours, through `rd.DataLoader(num_workers=0)`. Each has a
process of its own and goes on where its last round ended. The page cache is warm: this measures the reader and not the disk.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

import rescale_data as rd

MICRO_BATCH, SEQ_LEN, EOS = 8, 4096, 2
TOKENS = MICRO_BATCH * SEQ_LEN
ROW_GROUP = 1024
CACHE = 2**26  # less than the corpus, so that what is decoded is decoded in every epoch


@dataclass(frozen=True)
class Scale:
    files: int
    batches: int  # a round, of the fast contenders
    slow_batches: int
    rounds: int


_WARM_UP = 3  # rounds that do not count
FULL, QUICK = Scale(8, 4000, 20, 7), Scale(4, 400, 5, 3)


@dataclass(frozen=True)
class Corpus:
    """The same random documents, 200 to 1,400 tokens each, as Arrow, as Parquet, and as bare tokens."""

    folder: Path

    def write(self, files: int) -> None:
        folder = self.folder
        rng = np.random.default_rng(0)
        for kind in ("arrow", "parquet", "flat"):
            (folder / kind).mkdir()
        for number in range(files):
            lengths = rng.integers(200, 1400, 8 * ROW_GROUP)
            tokens = rng.integers(3, 50_000, lengths.sum()).astype(np.uint16)
            self._write(f"{number:03d}", tokens, np.concatenate([[0], np.cumsum(lengths)]))

    def _write(self, name: str, tokens: np.ndarray, ends: np.ndarray) -> None:
        table = _table(ends, pa.array(tokens))
        with pa.ipc.new_file(self.folder / "arrow" / f"{name}.arrow", table.schema) as writer:
            writer.write_table(table, max_chunksize=ROW_GROUP)
        path = self.folder / "parquet" / f"{name}.parquet"
        pq.write_table(_table(ends, pa.array(tokens.astype(np.int32))), path, row_group_size=ROW_GROUP)
        tokens.tofile(self.folder / "flat" / f"{name}.bin")

    def paths(self, kind: str) -> list[Path]:
        return sorted((self.folder / kind).iterdir())


Make = Callable[[Corpus], Iterator[Any]]


def _table(ends: np.ndarray, values: pa.Array) -> pa.Table:
    return pa.table({"tokens": pa.ListArray.from_arrays(pa.array(ends, pa.int32()), values)})


# What is compared: each yields batches without end.


def memory_map(corpus: Corpus) -> Iterator[Any]:
    """No documents, no order, no samples: bytes from a mapped file into an int64 array."""
    while True:
        for path in corpus.paths("flat"):
            tokens = np.asarray(np.memmap(path, dtype=np.uint16, mode="r"))
            for start in range(0, len(tokens) - TOKENS, TOKENS):
                yield torch.from_numpy(tokens[start : start + TOKENS].astype(np.int64)).view(MICRO_BATCH, SEQ_LEN)


class PythonLists:
    """A reader of one shard that can be resumed and rescaled, and holds every token as a Python int."""

    def __init__(self, corpus: Corpus) -> None:
        self._tables = [pa.ipc.open_file(pa.memory_map(str(path))).read_all() for path in corpus.paths("arrow")]
        self._starts = np.cumsum([0, *(len(table) for table in self._tables)])
        self._order = np.random.default_rng(0).permutation(self._starts[-1]).tolist()
        self.row, self.left = 0, []

    def __next__(self) -> Any:
        return torch.stack([torch.tensor(self._sample()) for _ in range(MICRO_BATCH)])

    def __iter__(self) -> Iterator[Any]:
        return self

    def _sample(self) -> list[int]:
        while len(self.left) < SEQ_LEN:
            row = self._order[self.row % len(self._order)]
            file = int(np.searchsorted(self._starts, row, side="right")) - 1
            self.left += [*self._tables[file]["tokens"][row - self._starts[file]].as_py(), EOS]
            self.row += 1
        sample, self.left = self.left[:SEQ_LEN], self.left[SEQ_LEN:]
        return sample


def parquet_decoding(corpus: Corpus) -> Iterator[Any]:
    """pyarrow alone: row groups one after the other, into Arrow arrays; as many tokens as a batch has count as a batch."""
    tokens = 0
    while True:
        for path in corpus.paths("parquet"):
            file = pq.ParquetFile(path)
            for number in range(file.num_row_groups):
                tokens += len(file.read_row_group(number, columns=["tokens"])["tokens"].chunk(0).values)
                while tokens >= TOKENS:
                    tokens -= TOKENS
                    yield None


def pipeline(source: Any, shard: rd.Shard) -> rd.BaseNode[Any]:
    return rd.TokenPacker(rd.Reader(source, shard), column="tokens", seq_len=SEQ_LEN, eos_id=EOS)


def ours(source: Any) -> Iterator[Any]:
    made = partial(pipeline, source)
    loader = rd.DataLoader(
        made, global_batch_size=MICRO_BATCH, num_logical_shards=MICRO_BATCH, repeat=True, num_workers=0
    )
    return iter(loader)


def arrow(corpus: Corpus) -> Iterator[Any]:
    return ours(rd.ArrowSource(corpus.folder / "arrow", cache_bytes=CACHE))


def parquet(corpus: Corpus) -> Iterator[Any]:
    return ours(rd.ParquetSource(corpus.folder / "parquet", cache_bytes=CACHE))


# Measuring


def microseconds(batches: Iterator[Any], num_batches: int) -> float:
    """Of a batch. All shards come to a new fragment after about 200 batches, so that a multiple of 200 holds the same share
    of decoding as an epoch."""
    start = time.perf_counter()
    for _ in range(num_batches):
        next(batches)
    return (time.perf_counter() - start) / num_batches * 1e6


def measure(corpus: Corpus, scale: Scale) -> dict[str, list[float]]:
    contenders = {
        "memory map": Contender(memory_map, corpus, scale.batches),
        "Python lists": Contender(PythonLists, corpus, scale.slow_batches),
        "ours, Arrow": Contender(arrow, corpus, scale.batches),
        "pyarrow's Parquet decoding": Contender(parquet_decoding, corpus, scale.batches),
        "ours, Parquet": Contender(parquet, corpus, scale.batches),
    }
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(scale.rounds + _WARM_UP):
        for name, contender in contenders.items():
            time_of_batch = contender.run()
            if number >= _WARM_UP:
                times[name].append(time_of_batch)
    for contender in contenders.values():
        contender.close()
    return times


class Contender:
    """A process of its own, so that nobody's memory is another's, which works when it is told to and waits otherwise."""

    def __init__(self, make: Make, corpus: Corpus, num_batches: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, make, corpus, num_batches))
        self._process.start()

    def run(self) -> float:
        """Microseconds of a batch, over one round."""
        self._pipe.send(True)
        return self._pipe.recv()

    def close(self) -> None:
        self._pipe.send(False)
        self._process.join()


def _serve(pipe: Connection, make: Make, corpus: Corpus, num_batches: int) -> None:
    torch.set_num_threads(1)
    batches = make(corpus)
    while pipe.recv():
        pipe.send(microseconds(batches, num_batches))


def report(times: dict[str, list[float]]) -> str:
    lines = [f"{'packed int64 [8, 4096]':28} {'us/batch':>9} {'min':>9} {'max':>9} {'Mtokens/s':>10}"]
    for name, rounds in times.items():
        middle = statistics.median(rounds)
        lines.append(f"{name:28} {middle:9.1f} {min(rounds):9.1f} {max(rounds):9.1f} {TOKENS / middle:10.0f}")
    lines += ["", f"{'speed of ours, round by round':44} {'median':>8} {'min':>8} {'max':>8}  budget"]
    for mine, other, unit, budget in (
        ("ours, Arrow", "memory map", "%", 25),
        ("ours, Arrow", "Python lists", "x", 50),
        ("ours, Parquet", "pyarrow's Parquet decoding", "%", 85),
    ):
        factor = 100 if unit == "%" else 1
        ratios = [b / a * factor for a, b in zip(times[mine], times[other], strict=True)]
        values = " ".join(f"{value:7.1f}{unit}" for value in (statistics.median(ratios), min(ratios), max(ratios)))
        lines.append(f"{mine + ' / ' + other:44} {values}  >= {budget}{unit}")
    return "\n".join(lines)


def machine() -> str:
    model = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        info = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.split(":")[1].strip() for line in info if line.startswith("model name")), model)
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, pyarrow {pa.__version__}"
    return f"{model}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; {versions}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small corpus and few rounds, to see that it runs")
    scale = QUICK if parser.parse_args().quick else FULL
    with tempfile.TemporaryDirectory() as folder:
        corpus = Corpus(Path(folder))
        corpus.write(scale.files)
        times = measure(corpus, scale)
    print(machine())
    print(report(times))


if __name__ == "__main__":
    main()
