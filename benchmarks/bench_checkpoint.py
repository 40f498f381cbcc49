"""What does training lose to a save?

    python benchmarks/bench_checkpoint.py [--megabytes 200 1000] [--saves 5] [--small 20000]
        [--ranks 1000] [--convert 1000] [--folder DIR] [--device cuda]

One process trains a model of linear layers with AdamW, whose parameters and state have the given size. "Lost" is the time of
all steps from the call of save until the checkpoint is committed, less the time that as many undisturbed steps take (the
median of steps before and after): the call, the wait before the optimizer's step, and every step that is slower while files
are written. A plain memory copy of the same bytes into memory that was used before is the limit of any staging.
"""

from __future__ import annotations

import argparse
import os
import pickle
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict import get_state_dict

from rescale_data import checkpoint
from rescale_data.checkpoint import CheckpointManager
from rescale_data.checkpoint.loading import find_mismatches
from rescale_data.checkpoint.storage.dcp import Contents
from rescale_data.checkpoint.storage.metadata import read_metadata

WIDTH = 2048


class Training:
    """Steps of about the same length, whose state has ``megabytes``: parameters and the two moments of AdamW."""

    def __init__(self, megabytes: int, device: str) -> None:
        layers = max(1, round(megabytes * 1e6 / (3 * 4 * WIDTH * WIDTH)))
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.batch = torch.randn(64, WIDTH, device=device)

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def num_bytes(self) -> int:
        return 3 * sum(parameter.nbytes for parameter in self.model.parameters())

    def step(self) -> float:
        start = time.perf_counter()
        self.model(self.batch).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        return time.perf_counter() - start


def lost(
    training: Training, save: Callable[[], Callable[[], bool]], saves: int, tidy: Callable[[], None]
) -> list[float]:
    """Seconds lost to each save; ``save`` begins one and returns whether it has ended as a function."""
    losses: list[float] = []
    for _ in range(saves + 1):
        tidy()
        before = [training.step() for _ in range(6)]
        start, steps = time.perf_counter(), 0
        ended = save()
        while not ended():
            training.step()
            steps += 1
        took = time.perf_counter() - start
        after = [training.step() for _ in range(6)]
        losses.append(took - steps * statistics.median(before + after))
    return losses[1:]  # the first one allocates


def modes(training: Training, folder: Path) -> dict[str, Callable[[], Callable[[], bool]]]:
    count = iter(range(10**6))
    manager = CheckpointManager(folder / "thread", keep_latest=1)
    manager.warm_up(training.state)
    pinned = training.batch.is_cuda
    buffers = [torch.empty_like(value, device="cpu", pin_memory=pinned) for value in tensors(training)]

    def copy() -> Callable[[], bool]:
        for buffer, value in zip(buffers, tensors(training), strict=True):
            buffer.copy_(value)
        return lambda: True

    def sync() -> Callable[[], bool]:
        checkpoint.save(folder / f"sync-{next(count)}", training.state)
        return lambda: True

    def stock() -> Callable[[], bool]:
        model, optimizer = get_state_dict(training.model, training.optimizer)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder / f"stock-{next(count)}")
        return lambda: True

    def staged() -> Callable[[], bool]:
        return manager.save(next(count), training.state).committed.done

    return {"memory copy": copy, "dcp.save": stock, "sync": sync, "staged": staged}


