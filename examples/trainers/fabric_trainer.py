"""Lightning Fabric with FSDP2: 4 ranks, then 2 with other accumulation and workers, through Fabric's sharded checkpoint.

    pip install -c constraints-trainers.txt -e '.[trainers]'
    python examples/trainers/fabric_trainer.py              # about a minute; exit code 0 only if every row is right

`fabric.setup_dataloaders` takes torch's loaders alone, and ours needs none of what it does but `fabric.to_device`. With FSDP
strategies `fabric.load` replaces what is no model and no optimizer, and calls no `load_state_dict`: that is the line after it.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.fabric.strategies import ModelParallelStrategy
from parts.rows import VOCABULARY, Record, Rows, compare, read, torchrun
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import rescale_data as rd

NUM_ROWS, STEPS = 240, 20  # two epochs
SIZES: dict[str, Any] = {"global_batch_size": 24, "seed": 0}


def shard(model: torch.nn.Module, mesh: DeviceMesh) -> torch.nn.Module:
    return fully_shard(model, mesh=mesh["data_parallel"])


def train(folder: Path, leg: str, world_size: int, stop: int) -> None:
    strategy = ModelParallelStrategy(
        shard, data_parallel_size=world_size, tensor_parallel_size=1, process_group_backend="gloo"
    )
    # copy from here
    fabric = L.Fabric(accelerator="cpu", devices=world_size, strategy=strategy)
    fabric.launch()
    torch.manual_seed(0)  # not copied
    layers = torch.nn.Sequential(torch.nn.Embedding(VOCABULARY, 8), torch.nn.Linear(8, VOCABULARY))  # not copied
    model = fabric.setup_module(layers)
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters()))
    loader = rd.DataLoader(Rows(NUM_ROWS), micro_batch_size=3, num_workers=int(leg == "second"), **SIZES)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "loader": loader}
    if (folder / "checkpoint").exists():
        fabric.load(folder / "checkpoint", state)
        if state["loader"] is not loader:  # Fabric has put the state of the loader into its place
            loader.load_state_dict(state["loader"])
    # to here
    if leg == "first":
        try:
            fabric.setup_dataloaders(loader)  # type: ignore[arg-type]
        except TypeError as refused:
            print(refused)
    record = Record(folder / leg)
    # copy from here
    batches = iter(loader)
    while loader.step < stop:
        step = loader.step  # not copied
        for _ in range(loader.gradient_accumulation_steps):
            batch = next(batches, None)
            if batch is None:  # an epoch has ended, on all ranks
                batches = iter(loader)
                batch = next(batches)
            batch = fabric.to_device(batch)
            record(step, batch["row"])  # not copied
            loss = F.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())
            fabric.backward(loss / loader.gradient_accumulation_steps)
        optimizer.step()
        optimizer.zero_grad()
    fabric.save(folder / "checkpoint", {"model": model, "optimizer": optimizer, "loader": loader})
    # to here
    loader.close()
    fabric.barrier()
    torch.distributed.destroy_process_group()


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="fabric-") as name:
        folder = Path(name)
        torchrun(__file__, 4, folder, "first", 4, 12)
        torchrun(__file__, 2, folder, "second", 2, STEPS)
        return 0 if compare([read(folder / "first", 4), read(folder / "second", 2)], NUM_ROWS, STEPS, **SIZES) else 1


if __name__ == "__main__":
    if "RANK" in os.environ:
        train(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    else:
        sys.exit(main())
