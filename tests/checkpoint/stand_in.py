"""A stand-in for the data loader: a ``Stateful`` whose state has exactly the form of a loader's."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard


class StandInLoader:
    """Counts steps; a logical shard's row is a function of the step and the shard, so any mix of steps is seen."""

    def __init__(
        self, num_logical_shards: int = 12, global_batch_size: int = 4, mesh: DeviceMesh | None = None
    ) -> None:
        self.n, self.o, self.mesh, self.step = num_logical_shards, global_batch_size, mesh, 0
        self.loaded: dict[str, Any] | None = None

    def advance(self, steps: int = 1) -> None:
        self.step += steps

    def rows(self) -> dict[str, torch.Tensor]:
        shard = torch.arange(self.n)
        return {
            "source.row": shard * 1000 + self.step,
            "source.epoch": torch.zeros(self.n, dtype=torch.int64) + self.step // 10,
            "samples": torch.full((self.n,), self.step),
            "stamp": torch.full((self.n,), self.step * self.o),
            "mix.weight": torch.full((self.n, 2), self.step / 8, dtype=torch.float64),
        }

    def _sharded(self, rows: torch.Tensor) -> torch.Tensor:
        if self.mesh is None or self.n % self.mesh.size():
            return rows
        return DTensor.from_local(
            rows.chunk(self.mesh.size())[self.mesh.get_local_rank()].clone(), self.mesh, [Shard(0)]
        )

    def state_dict(self) -> dict[str, Any]:
        return {
            "shards": {path: self._sharded(rows) for path, rows in self.rows().items()},
            "samples": self.step * self.o,
            "origin": 0,
            "global_batch_size": self.o,
            "micro_batch_size": 1,
            "dp_world_size": 1 if self.mesh is None else self.mesh.size(),
            "num_logical_shards": self.n,
            "seed": 7,
            "version": 1,
            "step": self.step,
            "epoch": self.step // 10,
            "sources": json.dumps({"source": {"0": {"files": [["part-0.parquet", 1234, 100]]}}}),
            "pipeline": json.dumps({"source": {"shuffle": 16}}),
            "fields": json.dumps({"source.row": {"dtype": "int64", "shape": []}}),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loaded = state_dict
        self.step = int(state_dict["step"])
        wanted = self.rows()
        for path, rows in state_dict["shards"].items():
            whole = rows.full_tensor() if isinstance(rows, DTensor) else rows
            if not torch.equal(whole, wanted[path]):
                raise ValueError(f"{path} is not that of step {self.step}: {whole}")
