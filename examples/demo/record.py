"""What each rank of the demo writes down, to be compared afterwards."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

PROGRESS = "progress.txt"  # how far a segment is, for whoever waits for it


def digest(sample: Mapping[str, Tensor]) -> str:
    """The same for two samples only if they are bit-identical."""
    found = hashlib.blake2b(digest_size=16)
    for name in sorted(sample):
        found.update(sample[name].numpy().tobytes())
    return found.hexdigest()


class Recorder:
    """The samples, in the order of the batches, and the loss of each step of one rank."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank
        self._steps: list[dict[str, Any]] = []
        self._samples: list[str] = []
        self._losses: list[float] = []

    def micro_batch(self, batch: Mapping[str, Tensor], loss: Tensor) -> None:
        size = len(next(iter(batch.values())))
        self._samples += [digest({name: column[i] for name, column in batch.items()}) for i in range(size)]
        self._losses.append(loss.item())

    def step(self) -> None:
        self._steps.append({"samples": self._samples, "loss": sum(self._losses) / len(self._losses)})
        self._samples, self._losses = [], []
        if self._rank == 0:
            aside = self._folder / f"{PROGRESS}.new"
            aside.write_text(f"{len(self._steps)} steps, loss {self._steps[-1]['loss']:.2f}")
            aside.replace(self._folder / PROGRESS)

    def write(self, facts: Mapping[str, float]) -> None:
        text = json.dumps({"steps": self._steps, "facts": facts})
        (self._folder / f"rank{self._rank:03d}.json").write_text(text)


def read(folder: Path) -> list[dict[str, Any]]:
    """What all ranks of a segment have written, in the order of the ranks."""
    return [json.loads(file.read_text()) for file in sorted(folder.glob("rank*.json"))]
