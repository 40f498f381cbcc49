"""How fast are packed batches read, next to what the memory and the file format allow?

    python benchmarks/bench_read.py [--quick]

One process makes packed int64 batches [8, 4096] from shuffled documents. In turns, round after round, so that a noisy machine
is noisy for all: the same tokens copied from a memory map (the limit), a rescalable reader that keeps tokens in Python lists
(what one writes first: its state is a row and what is left of it), a packer in NumPy over row groups of Parquet, and ours,
through `rd.DataLoader(num_workers=0)`, with a cache smaller than the corpus, and, "all mapped", with the default one, which
keeps the files mapped as the memory map does. Each has a process of its own and goes on where its last round ended; first
epochs are measured apart, in new processes. The page cache is warm: this measures the reader and not the disk.

What counts is CPU time, which neighbours disturb less; wall time is beside it. The limit is told twice: in order, and with rows
of 4,096 tokens in random order, which is what any shuffle has to do at least.
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
from corpora import write_megatron
from numpy_packer import NumpyPacker
from torchdata.stateful_dataloader import StatefulDataLoader

import rescale_data as rd

MICRO_BATCH, SEQ_LEN, EOS = 8, 4096, 2
TOKENS = MICRO_BATCH * SEQ_LEN
ROW_GROUP = 1024
CACHE = 2**26  # less than the corpus, so that what is decoded is decoded, and what is mapped is mapped, in every epoch


@dataclass(frozen=True)
class Scale:
    files: int
    large_files: int  # 26 MB each
    batches: int  # a round, of the fast contenders
    slow_batches: int
    rounds: int


_WARM_UP = 3  # rounds that do not count
FULL, QUICK = Scale(8, 18, 4000, 20, 7), Scale(4, 4, 400, 5, 3)


@dataclass(frozen=True)
class Corpus:
    """The same random documents, 200 to 1,400 tokens each, as Arrow, as Parquet, as Megatron's and as bare tokens."""

    folder: Path
    dtype: type[np.integer[Any]] = np.uint16

    def write(self, files: int) -> None:
        folder = self.folder
        rng = np.random.default_rng(0)
        for kind in ("arrow", "parquet", "megatron", "flat"):
            (folder / kind).mkdir(parents=True)
        for number in range(files):
            lengths = rng.integers(200, 1400, 8 * ROW_GROUP)
            tokens = rng.integers(3, 50_000, lengths.sum()).astype(self.dtype)
            self._write(f"{number:03d}", tokens, np.concatenate([[0], np.cumsum(lengths)]))

    def _write(self, name: str, tokens: np.ndarray, ends: np.ndarray) -> None:
        table = _table(ends, pa.array(tokens))
        with pa.ipc.new_file(self.folder / "arrow" / f"{name}.arrow", table.schema) as writer:
            writer.write_table(table, max_chunksize=ROW_GROUP)
        path = self.folder / "parquet" / f"{name}.parquet"
        pq.write_table(_table(ends, pa.array(tokens.astype(np.int32))), path, row_group_size=ROW_GROUP)
        write_megatron(self.folder / "megatron" / name, tokens, ends)
        tokens.tofile(self.folder / "flat" / f"{name}.bin")

    def flat(self) -> list[np.ndarray]:
        return [np.asarray(np.memmap(path, dtype=self.dtype, mode="r")) for path in self.paths("flat")]

    def paths(self, kind: str) -> list[Path]:
        return sorted((self.folder / kind).iterdir())


Make = Callable[[Corpus], Iterator[Any]]


def _table(ends: np.ndarray, values: pa.Array) -> pa.Table:
    return pa.table({"tokens": pa.ListArray.from_arrays(pa.array(ends, pa.int32()), values)})


# What is compared: each yields batches without end.


def memory_map(corpus: Corpus) -> Iterator[Any]:
    """No documents, no order, no samples: bytes from a mapped file into an int64 array."""
    while True:
        for tokens in corpus.flat():
            for start in range(0, len(tokens) - TOKENS, TOKENS):
                yield torch.from_numpy(tokens[start : start + TOKENS].astype(np.int64)).view(MICRO_BATCH, SEQ_LEN)


