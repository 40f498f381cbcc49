"""What does a job of many ranks ask of its storage, its store and its checkpoints, by the number of ranks?

    python benchmarks/bench_scale.py [--files 2000]

Requests, bytes and memory of opening a source of Parquet files (32 row groups, 4 columns) as one process sees them, bytes of
its description in a checkpoint, a coordinator's time for the plans of W ranks that save 60 sources, and requests to the
job's store for one meeting among W threads that play ranks, all there or one of them gone. It also runs on older commits,
where meetings are left out.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pickle
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import torch.distributed as dist
from fsspec.implementations.local import LocalFileSystem
from torch.distributed.checkpoint import DefaultSavePlanner

import rescale_data as rd

GROUPS, COLUMNS, AWAY = 32, 4, 8.0


class Counting(LocalFileSystem):
    """Counts what would be requests."""

    protocol = "counted"
    cachable = False
    asked: ClassVar[Counter[str]] = Counter()

    def ls(self, path: str, detail: bool = False, **kwargs: Any) -> Any:
        Counting.asked["requests"] += 1
        return super().ls(path, detail, **kwargs)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        Counting.asked["requests"] += 1
        return super().cat_file(path, start, end, **kwargs)


def write(folder: Path, num_files: int) -> None:
    (folder / "data").mkdir()
    rows = pa.table({f"c{i}": list(range(GROUPS)) for i in range(COLUMNS)})
    pq.write_table(rows, folder / "first", row_group_size=1)
    for i in range(num_files):
        os.link(folder / "first", folder / "data" / f"{i:06d}.parquet")


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def opened(folder: Path, num_files: int) -> dict[str, float]:
    """What one process sees of opening the source, and of a state."""
    before, began = resident(), time.perf_counter()
    try:
        source = rd.ParquetSource(f"counted://{folder}/data", index_dir=folder / "index")
    except TypeError:  # an older commit
        source = rd.ParquetSource(f"counted://{folder}/data")
    seconds = time.perf_counter() - began
    found = {
        "requests": float(Counting.asked["requests"]),
        "seconds": seconds,
        "memory, bytes": float(resident() - before),
        "pickled, bytes": float(len(pickle.dumps(source))),
    }
    loader = rd.DataLoader(source, global_batch_size=8, num_logical_shards=8)
    state = loader.state_dict()
    return found | {"its sources in a checkpoint, bytes": float(len(state["header"]))}


def in_child(work: Callable[[], dict[str, float]]) -> dict[str, float]:
    read, write = os.pipe()
    if os.fork() == 0:
        try:
            Counting.asked.clear()
            os.write(write, json.dumps(work()).encode())
        finally:
            os._exit(0)
    os.close(write)
    found = os.read(read, 65536)
    os.wait()
    os.close(read)
    return json.loads(found)


class CountedStore(dist.Store):
    """One store of many threads, whose requests are counted."""

    def __init__(self, store: Any, asked: Counter[str]) -> None:
        super().__init__()
        self._store, self._asked = store, asked

    def __getattribute__(self, name: str) -> Any:
        if name not in ("append", "add", "get", "wait", "check", "compare_set"):
            return super().__getattribute__(name)
        self._asked[name] += 1
        return getattr(self._store, name)


def exchange(ranks: int, absent: int) -> tuple[int, float]:
    """Requests to the store of all ranks for one meeting, and its seconds."""
    from rescale_data.engine.ranks.meeting import MissingRanks, arrive

    asked: Counter[str] = Counter()
    store: Any = CountedStore(dist.HashStore(), asked)

    def come(me: int) -> None:
        with contextlib.suppress(MissingRanks):
            arrive(store, me, range(ranks), AWAY)

    threads = [threading.Thread(target=come, args=(me,)) for me in range(ranks - absent)]
    began = time.perf_counter()
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    return asked.total(), time.perf_counter() - began


SOURCES = [rd.SyntheticSource(512, length=8) for _ in range(60)]


def mixture(shard: rd.Shard) -> rd.BaseNode[Any]:
    readers = {f"s{i}": rd.Reader(source, shard) for i, source in enumerate(SOURCES)}
    return rd.WeightedSampler(readers, dict.fromkeys(readers, 1.0))


def planned(ranks: int) -> tuple[int, float]:
    """Values that each rank plans for a save of a mixture of 60 sources, and the coordinator's seconds for all plans."""
    state = {"loader": rd.DataLoader(mixture, global_batch_size=8, num_logical_shards=8).state_dict()}
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, is_coordinator=True)
    told = pickle.dumps(planner.create_local_plan())
    plans = [pickle.loads(told) for _ in range(ranks)]
    began = time.perf_counter()
    planner.create_global_plan(plans)
    return len(plans[0].items), time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=2000)
    num_files = parser.parse_args().files
    fsspec.register_implementation("counted", Counting, clobber=True)
    with tempfile.TemporaryDirectory() as name:
        write(Path(name), num_files)
        for who in ("the first process", "a later one"):
            found = in_child(lambda: opened(Path(name), num_files))
            print(f"{num_files} files, {who}: " + ", ".join(f"{key} {value:,.1f}" for key, value in found.items()))
    for ranks in (8, 512, 4096):
        values, seconds = planned(ranks)
        print(f"{ranks} ranks, 60 sources: {values} values a rank are planned, {seconds:.2f} s of the coordinator")
    try:
        for ranks in (8, 64, 512):
            (all_there, seconds), (one_gone, waited) = exchange(ranks, 0), exchange(ranks, 1)
            print(
                f"{ranks} ranks: a meeting {all_there / ranks:.1f} requests a rank, {seconds:.2f} s; one gone: "
                f"{one_gone / ranks:.1f} requests a rank in {waited:.0f} s"
            )
    except ImportError:  # with PYTHONPATH alone it may find those of what is installed
        print("meetings: this commit has other ones")


if __name__ == "__main__":
    main()
