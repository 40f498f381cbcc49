"""accelerate: 4 ranks, stopped within an epoch, then 2 ranks with a worker each, then 3 from the end of an epoch.

    pip install -c constraints-trainers.txt -e '.[huggingface]'
    python examples/trainers/accelerate_trainer.py          # one or two minutes; exit code 0 only if every row is right

What a user adds is one line, ``accelerator.register_for_checkpointing(loader)``. The loader need not be given to
`Accelerator.prepare`, and the loop takes ``loader.gradient_accumulation_steps`` batches a step.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from parts.rows import GLOBAL_BATCH_SIZE, MICRO_BATCH_SIZE, NUM_ROWS, VOCABULARY, Record, Rows, main

import rescale_data as rd


def train(folder: Path, resume: int, stop: int) -> None:
    # copy from here
    accelerator = Accelerator(cpu=True)
    loader = rd.DataLoader(
        Rows(NUM_ROWS), global_batch_size=GLOBAL_BATCH_SIZE, micro_batch_size=MICRO_BATCH_SIZE,
        num_workers=int(resume > 0), seed=0,
    )  # fmt: skip
    torch.manual_seed(0)  # not copied
    model: Any = torch.nn.Sequential(torch.nn.Embedding(VOCABULARY, 8), torch.nn.Linear(8, VOCABULARY))  # not copied
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.register_for_checkpointing(loader)
    if resume:
        accelerator.load_state(str(folder / f"step {resume}"))
    record = Record(folder / f"from {resume}")  # not copied
    while loader.step < stop:
        for batch in loader:
            step = loader.step - (loader.batches_left % loader.gradient_accumulation_steps == 0)
            record(step, batch["row"])  # not copied
            loss = F.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())
            accelerator.backward(loss / loader.gradient_accumulation_steps)
            if loader.step > step:  # its last micro batch
                optimizer.step()
                optimizer.zero_grad()
                if loader.step % 2 == 0:
                    accelerator.save_state(str(folder / f"step {loader.step}"))
            if loader.step == stop:
                break
    # to here
    accelerator.end_training()


if __name__ == "__main__":
    main(train, __file__)
