"""What each rank of the demo writes down, to be compared afterwards."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor


def digest(sample: Mapping[str, Tensor]) -> str:
    """The same for two samples only if they are bit-identical."""
    found = hashlib.blake2b(digest_size=16)
    for name in sorted(sample):
        found.update(sample[name].numpy().tobytes())
    return found.hexdigest()


class Recorder:
    """The samples, in the order of the batches, and the loss of each step of one rank."""

    def __init__(self) -> None:
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

    def write(self, folder: Path, rank: int, facts: Mapping[str, float]) -> None:
        (folder / f"rank{rank:03d}.json").write_text(json.dumps({"steps": self._steps, "facts": facts}))


def read(folder: Path) -> list[dict[str, Any]]:
    """What all ranks of a leg have written, in the order of the ranks."""
    return [json.loads(file.read_text()) for file in sorted(folder.glob("rank*.json"))]
