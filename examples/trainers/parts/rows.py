"""A dataset whose rows know their number, and what each segment of a run trained, compared with one rank that never stopped."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import rescale_data as rd

VOCABULARY = 64
NUM_ROWS, GLOBAL_BATCH_SIZE, MICRO_BATCH_SIZE = 240, 24, 2  # ten steps an epoch
EPOCHS, STEPS = 2, 20
SEGMENTS = ((4, 0, 8), (2, 6, 12), (3, 10, STEPS))
"""Ranks, the step of the checkpoint that they begin with (6 is within an epoch, 10 ends one), the step that they stop at."""

Batches = dict[int, list[int]]
"""The rows of each global batch in the order of the ranks, by step."""


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Any map-style dataset would do."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(9) * (row % 7 + 1) + row) % VOCABULARY
        return {"row": torch.tensor(row), "input_ids": tokens[:-1], "labels": tokens[1:]}


class Sequences(Rows):
    """Rows with labels as models of transformers want them: the tokens themselves, which the model shifts."""

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        tokens = super().__getitem__(row)["input_ids"]
        return {
            "row": torch.tensor(row),
            "input_ids": tokens,
            "labels": tokens,
            "position_ids": torch.arange(len(tokens)),
        }


class Record:
    """Writes the rows that one rank trains, a line a micro batch."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = open(folder / f"rank{os.environ['RANK']}", "w", buffering=1)  # noqa: SIM115

    def __call__(self, step: int, rows: torch.Tensor) -> None:
        self._file.write(json.dumps([step, rows.tolist()]) + "\n")


def read(folder: Path, world_size: int) -> Batches:
    """Return what the ranks of a segment have recorded."""
    batches: Batches = {}
    for rank in range(world_size):
        for line in (folder / f"rank{rank}").read_text().splitlines():
            step, rows = json.loads(line)
            batches.setdefault(step, []).extend(rows)
    return batches


def torchrun(script: str, world_size: int, *arguments: object) -> None:
    """Run the script on ``world_size`` ranks of this machine, by `torchrun`."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}", script]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, *map(str, arguments)], check=True, env=environment)


def main(train: Callable[..., None], script: str, *default: str) -> None:
    """Train on a rank that `torchrun` has started; else run all segments of the script, and exit with their code.

    Args:
        train: Called with the folder, the step to resume from, the step to stop at, and further arguments of the command line.
        default: What the command line has if it is empty.
    """
    arguments = sys.argv[1:] or default
    if "RANK" in os.environ:
        folder, resume, stop, *others = arguments
        train(Path(folder), int(resume), int(stop), *others)
        if dist.is_initialized():
            # A thread of gloo may still hold tensors of the last collective. If it drops them while Python exits, torch aborts.
            dist.barrier()
        return
    with tempfile.TemporaryDirectory(prefix="trainer-") as folder:
        for world_size, resume, stop in SEGMENTS:
            torchrun(script, world_size, folder, resume, stop, *arguments)
        segments = [
            (world_size, read(Path(folder) / f"from {resume}", world_size)) for world_size, resume, _ in SEGMENTS
        ]
    sys.exit(not compare(segments, NUM_ROWS, STEPS, global_batch_size=GLOBAL_BATCH_SIZE, seed=0))


def compare(segments: list[tuple[int, Batches]], num_rows: int, num_steps: int, **loader: Any) -> bool:
    """Print the steps of each segment, with its number of ranks, and return True if all have trained what one rank trains."""
    trained: Batches = {}
    for world_size, segment in segments:
        again = len(trained.keys() & segment.keys())
        repeats = f", {again} of them again: the checkpoint lies before them" if again else ""
        print(f"{world_size} ranks: steps {min(segment)} to {max(segment)}{repeats}")
        trained.update(segment)
    alone, expected = rd.DataLoader(Rows(num_rows), dp_rank=0, dp_world_size=1, **loader), []
    while len(expected) < num_steps:
        expected += [batch["row"].tolist() for batch in alone]
    epoch = num_rows // loader["global_batch_size"]  # in steps
    times = Counter((step // epoch, row) for step, rows in trained.items() for row in rows)
    total = sum(map(len, expected[:num_steps]))
    lost, repeated = total - len(times), times.total() - len(times)
    same = sum(trained.get(step) == expected[step] for step in range(num_steps))
    findings = [
        (lost == repeated == 0, f"{len(times)} of {total} rows trained: {lost} lost, {repeated} repeated"),
        (
            same == num_steps == len(trained),
            f"{same} of {num_steps} global batches are those of one rank that never stopped",
        ),
    ]
    for held, text in findings:
        print(f"{'ok  ' if held else 'FAIL'}  {text}")
    return all(held for held, _ in findings)