def tensors(training: Training) -> list[torch.Tensor]:
    moments = [state[key] for state in training.optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    return [*(parameter.detach() for parameter in training.model.parameters()), *moments]


def measure(megabytes: int, saves: int, folder: Path, device: str) -> None:
    training = Training(megabytes, device)
    usual = statistics.median(training.step() for _ in range(5))
    size = training.num_bytes() / 1e6
    print(
        f"\n{size:.0f} MB of state, {usual * 1e3:.0f} ms a step, {saves} saves each: seconds lost, median (min .. max)"
    )

    def tidy() -> None:
        for old in [*folder.glob("stock-*"), *folder.glob("sync-*")]:
            shutil.rmtree(old)

    results = {name: lost(training, save, saves, tidy) for name, save in modes(training, folder).items()}
    reference = statistics.median(results["sync"])
    for name, losses in results.items():
        median = statistics.median(losses)
        print(f"  {name:16} {median:7.3f} ({min(losses):.3f} .. {max(losses):.3f})   {median / reference:5.2f} x sync")


def measure_small(count: int, folder: Path) -> None:
    """Seconds of a save and a load of many small tensors, beside DCP's own in the same run."""
    state = {f"w{number}": torch.randn(64) for number in range(count)}
    times: dict[str, list[float]] = {}
    for turn in range(3):
        works: dict[str, Callable[[], object]] = {
            "dcp.save": lambda turn=turn: dcp.save(state, checkpoint_id=folder / f"stock-{turn}"),
            "save": lambda turn=turn: checkpoint.save(folder / f"ours-{turn}", state),
            "dcp.load": lambda turn=turn: dcp.load(state, checkpoint_id=folder / f"stock-{turn}"),
            "load": lambda turn=turn: checkpoint.load(folder / f"ours-{turn}", state),
        }
        for name, work in works.items():
            wall, cpu = time.perf_counter(), time.process_time()
            work()
            times.setdefault(name, []).append(time.perf_counter() - wall)
            times.setdefault(f"{name} (CPU)", []).append(time.process_time() - cpu)
    print(f"\n{count} tensors of 256 bytes: seconds, median of 3")
    for name, taken in times.items():
        print(f"  {name:16} {statistics.median(taken):7.3f}")


def measure_plans(ranks: int, count: int = 200) -> None:
    """Seconds of what one process does for tensors that so many ranks hold a row each of, beside DCP's own: rank 0 makes one
    plan of all ranks' plans, and each rank that loads reads the metadata and plans; here it wants every tensor whole.
    """
    names, size, row = [f"w{number}" for number in range(count)], torch.Size([ranks, 8]), torch.Size([1, 8])

    def plan(rank: int) -> SavePlan:
        offset = torch.Size([rank, 0])
        data = TensorWriteData(ChunkStorageMetadata(offset, row), TensorProperties(), size)
        items = [WriteItem(MetadataIndex(name, offset), WriteItemType.SHARD, tensor_data=data) for name in names]
        return SavePlan(items, planner_data={name: (name,) for name in names})

    plans, state = [plan(rank) for rank in range(ranks)], {name: torch.zeros(size) for name in names}
    planner = DefaultSavePlanner()  # ours, too
    load_planners = {
        "DCP's": DefaultLoadPlanner(),
        "ours": DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
    }
    print(f"\n{ranks} simulated ranks, {count} tensors, {ranks * count} pieces: seconds")
    planner.set_up_planner({}, is_coordinator=True)
    start = time.perf_counter()
    merged, metadata = planner.create_global_plan(plans)
    print(f"  one save of all plans, DCP's and ours {time.perf_counter() - start:7.3f}")
    metadata.storage_data = {
        item.index: _StorageInfo(f"__{rank}_0.distcp", 0, 32) for rank, of in enumerate(merged) for item in of.items
    }
    content = pickle.dumps(metadata)
    for whose, planner in load_planners.items():
        start = time.perf_counter()
        metadata = pickle.loads(content) if whose == "DCP's" else read_metadata(content)
        middle = time.perf_counter()
        if whose == "ours":
            assert not any(find_mismatches([], state, Contents.from_metadata(metadata)).values())
        planner.set_up_planner(state, metadata, is_coordinator=False)
        assert len(planner.create_local_plan().items) == ranks * count
        print(f"  metadata of {len(content) / 1e6:.1f} MB, {whose:6} {middle - start:7.3f}")
        print(f"  a plan to load, {whose:6} {time.perf_counter() - middle:7.3f}")


def measure_conversion(megabytes: int, budget: int, folder: Path) -> None:
    """What a conversion takes of memory, beyond the imports: to a file of torch.save in a process of its own."""
    checkpoint.save(folder / "c", {f"w{number}": torch.zeros(8_000_000) for number in range(megabytes // 32)})
    code = (
        "import sys\nfrom rescale_data.checkpoint import to_torch_save\n"
        "peak = lambda: int(open('/proc/self/status').read().split('VmHWM:')[1].split()[0]) / 1e3\nbefore = peak()\n"
        "to_torch_save(sys.argv[1], sys.argv[2], budget=int(sys.argv[3]))\nprint(f'{peak() - before:.0f}')"
    )
    taken = {
        size: subprocess.run(
            [sys.executable, "-c", code, folder / "c", folder / "file.pt", str(size)], capture_output=True, check=True
        ).stdout.decode()
        for size in (budget, budget // 4)
    }
    for size, peak in taken.items():
        print(
            f"\n{megabytes} MB converted within a budget of {size / 1e6:.0f} MB: {peak.strip()} MB of memory at the peak"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, nargs="*", default=[200, 1000])
    parser.add_argument("--saves", type=int, default=5)
    parser.add_argument("--small", type=int, default=20_000, help="number of small tensors; 0 leaves them out")
    parser.add_argument("--ranks", type=int, default=1000, help="simulated ranks that plan; 0 leaves them out")
    parser.add_argument("--convert", type=int, default=1000, help="megabytes to convert; 0 leaves them out")
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--device", default="cpu", help="of the model: cpu or cuda")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message="torch.distributed is")
    torch.set_num_threads(1)
    machine = platform.processor() or platform.machine()
    print(f"{machine}, {os.cpu_count()} cores, torch {torch.__version__}, one thread for training")
    folder = Path(tempfile.mkdtemp(prefix="bench-checkpoint-", dir=options.folder))
    try:
        for megabytes in options.megabytes:
            measure(megabytes, options.saves, folder / str(megabytes), options.device)
        if options.small:
            measure_small(options.small, folder / "small")
        if options.ranks:
            measure_plans(options.ranks)
        if options.convert:
            measure_conversion(options.convert, 256_000_000, folder / "convert")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
