"""Lightning Fabric with FSDP2: 4 ranks, then 2 with a worker each, then 3, through Fabric's sharded checkpoints.

    pip install -c constraints-trainers.txt -e '.[trainers]'
    python examples/trainers/fabric_trainer.py              # one or two minutes; exit code 0 only if every row is right

`fabric.setup_dataloaders` takes torch's loaders alone, and ours needs none of what it does but `fabric.to_device`. With FSDP
strategies `fabric.load` replaces what is no model and no optimizer, and calls no `load_state_dict`: that is the line after it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.fabric.strategies import ModelParallelStrategy
from parts.rows import GLOBAL_BATCH_SIZE, MICRO_BATCH_SIZE, NUM_ROWS, VOCABULARY, Record, Rows, main
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import rescale_data as rd


def shard(model: torch.nn.Module, mesh: DeviceMesh) -> torch.nn.Module:
    return fully_shard(model, mesh=mesh["data_parallel"])


def train(folder: Path, resume: int, stop: int) -> None:
    world_size = int(os.environ["WORLD_SIZE"])
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
    loader = rd.DataLoader(
        Rows(NUM_ROWS), global_batch_size=GLOBAL_BATCH_SIZE, micro_batch_size=MICRO_BATCH_SIZE,
        num_workers=int(resume > 0), seed=0,
    )  # fmt: skip
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "loader": loader}
    if resume:
        fabric.load(folder / f"step {resume}", state)
        if state["loader"] is not loader:  # Fabric has put the state of the loader into its place
            loader.load_state_dict(state["loader"])
    # to here
    if not resume:
        try:
            fabric.setup_dataloaders(loader)  # type: ignore[arg-type]
        except TypeError as refused:
            print(refused)
    record = Record(folder / f"from {resume}")
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
        if loader.step % 2 == 0:
            fabric.save(folder / f"step {loader.step}", {"model": model, "optimizer": optimizer, "loader": loader})
    # to here
    loader.close()
    fabric.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(train, __file__)
