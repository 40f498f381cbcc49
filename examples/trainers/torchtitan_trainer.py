"""torchtitan: 4 ranks, stopped within an epoch, then 2 ranks with a worker each, then 3 from the end of an epoch.

    pip install -c constraints-trainers.txt -e '.[trainers]' && pip install --no-deps torchtitan==0.3.0
    python examples/trainers/torchtitan_trainer.py          # one or two minutes; exit code 0 only if every row is right

What a user changes is one field of torchtitan's config, ``dataloader=RescaleDataLoader.Config(...)``. Its trainer needs a
GPU; what is run here on CPU is all around the model: the component as the trainer builds it, its steps over batches, and
torchtitan's own `CheckpointManager`, which saves and loads it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from parts.rows import GLOBAL_BATCH_SIZE, MICRO_BATCH_SIZE, NUM_ROWS, Record, main
from torch.distributed.checkpoint.stateful import Stateful
from torchtitan.components.checkpoint import CheckpointManager

import rescale_data as rd
from rescale_data.integrations.torchtitan import RescaleDataLoader

SEQ_LEN = 8


class Documents(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Rows of `SEQ_LEN` + 1 tokens, the first of which is their number."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(SEQ_LEN + 1) * (row % 7 + 1) + row) % 64
        tokens[0] = row
        return {"row": torch.tensor(row), "tokens": tokens[:-1], "labels": tokens[1:]}


# copy from here
def pipeline(tokenizer: Any, seq_len: int, shard: rd.Shard) -> rd.BaseNode[Any]:
    return rd.Reader(ROWS, shard)


# to here

ROWS = Documents(NUM_ROWS)


class Empty(Stateful):
    """In place of torchtitan's optimizers and schedulers, which come with a model."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class TrainState(Stateful):
    step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step = state_dict["step"]


def train(folder: Path, resume: int, stop: int) -> None:
    """As torchtitan's trainer: build, load, then steps of some micro batches, a save every other step."""
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    # copy from here
    config = RescaleDataLoader.Config(
        pipeline=pipeline, global_batch_size=GLOBAL_BATCH_SIZE, num_workers=int(resume > 0), seed=0, repeat=False
    )
    # to here
    loader = config.build(
        dp_world_size=world_size, dp_rank=rank, tokenizer=None, seq_len=SEQ_LEN, local_batch_size=MICRO_BATCH_SIZE,
        snapshot_every_n_steps=2 * (GLOBAL_BATCH_SIZE // (world_size * MICRO_BATCH_SIZE)),  # batches, as the trainer counts
    )  # fmt: skip
    state, record = TrainState(), Record(folder / f"from {resume}")
    checkpointer = CheckpointManager.Config(enable=True, interval=2, last_save_model_only=False, keep_latest_k=0).build(
        dataloader=loader, model_parts=[torch.nn.Linear(2, 2)], optimizers=Empty(), lr_schedulers=Empty(),
        states={"train_state": state}, sd_adapter=None, base_folder=str(folder),
    )  # fmt: skip
    checkpointer.load(step=resume or -1)
    batches = iter(loader)
    while state.step < stop:
        for _ in range(GLOBAL_BATCH_SIZE // (world_size * MICRO_BATCH_SIZE)):
            batch = next(batches, None)
            if batch is None:  # an epoch has ended, on all ranks
                batches = iter(loader)
                batch = next(batches)
            inputs, labels = batch
            assert inputs["input"].shape == inputs["positions"].shape == labels.shape == (MICRO_BATCH_SIZE, SEQ_LEN)
            record(state.step, inputs["input"][:, 0])
        state.step += 1
        checkpointer.save(state.step)
    checkpointer.close()
    loader.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(train, __file__)
