"""accelerate: 4 ranks, stopped in the middle of an epoch, then 2 ranks with another accumulation and a worker each.

    pip install -c constraints-trainers.txt -e '.[huggingface]'
    python examples/trainers/accelerate_trainer.py          # about a minute; exit code 0 only if every row is right

What a user adds is one line, ``accelerator.register_for_checkpointing(loader)``. The loader need not be given to
`Accelerator.prepare`, and the loop takes ``loader.gradient_accumulation_steps`` batches a step.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from parts.rows import VOCABULARY, Record, Rows, compare, read, torchrun

import rescale_data as rd

NUM_ROWS, GLOBAL_BATCH_SIZE, MICRO_BATCH_SIZE, STEPS = 240, 24, 3, 20  # ten steps an epoch


def train(folder: Path, leg: str, stop: int, resume: str) -> None:
    # copy from here
    accelerator = Accelerator(cpu=True)
    loader = rd.DataLoader(
        Rows(NUM_ROWS), global_batch_size=GLOBAL_BATCH_SIZE, micro_batch_size=MICRO_BATCH_SIZE,
        num_workers=1 if resume else 0, seed=0,
    )  # fmt: skip
    torch.manual_seed(0)  # not copied
    model: Any = torch.nn.Sequential(torch.nn.Embedding(VOCABULARY, 8), torch.nn.Linear(8, VOCABULARY))  # not copied
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.register_for_checkpointing(loader)
    if resume:
        accelerator.load_state(resume)
    record = Record(folder / leg)  # not copied
    while loader.step < stop:
        for batch in loader:
            step = loader.step - (loader.batches_left % loader.gradient_accumulation_steps == 0)
            record(step, batch["row"])  # not copied
            loss = F.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())
            accelerator.backward(loss / loader.gradient_accumulation_steps)
            if loader.step > step:  # its last micro batch
                optimizer.step()
                optimizer.zero_grad()
                if loader.step == 12:
                    accelerator.save_state(str(folder / "state"))
            if loader.step == stop:
                break
    # to here
    accelerator.end_training()


def main() -> int:
    """Stop after 14 steps, and go on from the state of step 12."""
    with tempfile.TemporaryDirectory(prefix="accelerate-") as name:
        folder = Path(name)
        torchrun(__file__, 4, folder, "first", 14, "")
        torchrun(__file__, 2, folder, "second", STEPS, folder / "state")
        legs = [read(folder / "first", 4), read(folder / "second", 2)]
    sizes: dict[str, Any] = {"global_batch_size": GLOBAL_BATCH_SIZE, "seed": 0}
    return 0 if compare(legs, NUM_ROWS, STEPS, **sizes) else 1


if __name__ == "__main__":
    if "RANK" in os.environ:
        folder, leg, stop, resume = sys.argv[1:]
        train(Path(folder), leg, int(stop), resume)
    else:
        sys.exit(main())
