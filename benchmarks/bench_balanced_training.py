"""How much shorter does a step become, and do the losses stay, where a real model trains on balanced steps?

    python benchmarks/bench_balanced_training.py [--ranks 4] [--steps 50]

A transformer on CPU ranks of one thread each, under DDP and FSDP2, on documents of the lengths of chats (an eighth of them);
blocks of 5 steps dealt and balanced in turns, on the same global batches. Ranks meet in every micro batch.

Two measures: wall time, which on a machine with fewer cores than ranks shows little, as a rank that waits leaves its core to
another one; and, for any load, the CPU time of each rank in each micro batch, of which a step takes the largest of all ranks.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import rescale_data as rd

WIDTH, HEADS, LAYERS, VOCABULARY, A, B = 128, 4, 2, 256, 4, 4
LENGTHS = np.clip(np.random.default_rng(0).lognormal(6.5, 0.8, 4096), 16, 8192).astype(int) // 8
BLOCK = 5


class Documents:
    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {
            "tokens": torch.randint(VOCABULARY, (int(LENGTHS[row]) + 2,), generator=torch.Generator().manual_seed(row))
        }


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.up, self.down = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        found = []
        for document in self.qkv(self.norms[0](x)).split(lengths):  # attention within each document
            q, k, v = document.view(len(document), 3, HEADS, -1).permute(1, 2, 0, 3)
            found.append(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).flatten(1))
        x = x + self.out(torch.cat(found))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(VOCABULARY, WIDTH), torch.nn.Linear(WIDTH, VOCABULARY)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, samples: list[torch.Tensor]) -> torch.Tensor:
        x = self.embedding(torch.cat([tokens[:-1] for tokens in samples]))
        for block in self.blocks:
            x = block(x, [len(tokens) - 1 for tokens in samples])
        return F.cross_entropy(self.head(x), torch.cat([tokens[1:] for tokens in samples]), reduction="sum")


def trained_tokens(sample: dict[str, Any]) -> int:
    return len(sample["tokens"]) - 1


def as_batch(samples: list[Any]) -> dict[str, Any]:
    return {"samples": [sample["tokens"] for sample in samples]}


def step(model: Any, optimizer: Any, batches: list[Any], world: int) -> tuple[float, list[float]]:
    """Train one step, and return its loss over all ranks and this rank's CPU seconds in each micro batch."""
    own = sum(len(tokens) - 1 for batch in batches for tokens in batch["samples"])
    weight = torch.tensor(float(own))
    dist.all_reduce(weight)
    total, seconds = torch.zeros(()), []
    for batch in batches:
        started = time.process_time()
        loss = model(batch["samples"]) * world / weight
        loss.backward()
        seconds.append(time.process_time() - started)
        total += loss.detach()
    dist.all_reduce(total)
    optimizer.step()
    optimizer.zero_grad()
    return float(total) / world, seconds


def train(me: int, world: int, folder: str, how: str, num_steps: int, told: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/{how}", world), rank=me, world_size=world)
    runs: dict[str, Any] = {}
    for name in ("dealt", "balanced"):
        torch.manual_seed(0)
        model: Any = Model()
        if how == "ddp":
            model = torch.nn.parallel.DistributedDataParallel(model)
        else:
            for block in [*model.blocks, model]:
                fully_shard(block)
        balance = rd.Balance(cost=rd.transformer_cost(crossover=12 * WIDTH), over="all", max_tokens=4 * 1024 * B)
        loader = rd.DataLoader(
            Documents(), global_batch_size=A * B * world, micro_batch_size=B, repeat=True, prefetch=A, collate_fn=as_batch,
            num_logical_shards=A * B * world, balance=balance if name == "balanced" else None,
        )  # fmt: skip
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        runs[name] = model, optimizer, iter(loader), loader
    walls: dict[str, list[float]] = {name: [] for name in runs}
    losses: dict[str, list[float]] = {name: [] for name in runs}
    critical: dict[str, float] = dict.fromkeys(runs, 0.0)
    for turn in range(num_steps // BLOCK + 1):
        for name in sorted(runs, reverse=bool(turn % 2)):
            model, optimizer, batches, loader = runs[name]
            dist.barrier()
            started = time.perf_counter()
            for _ in range(BLOCK):
                loss, seconds = step(model, optimizer, list(islice(batches, A)), world)
                losses[name].append(loss)
                slowest = torch.tensor(seconds)
                dist.all_reduce(slowest, dist.ReduceOp.MAX)
                critical[name] += float(slowest.sum()) if turn else 0.0
            if turn:  # the first warms up
                walls[name].append((time.perf_counter() - started) / BLOCK)
    for *_, loader in runs.values():
        loader.close()
    if me == 0:
        ratios = sorted(one / other for one, other in zip(walls["dealt"], walls["balanced"], strict=True))
        apart = max(abs(one / other - 1) for one, other in zip(losses["dealt"], losses["balanced"], strict=True))
        seconds = {name: statistics.median(values) for name, values in walls.items()}
        told.put(
            f"{how}: a step {seconds['dealt']:.2f} s dealt, {seconds['balanced']:.2f} balanced; wall time "
            f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}), CPU time of the slowest rank "
            f"{critical['dealt'] / critical['balanced']:.2f}; losses differ by {apart:.0e} at most"
        )
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=50)
    given = parser.parse_args()
    context = mp.get_context("spawn")
    told: Any = context.SimpleQueue()
    print(f"{given.ranks} ranks, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for how in ("ddp", "fsdp2"):
            arguments = [(me, given.ranks, folder, how, given.steps, told) for me in range(given.ranks)]
            processes = [context.Process(target=train, args=each) for each in arguments]
            for process in processes:
                process.start()
            print(told.get(), flush=True)
            for process in processes:
                process.join()


if __name__ == "__main__":
    main()
