"""A dataset whose rows know their number, and what each leg of a run trained, compared with one rank that never stopped."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import rescale_data as rd

VOCABULARY = 64


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Any map-style dataset would do."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(9) * (row % 7 + 1) + row) % VOCABULARY
        return {"row": torch.tensor(row), "input_ids": tokens[:-1], "labels": tokens[1:]}


class Record:
    """What one rank trains: a line a micro batch."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = open(folder / f"rank{os.environ['RANK']}", "w", buffering=1)  # noqa: SIM115

    def __call__(self, step: int, rows: torch.Tensor) -> None:
        self._file.write(json.dumps([step, rows.tolist()]) + "\n")


def read(folder: Path, world_size: int) -> dict[int, list[int]]:
    """The rows of each global batch in the order of the ranks, by step."""
    batches: dict[int, list[int]] = {}
    for rank in range(world_size):
        for line in (folder / f"rank{rank}").read_text().splitlines():
            step, rows = json.loads(line)
            batches.setdefault(step, []).extend(rows)
    return batches


def torchrun(script: str, world_size: int, *arguments: object) -> None:
    """The script on ``world_size`` ranks of this machine, by `torchrun`."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}", script]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, *map(str, arguments)], check=True, env=environment)


def compare(legs: list[dict[int, list[int]]], num_rows: int, num_steps: int, **loader: Any) -> bool:
    """Print whether the legs, each from the checkpoint of the one before, trained what one rank trains."""
    trained: dict[int, list[int]] = {}
    for leg in legs:
        again = sorted(trained.keys() & leg.keys())
        print(
            f"steps {min(leg)} to {max(leg)}"
            + (f"; {len(again)} of them again, after the last checkpoint" if again else "")
        )
        trained.update(leg)
    alone, expected = rd.DataLoader(Rows(num_rows), dp_rank=0, dp_world_size=1, **loader), []
    while len(expected) < num_steps:
        expected += [batch["row"].tolist() for batch in alone]
    same = sum(trained.get(step) == expected[step] for step in range(num_steps))
    held = same == num_steps == len(trained)
    print(
        f"{'ok  ' if held else 'FAIL'}  {same} of {num_steps} global batches are those of one rank that never stopped"
    )
    return held
