"""Lightning: 4 ranks, stopped within an epoch, then 2 ranks with a worker each, then 3 from the end of an epoch.

    pip install -c constraints-trainers.txt -e '.[lightning]'
    python examples/trainers/lightning_trainer.py           # one or two minutes; exit code 0 only if every row is right

What a user of Lightning adds: `DataState()` among the callbacks, and the loader in place of torch's.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from parts.rows import EPOCHS, GLOBAL_BATCH_SIZE, MICRO_BATCH_SIZE, NUM_ROWS, VOCABULARY, Record, Rows, main
from torch.distributed.fsdp import fully_shard

import rescale_data as rd
from rescale_data.integrations.lightning import DataState

NUM_EVALUATED, EVALUATED_TOGETHER = 50, 12
STRATEGIES: dict[str, Any] = {
    "ddp": lambda world_size: "ddp",
    "fsdp2": lambda world_size: ModelParallelStrategy(  # sharded checkpoints
        data_parallel_size=world_size, tensor_parallel_size=1, process_group_backend="gloo"
    ),
}


class Model(pl.LightningModule):
    def __init__(self, record: Record) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Embedding(VOCABULARY, 8), torch.nn.Linear(8, VOCABULARY))
        self._record = record
        self._seen: list[int] = []

    def configure_model(self) -> None:
        if self.device_mesh is not None:  # sharded, not with DDP
            fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        self._record(self.global_step, batch["row"])
        return F.cross_entropy(self.layers(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())

    def validation_step(self, batch: dict[str, torch.Tensor], index: int) -> None:
        self._seen += batch["row"][batch["valid"]].tolist()

    def on_validation_epoch_end(self) -> None:
        rows, self._seen = self._seen, []
        part = EVALUATED_TOGETHER // self.trainer.world_size
        mine = [row for row in range(NUM_EVALUATED) if row % EVALUATED_TOGETHER // part == self.trainer.global_rank]
        if not self.trainer.sanity_checking and rows != mine:
            raise ValueError(f"rank {self.trainer.global_rank} evaluated {rows}, not {mine}")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


# copy from here
class Data(pl.LightningDataModule):
    """Makes the loader when Lightning's process group is there."""

    def __init__(self, num_workers: int) -> None:
        super().__init__()
        self._num_workers = num_workers

    def train_dataloader(self) -> rd.DataLoader:
        return rd.DataLoader(
            Rows(NUM_ROWS), global_batch_size=GLOBAL_BATCH_SIZE, micro_batch_size=MICRO_BATCH_SIZE,
            num_workers=self._num_workers, seed=0,
        )  # fmt: skip

    # to here

    def val_dataloader(self) -> rd.DataLoader:
        """Each row once, in the order of the dataset; a global batch is one micro batch of each rank."""
        return rd.DataLoader(Rows(NUM_EVALUATED), shuffle=False, global_batch_size=EVALUATED_TOGETHER, tail="pad")


def train(folder: Path, resume: int, stop: int, strategy: str) -> None:
    world_size = int(os.environ["WORLD_SIZE"])
    checkpoint = folder / f"step={resume}.ckpt" if resume else None
    # copy from here
    trainer = pl.Trainer(
        accelerator="cpu", devices=world_size, strategy=STRATEGIES[strategy](world_size), max_epochs=EPOCHS, max_steps=stop,
        logger=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[DataState(), ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1, filename="{step}")],
    )  # fmt: skip
    torch.manual_seed(0)  # not copied
    model, data = Model(Record(folder / f"from {resume}")), Data(int(resume > 0))  # not copied
    trainer.fit(model, datamodule=data, ckpt_path=checkpoint, weights_only=True)
    # to here


if __name__ == "__main__":
    main(train, __file__, "ddp")
