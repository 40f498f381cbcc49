"""TRL's `SFTTrainer`: 4 ranks, stopped within an epoch, then 2 ranks with a worker each, then 3 from the end of an epoch.

    pip install -c constraints-trainers.txt -e '.[huggingface]' trl
    python examples/trainers/trl_trainer.py                 # two minutes; exit code 0 only if every row is right

As with `Trainer`, but that `SFTTrainer` requires a dataset, which it prepares itself: it gets one row in place of it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from datasets import Dataset
from parts.llama import StopAt, record_rows, small_model
from parts.rows import EPOCHS, GLOBAL_BATCH_SIZE, MICRO_BATCH_SIZE, NUM_ROWS, VOCABULARY, Record, Sequences, main
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import rescale_data as rd
from rescale_data.integrations.huggingface import DataStateMixin


# copy from here
class Prepared(SFTTrainer):
    """`SFTTrainer` without a dataset: the loader's batches are what the model takes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, train_dataset=Dataset.from_dict({"input_ids": [[0]], "labels": [[0]]}), **kwargs)
        self.train_dataset = None


class MyTrainer(DataStateMixin, Prepared):
    """The mixin comes first."""


# to here


def train(folder: Path, resume: int, stop: int) -> None:
    checkpoint = folder / f"checkpoint-{resume}" if resume else None
    # copy from here
    arguments = SFTConfig(
        str(folder), use_cpu=True, bf16=False, num_train_epochs=EPOCHS, per_device_train_batch_size=MICRO_BATCH_SIZE,
        save_steps=2, report_to=[], disable_tqdm=True,
    )  # fmt: skip
    loader = rd.DataLoader(  # after SFTConfig, which starts the process group
        Sequences(NUM_ROWS), global_batch_size=GLOBAL_BATCH_SIZE, micro_batch_size=MICRO_BATCH_SIZE,
        num_workers=int(resume > 0), seed=0,
    )  # fmt: skip
    # to here
    model = small_model()
    words = Tokenizer(WordLevel({str(number): number for number in range(VOCABULARY)}, unk_token="0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="1", pad_token="1")
    # copy from here
    trainer = MyTrainer(model, arguments, processing_class=tokenizer, train_loader=loader, callbacks=[StopAt(stop)])
    record_rows(trainer, Record(folder / f"from {resume}"))  # not copied
    trainer.train(resume_from_checkpoint=checkpoint)  # a folder, or True
    # to here


if __name__ == "__main__":
    main(train, __file__)
