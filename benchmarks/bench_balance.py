"""How much of a step do ranks wait for each other, and what does it cost that they wait less?

    python benchmarks/bench_balance.py [--quick]

The first table is arithmetic on drawn lengths, by the planner that the loader uses: the time of a step's computing over that of
an even share, FSDP, where ranks meet in each micro batch. Lengths are lognormal and clipped; a sample of L tokens costs
``L + L^2 / crossover``. Each number is the mean over seeds 0, 1, ... . "length grouped" is the rule of the sampler of
transformers, re-simulated: neighbours by length of the whole global batch, of equal padded cost. Then 4 ranks on this machine.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import tempfile
import time
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import rescale_data as rd
from rescale_data.engine.exchanges import Exchanges
from rescale_data.layout.step_plan import StepPlan

Ints = npt.NDArray[np.int64]
DRAWS = {"chats": (6.5, 0.8, 8192), "agents": (6.5, 1.2, 32_768)}
"""Mean and standard deviation of the logarithm of lengths, and the longest."""
SIZES = ((512, 8, 8), (1024, 64, 4), (4096, 512, 2))
HOST = 8


def lengths(kind: str, size: int, seed: int) -> Ints:
    mean, sigma, longest = DRAWS[kind]
    return np.clip(np.random.default_rng(seed).lognormal(mean, sigma, size), 16, longest).astype(np.int64)


def share(costs: Ints, rank: Ints, micro_batch: Ints, ranks: int, *, padded: bool) -> float:
    """Return the sum over micro batches of the largest rank, over an even share of all costs."""
    most, num = np.zeros((ranks, micro_batch.max() + 1)), np.zeros((ranks, micro_batch.max() + 1))
    np.add.at(num, (rank, micro_batch), 1)
    if padded:
        np.maximum.at(most, (rank, micro_batch), costs)
        most *= num
    else:
        np.add.at(most, (rank, micro_batch), costs)
    return float(most.max(axis=0).sum() / (costs.sum() / ranks))


def planned(costs: Ints, tokens: Ints, ranks: int, b: int, group: int, *, padded: bool) -> float:
    """Return the share where groups of so many ranks plan together."""
    own = np.arange(len(costs)) * ranks // len(costs)
    rank, micro_batch = np.zeros_like(costs), np.zeros_like(costs)
    for first in range(0, ranks, group):
        here = np.flatnonzero((own >= first) & (own < first + group))
        plan = StepPlan(
            costs=costs[here], tokens=tokens[here], owner_ranks=own[here] - first, num_ranks=group, pads_bins=padded,
            num_batches=len(costs) // ranks // b, max_tokens=b * int(tokens[here].max()),
        )  # fmt: skip
        rank[here], micro_batch[here] = plan.assign_samples()
        rank[here] += first
    return share(costs, rank, micro_batch, ranks, padded=padded)


def length_grouped(costs: Ints, ranks: int, micro_batches: int) -> float:
    ordered = np.sort(costs)[::-1].tolist()

    def cut(limit: float) -> list[int]:
        starts = [0]
        for i in range(1, len(ordered)):
            if (i - starts[-1] + 1) * ordered[starts[-1]] > limit:
                starts.append(i)
        return starts

    low, high = 0.0, float(ordered[0] * len(ordered))
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if len(cut(middle)) <= ranks * micro_batches else (middle, high)
    loads = sorted(((b - a) * ordered[a] for a, b in itertools.pairwise([*cut(high), len(ordered)])), reverse=True)
    return sum(loads[::ranks]) / (costs.sum() / ranks)


def table(num_seeds: int) -> None:
    print(
        f"mean of {num_seeds} draws; dealt, own rank, hosts of {HOST} ranks, all ranks; the bound is the largest sample or 1"
    )
    for kind, (size, ranks, b), crossover in itertools.product(DRAWS, SIZES, (10_000, 57_000, 106_000)):
        a = size // ranks // b
        found: dict[str, list[float]] = {}
        for seed in range(num_seeds):
            tokens = lengths(kind, size, seed)
            costs = tokens + tokens * tokens // crossover
            own, dealt = np.arange(size) * ranks // size, np.arange(size) // b % a
            found.setdefault("bound", []).append(max(1.0, costs.max() / (costs.sum() / ranks)))
            for padded in (False, True):
                name = "padded " if padded else ""
                found.setdefault(f"{name}dealt", []).append(share(costs, own, dealt, ranks, padded=padded))
                for label, group in (("rank", 1), ("host", HOST), ("all", ranks)):
                    reached = planned(costs, tokens, ranks, b, group, padded=padded)
                    found.setdefault(f"{name}{label}", []).append(reached)
            found.setdefault("length grouped", []).append(length_grouped(costs, ranks, a))
        means = "  ".join(f"{name} {statistics.mean(values):.2f}" for name, values in found.items())
        print(f"{kind:6} O={size} W={ranks} b={b} A={a} crossover={crossover:,}: {means}", flush=True)


def time_of_plans() -> None:
    tokens = lengths("chats", 4096, 0)
    costs = tokens + tokens * tokens // 57_000
    for sync, padded in itertools.product(("micro", "step"), (False, True)):
        seconds = []
        for _ in range(9):
            plan = StepPlan(
                costs=costs, tokens=tokens, owner_ranks=np.arange(4096) // 8, num_ranks=512, num_batches=4, pads_bins=padded,
                max_tokens=2 * 8192, sync_interval=sync,
            )  # fmt: skip
            started = time.perf_counter()
            plan.assign_samples()
            seconds.append(time.perf_counter() - started)
        print(f"plan of O=4,096 W=512 sync={sync}{' padded' if padded else ''}: {1e3 * min(seconds):.1f} ms")


class Rows:
    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {"tokens": torch.full((4096,), row), "cost": row % 7919}


def rank(me: int, world: int, folder: str, steps: int, told: Any) -> None:
    """Packed rows of 4,096 tokens, 8 a micro batch, two micro batches a step, beside a step that waits for a device."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", world), rank=me, world_size=world)
    moved = [0]
    exchange_lists = Exchanges.exchange_lists

    def counted(self: Exchanges, outgoing: dict[int, list[Any]], incoming: Any) -> Any:
        moved[0] += sum(sample["tokens"].nbytes for values in outgoing.values() for sample in values)
        return exchange_lists(self, outgoing, incoming)

    Exchanges.exchange_lists = counted  # type: ignore[method-assign]
    for over in (None, "all"):
        balance = over and rd.Balance(cost="cost", over=over)
        sizes = {"global_batch_size": 16 * world, "micro_batch_size": 8, "num_logical_shards": 16 * world}
        with rd.DataLoader(Rows(), **sizes, repeat=True, balance=balance, prefetch=4) as loader:
            batches, waits = iter(loader), []
            for _ in range(2 * steps):
                started = time.perf_counter()
                next(batches)
                waits.append(1e3 * (time.perf_counter() - started))
                time.sleep(0.025)  # a device computes, and this process waits for it
            dist.barrier()
        if me == 0:
            p50, p99 = np.quantile(waits[8:], [0.5, 0.99])
            told.put(
                f"{over or 'no balance'}: next {p50:.2f} ms (p99 {p99:.2f}), {moved[0] / steps / 1e6:.2f} MB sent a step"
            )
    dist.destroy_process_group()


def exchange(world: int, steps: int) -> None:
    context = mp.get_context("spawn")
    told: Any = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        processes = [context.Process(target=rank, args=(me, world, folder, steps, told)) for me in range(world)]
        for process in processes:
            process.start()
        print(f"{world} ranks, rows of [8, 4096] int64, a step of 2 micro batches of 25 ms, {os.cpu_count()} cores")
        for _ in range(2):
            print("  ", told.get())
        for process in processes:
            process.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    table(1 if quick else 5)
    time_of_plans()
    exchange(4, 10 if quick else 40)


if __name__ == "__main__":
    main()
