"""A stand-in for the data loader, whose state has exactly the form of a loader's; a state with one; the files of its save."""

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rescale_data.checkpoint.storage.claims import SaveId, find_save
from rescale_data.checkpoint.storage.store import DiskStore


class StandInLoader:
    """Counts steps; a logical shard's row is a function of the step and the shard, so any mix of steps is seen."""

    def __init__(self, num_logical_shards: int = 12, step: int = 0) -> None:
        self.n, self.o, self.step = num_logical_shards, 4, step
        self.loaded: dict[str, Any] | None = None

    def advance(self, steps: int = 1) -> None:
        self.step += steps

    def table(self) -> torch.Tensor:
        shard, count = torch.arange(self.n), torch.full((self.n,), self.step)
        return torch.stack(
            [-1 - self.step * self.o * self.n - shard, count, count * 0 - 1, count // 10, shard * 1000 + count], 1
        )

    def state_dict(self) -> dict[str, Any]:
        names = ("stamp", "samples", "remainder", "source.epoch", "source.row")
        header = {
            "samples": self.step * self.o,
            "origin": 0,
            "global_batch_size": self.o,
            "micro_batch_size": 1,
            "dp_world_size": dist.get_world_size() if dist.is_initialized() else 1,
            "num_logical_shards": self.n,
            "num_workers": 0,
            "seed": 7,
            "version": 1,
            "step": self.step,
            "epoch": self.step // 10,
            "in_step": False,
            "dropped_samples": 0,
            "padded_samples": 0,
            "skipped": [],
            "columns": [{"name": name, "dtype": "int64", "shape": []} for name in names],
            "sources": {"source": {"files": [["part-0.parquet", 1234, 100]]}},
            "pipeline": {"source": {"shuffle": 16}},
        }
        return {"table": self.table(), "header": json.dumps(header)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loaded = state_dict
        self.step = json.loads(state_dict["header"])["step"]
        if not torch.equal(state_dict["table"], self.table()):
            raise ValueError(f"The table is not that of step {self.step}: {state_dict['table']}")


def state_at(step: int = 0, size: int = 300) -> dict[str, Any]:
    """Return a state in which every value says which step it is of."""
    return {"weights": torch.full((size,), float(step)), "step": step, "loader": StandInLoader(step=step)}


def save_at(path: Path) -> SaveId:
    save = find_save(DiskStore(), str(path))
    assert save is not None
    return save


def data(path: Path) -> Path:
    return path / save_at(path).folder


def manifest(path: Path) -> Path:
    return path / save_at(path).manifest


def flip(file: Path, at: int) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)
