"""Real elastic `torchrun`: a node is killed, others join, and every row of the epoch is trained once.

    python examples/trainers/elastic_torchrun.py      # one or two minutes on two cores; exit code 0 only if all holds

Four `torchrun` agents with one worker each train a model with FSDP2 on gloo, and save every few steps. One agent and its
worker are killed by `kill -9`; the others meet again and go on as 3 ranks. Later two agents join, and it goes on as 5.
`train` is what a training script of yours would hold. The rest starts agents, watches, and checks.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from parts.watcher import Line, Meeting, Watcher
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import rescale_data as rd
from rescale_data.checkpoint import CheckpointManager

GLOBAL_BATCH_SIZE = 60  # divides by 1, 2, 3, 4, 5 and 6 ranks
LARGEST_MICRO_BATCH = 15
STEPS = 40
NUM_ROWS = STEPS * GLOBAL_BATCH_SIZE  # one epoch
SAVE_EVERY = 4
KILLED_AT, JOINED_AT = 10, 23  # steps


class Rows:
    """The data: any map-style dataset."""

    def __len__(self) -> int:
        return NUM_ROWS

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(17) * (row % 7 + 1) + row) % 64
        return {"row": torch.tensor(row), "tokens": tokens[:-1], "labels": tokens[1:]}


def train(folder: str) -> None:
    """One rank: the same script for every number of ranks, at the start and after each restart."""
    # copy from here
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)  # not copied
    model = torch.nn.Sequential(torch.nn.Embedding(64, 32), torch.nn.Linear(32, 64))  # not copied
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = rd.DataLoader(
        Rows(), global_batch_size=GLOBAL_BATCH_SIZE, micro_batch_size=micro_batch_size(mesh.size()), mesh=mesh
    )
    line = Line(folder)  # not copied

    state = {"model": model, "optimizer": optimizer, "loader": loader}
    with CheckpointManager(f"{folder}/run", keep_latest=2) as manager:
        manager.load_latest(state)
        batches = iter(loader)
        for step in range(loader.step, STEPS):
            rows: list[int] = []  # not copied
            for _ in range(loader.gradient_accumulation_steps):
                batch = next(batches)
                loss = F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())
                (loss / loader.gradient_accumulation_steps).backward()
                rows += batch["row"].tolist()  # not copied
            optimizer.step()
            optimizer.zero_grad()
            if (step + 1) % SAVE_EVERY == 0:
                manager.save(step + 1, state)
            line.report(step, rows)  # not copied
    dist.destroy_process_group()
    # to here


# copy from here
def micro_batch_size(world_size: int) -> int:
    """The largest that fits."""
    share = GLOBAL_BATCH_SIZE // world_size
    return max(b for b in range(1, LARGEST_MICRO_BATCH + 1) if share % b == 0)


# to here


# What follows is the example around it.


def run(folder: str) -> tuple[list[tuple[int, dict[int, list[int]]]], list[int]]:
    """The number of ranks and the global batches of each segment, and the exit codes of the agents."""
    segments: list[tuple[int, dict[int, list[int]]]] = []
    with Watcher(__file__, folder) as watcher:

        def segment(world_size: int, stop: int) -> Meeting:
            meeting, batches = watcher.watch(world_size, stop)
            segments.append((world_size, batches))
            print(f"{world_size} ranks trained the steps {min(batches)} to {max(batches)}", flush=True)
            return meeting

        print("4 agents start ...", flush=True)
        watcher.start_agents(4)
        meeting = segment(4, KILLED_AT)
        print("kill -9 of one agent and its worker; the others meet again ...", flush=True)
        watcher.kill(meeting)
        segment(3, JOINED_AT)
        print("2 agents join ...", flush=True)
        watcher.start_agents(2)
        meeting = segment(5, STEPS)
        return segments, watcher.finish(meeting)


def check(segments: list[tuple[int, dict[int, list[int]]]], codes: list[int]) -> bool:
    """Print what happened; whether all held."""
    alone = rd.DataLoader(Rows(), global_batch_size=GLOBAL_BATCH_SIZE, dp_rank=0, dp_world_size=1)
    expected = [batch["row"].tolist() for batch in alone]
    trained: dict[int, tuple[int, list[int]]] = {}
    print("\nranks  micro batch  steps     done again")
    for world_size, batches in segments:
        again = sorted(trained.keys() & batches.keys())
        trained.update({step: (world_size, rows) for step, rows in batches.items()})
        steps = f"{min(batches)}-{max(batches)}"
        print(f"{world_size:5}  {micro_batch_size(world_size):11}  {steps:8}  {again or '-'}")
    rows = sorted(row for _, batch in trained.values() for row in batch)
    same = sum(trained[step][1] == batch for step, batch in enumerate(expected) if step in trained)
    findings = [
        (
            rows == list(range(NUM_ROWS)),
            f"{len(set(rows))} of {NUM_ROWS} rows trained, {len(rows) - len(set(rows))} twice",
        ),
        (same == STEPS, f"{same} of {STEPS} global batches are those of one rank that never stopped, row by row"),
        (sorted(codes) == [-9, 0, 0, 0, 0, 0], f"exit codes of the agents: {codes} (-9 is the one that was killed)"),
    ]
    print()
    for held, text in findings:
        print(f"{'ok  ' if held else 'FAIL'}  {text}")
    return all(held for held, _ in findings)


def main() -> int:
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="elastic-") as folder:
        held = check(*run(folder))
    print(f"      {time.perf_counter() - started:.0f} s")
    return 0 if held else 1


if __name__ == "__main__":
    if "RANK" in os.environ:
        train(sys.argv[1])
    else:
        sys.exit(main())