def shuffled_memory_map(corpus: Corpus) -> Iterator[Any]:
    """The same, rows of a batch from random places."""
    tokens, rng = (
        np.concatenate([part[: len(part) // SEQ_LEN * SEQ_LEN] for part in corpus.flat()]),
        np.random.default_rng(0),
    )
    rows = tokens.reshape(-1, SEQ_LEN)
    while True:
        order = rng.permutation(len(rows)).tolist()
        for start in range(0, len(order) - MICRO_BATCH, MICRO_BATCH):
            batch = np.empty((MICRO_BATCH, SEQ_LEN), np.int64)
            for place, row in enumerate(order[start : start + MICRO_BATCH]):
                batch[place] = rows[row]
            yield torch.from_numpy(batch)


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


def ours(source: Any, num_logical_shards: int = MICRO_BATCH) -> Iterator[Any]:
    made = partial(pipeline, source)
    loader = rd.DataLoader(
        made, global_batch_size=MICRO_BATCH, num_logical_shards=num_logical_shards, repeat=True, num_workers=0
    )
    return iter(loader)


def arrow(corpus: Corpus) -> Iterator[Any]:
    return ours(rd.ArrowSource(corpus.folder / "arrow", cache_bytes=CACHE))


def mapped_arrow(corpus: Corpus) -> Iterator[Any]:
    return ours(rd.ArrowSource(corpus.folder / "arrow"))


def mapped_megatron(corpus: Corpus) -> Iterator[Any]:
    return ours(rd.MegatronSource(corpus.folder / "megatron"))


def megatron(corpus: Corpus) -> Iterator[Any]:
    return ours(rd.MegatronSource(corpus.folder / "megatron", cache_bytes=CACHE))


def parquet(corpus: Corpus) -> Iterator[Any]:
    return ours(rd.ParquetSource(corpus.folder / "parquet", cache_bytes=CACHE))


def parquet_by_default(corpus: Corpus) -> Iterator[Any]:
    return ours(rd.ParquetSource(corpus.folder / "parquet"))


def numpy_packer(corpus: Corpus) -> Iterator[Any]:
    dataset = NumpyPacker(corpus.paths("parquet"), SEQ_LEN, EOS)
    while True:
        yield from StatefulDataLoader(dataset, batch_size=MICRO_BATCH, drop_last=True)


FIRST_EPOCHS = {
    "first epoch: NumPy packer": numpy_packer,
    "first epoch: ours, small cache": parquet,
    "first epoch: ours": parquet_by_default,
}


def large_arrow(corpus: Corpus) -> Iterator[Any]:
    return ours(rd.ArrowSource(corpus.folder / "arrow"), 32)


# Measuring


Time = tuple[float, float]
"""CPU and wall, in microseconds of a batch."""


def microseconds(batches: Iterator[Any], num_batches: int) -> Time:
    """All shards come to a new fragment after about 200 batches, so that a multiple of 200 holds the same share of decoding
    as an epoch."""
    cpu, wall = time.process_time(), time.perf_counter()
    for _ in range(num_batches):
        next(batches)
    return (time.process_time() - cpu) / num_batches * 1e6, (time.perf_counter() - wall) / num_batches * 1e6


def measure(small: Corpus, large: Corpus, scale: Scale) -> dict[str, list[Time]]:
    contenders = {
        "memory map": Contender(memory_map, small, scale.batches),
        "memory map, shuffled rows": Contender(shuffled_memory_map, small, scale.batches),
        "Python lists": Contender(PythonLists, small, scale.slow_batches),
        "ours, Arrow": Contender(arrow, small, scale.batches),
        "ours, Arrow, all mapped": Contender(mapped_arrow, small, scale.batches),
        "ours, Megatron": Contender(megatron, small, scale.batches),
        "ours, Megatron, all mapped": Contender(mapped_megatron, small, scale.batches),
        "NumPy packer": Contender(numpy_packer, small, scale.batches),
        "pyarrow's Parquet decoding": Contender(parquet_decoding, small, scale.batches),
        "ours, Parquet": Contender(parquet, small, scale.batches),
        "int32: memory map": Contender(memory_map, large, scale.batches),
        "int32: memory map, shuffled rows": Contender(shuffled_memory_map, large, scale.batches),
        "int32, N = 32: ours, Arrow": Contender(large_arrow, large, scale.batches),
    }
    times: dict[str, list[Time]] = {name: [] for name in contenders}
    for number in range(scale.rounds + _WARM_UP):
        for name, contender in contenders.items():
            time_of_batch = contender.run()
            if number >= _WARM_UP:
                times[name].append(time_of_batch)
    for contender in contenders.values():
        contender.close()
    return {**times, **measure_first_epochs(small, scale.rounds)}


def measure_first_epochs(corpus: Corpus, rounds: int) -> dict[str, list[Time]]:
    """Each time by a new process, whose memory is new to it."""
    times: dict[str, list[Time]] = {name: [] for name in FIRST_EPOCHS}
    num_batches = sum(map(len, corpus.flat())) // TOKENS
    for _ in range(rounds):
        for name, make in FIRST_EPOCHS.items():
            contender = Contender(make, corpus, num_batches)
            times[name].append(contender.run())
            contender.close()
    return times


class Contender:
    """A process of its own, so that nobody's memory is another's, which works when it is told to and waits otherwise."""

    def __init__(self, make: Make, corpus: Corpus, num_batches: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, make, corpus, num_batches))
        self._process.start()

    def run(self) -> Time:
        """That of a batch, over one round."""
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


def report(times: dict[str, list[Time]]) -> str:
    lines = [f"{'packed int64 [8, 4096]':33} {'CPU us':>8} {'min':>8} {'max':>8} {'Mtokens/s':>10} {'wall us':>8}"]
    for name, rounds in times.items():
        cpu, wall = ([each[i] for each in rounds] for i in range(2))
        middle = statistics.median(cpu)
        spread = f"{middle:8.1f} {min(cpu):8.1f} {max(cpu):8.1f}"
        lines.append(f"{name:33} {spread} {TOKENS / middle:10.0f} {statistics.median(wall):8.1f}")
    lines += ["", f"{'speed of ours by CPU time, round by round':60} {'median':>8} {'min':>8} {'max':>8}  budget"]
    for mine, other, unit, budget in (
        ("ours, Arrow", "memory map", "%", 60),
        ("ours, Arrow", "memory map, shuffled rows", "%", None),
        ("ours, Arrow, all mapped", "memory map", "%", 60),
        ("ours, Arrow, all mapped", "memory map, shuffled rows", "%", None),
        ("ours, Megatron", "memory map", "%", 60),
        ("ours, Megatron, all mapped", "memory map", "%", 60),
        ("ours, Arrow", "Python lists", "x", 50),
        ("ours, Parquet", "pyarrow's Parquet decoding", "%", 90),
        ("ours, Parquet", "NumPy packer", "x", 1),
        *((name, "first epoch: NumPy packer", "x", 1) for name in list(FIRST_EPOCHS)[1:]),
        ("int32, N = 32: ours, Arrow", "int32: memory map", "%", 40),
        ("int32, N = 32: ours, Arrow", "int32: memory map, shuffled rows", "%", None),
    ):
        factor = 100 if unit == "%" else 1
        ratios = [b[0] / a[0] * factor for a, b in zip(times[mine], times[other], strict=True)]
        values = " ".join(f"{value:7.1f}{unit}" for value in (statistics.median(ratios), min(ratios), max(ratios)))
        lines.append(f"{mine + ' / ' + other:60} {values}" + (f"  >= {budget}{unit}" if budget else ""))
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
        small, large = Corpus(Path(folder) / "small"), Corpus(Path(folder) / "large", np.int32)
        small.write(scale.files)
        large.write(scale.large_files)
        times = measure(small, large, scale)
    print(machine())
    print(report(times))


if __name__ == "__main__":
    main()
