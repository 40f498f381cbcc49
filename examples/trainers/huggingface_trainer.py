"""Hugging Face `Trainer`: 4 ranks, stopped in the middle of an epoch, then 2 ranks with another accumulation and a worker each.

    pip install -c constraints-trainers.txt -e '.[huggingface]'
    python examples/trainers/huggingface_trainer.py         # about a minute; exit code 0 only if every row is right

What a user of `Trainer` adds: `DataStateMixin` as a base class, and ``train_loader=`` in place of ``train_dataset=``.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from parts.rows import VOCABULARY, Record, Rows, compare, read, torchrun
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import rescale_data as rd
from rescale_data.integrations.huggingface import DataStateMixin

NUM_ROWS, GLOBAL_BATCH_SIZE, MICRO_BATCH_SIZE = 240, 24, 3  # ten steps an epoch
EPOCHS = 2


class Sequences(Rows):
    """Rows with labels as models of transformers want them: the tokens themselves, which the model shifts."""

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        sample = super().__getitem__(row)
        return {**sample, "labels": sample["input_ids"]}


# copy from here
class MyTrainer(DataStateMixin, Trainer):
    """Your trainer, or any of transformers': the mixin comes first."""

    # to here

    record: Record

    def training_step(self, model: torch.nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        self.record(self.state.global_step, inputs.pop("row"))
        return super().training_step(model, inputs, *args, **kwargs)


class StopAt(TrainerCallback):
    """Stands for a job that is stopped."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step == self._step


def train(folder: Path, leg: str, stop: int, resume: str | None) -> None:
    # copy from here
    arguments = TrainingArguments(
        str(folder), use_cpu=True, num_train_epochs=EPOCHS, per_device_train_batch_size=MICRO_BATCH_SIZE, save_steps=2,
        eval_strategy="steps", eval_steps=3,  # in the middle of an epoch: training goes on where it was
        report_to=[], disable_tqdm=True,
    )  # fmt: skip
    loader = rd.DataLoader(  # after TrainingArguments, which start the process group
        Sequences(NUM_ROWS), global_batch_size=GLOBAL_BATCH_SIZE, micro_batch_size=MICRO_BATCH_SIZE,
        num_workers=1 if resume else 0, seed=0,
    )  # fmt: skip
    # to here
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
        )
    )
    # copy from here
    trainer = MyTrainer(model, arguments, train_loader=loader, eval_dataset=Sequences(50), callbacks=[StopAt(stop)])
    trainer.record = Record(folder / leg)  # not copied
    trainer.train(resume_from_checkpoint=resume)  # a folder, or True
    # to here


def main(step: int = 12) -> int:
    """Stop after 14 steps, and go on from the checkpoint of one before: 10 is the end of an epoch, 12 is within one."""
    with tempfile.TemporaryDirectory(prefix="huggingface-") as name:
        folder = Path(name)
        torchrun(__file__, 4, folder, "first", 14, "")
        torchrun(__file__, 2, folder, "second", -1, folder / f"checkpoint-{step}")
        legs = [read(folder / "first", 4), read(folder / "second", 2)]
    sizes: dict[str, Any] = {"global_batch_size": GLOBAL_BATCH_SIZE, "seed": 0}
    return 0 if compare(legs, NUM_ROWS, EPOCHS * NUM_ROWS // GLOBAL_BATCH_SIZE, **sizes) else 1


if __name__ == "__main__":
    if len(sys.argv) > 2:
        folder, leg, stop, resume = sys.argv[1:]
        train(Path(folder), leg, int(stop), resume or None)
    else:
        sys.exit(main(*map(int, sys.argv[1:])))
