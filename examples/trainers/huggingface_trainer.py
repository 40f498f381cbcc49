"""Hugging Face `Trainer`: 4 ranks, stopped within an epoch, then 2 ranks with a worker each, then 3 from the end of an epoch.

    pip install -c constraints-trainers.txt -e '.[huggingface]'
    python examples/trainers/huggingface_trainer.py         # one or two minutes; exit code 0 only if every row is right

What a user of `Trainer` adds: `DataStateMixin` as a base class, and ``train_loader=`` in place of ``train_dataset=``.
"""

from __future__ import annotations

from pathlib import Path

from parts.llama import StopAt, record_rows, small_model
from parts.rows import EPOCHS, GLOBAL_BATCH_SIZE, MICRO_BATCH_SIZE, NUM_ROWS, Record, Sequences, main
from transformers import Trainer, TrainingArguments

import rescale_data as rd
from rescale_data.integrations.huggingface import DataStateMixin


# copy from here
class MyTrainer(DataStateMixin, Trainer):
    """Your trainer, or any of transformers': the mixin comes first."""


# to here


def train(folder: Path, resume: int, stop: int) -> None:
    checkpoint = folder / f"checkpoint-{resume}" if resume else None
    # copy from here
    arguments = TrainingArguments(
        str(folder), use_cpu=True, num_train_epochs=EPOCHS, per_device_train_batch_size=MICRO_BATCH_SIZE, save_steps=2,
        eval_strategy="steps", eval_steps=3,  # in the middle of an epoch: training goes on where it was
        report_to=[], disable_tqdm=True,
    )  # fmt: skip
    loader = rd.DataLoader(  # after TrainingArguments, which start the process group
        Sequences(NUM_ROWS), global_batch_size=GLOBAL_BATCH_SIZE, micro_batch_size=MICRO_BATCH_SIZE,
        num_workers=int(resume > 0), seed=0,
    )  # fmt: skip
    # to here
    model = small_model()
    # copy from here
    trainer = MyTrainer(model, arguments, train_loader=loader, eval_dataset=Sequences(50), callbacks=[StopAt(stop)])
    record_rows(trainer, Record(folder / f"from {resume}"))  # not copied
    trainer.train(resume_from_checkpoint=checkpoint)  # a folder, or True
    # to here


if __name__ == "__main__":
    main(train, __file__)
