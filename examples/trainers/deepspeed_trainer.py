"""DeepSpeed: 4 ranks, stopped within an epoch, then 2 ranks with a worker each, then 3 from the end of an epoch.

    pip install -c constraints-trainers.txt -e . deepspeed
    DS_ACCELERATOR=cpu python examples/trainers/deepspeed_trainer.py   # exit code 0 only if every row is right

The first run compiles DeepSpeed's own collectives for CPUs, with a C++ compiler: minutes, once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.nn.functional as F
from parts.rows import GLOBAL_BATCH_SIZE, MICRO_BATCH_SIZE, NUM_ROWS, VOCABULARY, Record, Rows, main

import rescale_data as rd


def train(folder: Path, resume: int, stop: int) -> None:
    config: dict[str, Any] = {"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}
    # copy from here
    deepspeed.init_distributed(dist_backend="gloo")
    loader = rd.DataLoader(
        Rows(NUM_ROWS), global_batch_size=GLOBAL_BATCH_SIZE, micro_batch_size=MICRO_BATCH_SIZE,
        num_workers=int(resume > 0), seed=0,
    )  # fmt: skip
    config["train_micro_batch_size_per_gpu"] = MICRO_BATCH_SIZE
    config["gradient_accumulation_steps"] = loader.gradient_accumulation_steps
    torch.manual_seed(0)  # not copied
    model = torch.nn.Sequential(torch.nn.Embedding(VOCABULARY, 8), torch.nn.Linear(8, VOCABULARY))  # not copied
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    if resume:
        _, client_state = engine.load_checkpoint(str(folder), tag=f"step {resume}")
        loader.load_state_dict(client_state["loader"])
    record = Record(folder / f"from {resume}")  # not copied
    while loader.step < stop:
        for batch in loader:
            step = engine.global_steps
            record(step, batch["row"])  # not copied
            loss = F.cross_entropy(engine(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())
            engine.backward(loss)
            engine.step()  # an optimizer step with the last micro batch of a global batch
            if engine.global_steps > step and loader.step % 2 == 0:
                engine.save_checkpoint(
                    str(folder), tag=f"step {loader.step}", client_state={"loader": loader.state_dict()}
                )
            if loader.step == stop:
                break
    # to here
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(train, __file__)
