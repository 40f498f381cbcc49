"""Ray Train: 2 workers, one of which is killed, Ray starts them again, and a later job goes on with 3.

    pip install -c constraints-trainers.txt -e '.[ray]'
    python examples/trainers/ray_trainer.py                 # about a minute; exit code 0 only if every row is right

What a user of Ray adds: the loader, in the function that Ray runs on each worker, and its entry in what DCP saves.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from parts.rows import VOCABULARY, Record, Rows, compare, read
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig, get_checkpoint, get_context, report
from ray.train.torch import TorchTrainer, prepare_model
from torch.distributed.checkpoint.state_dict import get_state_dict

import rescale_data as rd
from rescale_data.checkpoint import load

NUM_ROWS, SAVE_EVERY = 480, 6  # one epoch of twenty steps
SIZES: dict[str, Any] = {"global_batch_size": 24, "seed": 0}
KILLED_AT, STOPPED_AT, STEPS = 14, 18, 20


# copy from here
def train(config: dict[str, Any]) -> None:  # on each worker of Ray's, whose process group is there
    layers = torch.nn.Sequential(torch.nn.Embedding(VOCABULARY, 8), torch.nn.Linear(8, VOCABULARY))  # not copied
    model = prepare_model(layers)
    optimizer = torch.optim.AdamW(model.parameters())
    loader = rd.DataLoader(Rows(NUM_ROWS), micro_batch_size=4, num_workers=config["num_workers"], **SIZES)
    if checkpoint := get_checkpoint():
        with checkpoint.as_directory() as folder:
            load(folder, {"model": model, "optimizer": optimizer, "loader": loader})
    record = Record(segment(config["folder"], loader.step))  # not copied
    batches = iter(loader)
    for step in range(loader.step, config["stop"]):
        for _ in range(loader.gradient_accumulation_steps):
            batch = next(batches)
            record(step, batch["row"])  # not copied
            die(step, checkpoint)  # not copied
            loss = F.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())
            (loss / loader.gradient_accumulation_steps).backward()
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % SAVE_EVERY == 0:
            with tempfile.TemporaryDirectory() as folder:  # this worker's files, which Ray puts beside the others'
                parts = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
                dcp.save({**parts, "loader": loader}, checkpoint_id=folder)
                report({"step": step + 1}, checkpoint=Checkpoint.from_directory(folder))
    loader.close()


# to here


def segment(folder: str, step: int) -> Path:
    """Return the folder of what these workers train from that step on."""
    return Path(folder) / f"{get_context().get_world_size()} from {step}"


def die(step: int, checkpoint: Any) -> None:
    """Kill the second worker of the first start, as a host is lost."""
    if step == KILLED_AT and checkpoint is None and get_context().get_world_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def job(folder: str, stop: int, num_workers: int, of_loader: int) -> None:
    """Train to a step with the workers that there are: from the newest checkpoint under the name of the run."""
    # copy from here
    trainer = TorchTrainer(
        train, scaling_config=ScalingConfig(num_workers=num_workers),
        train_loop_config={
            "folder": folder,  # not copied
            "stop": stop, "num_workers": of_loader,
        },
        run_config=RunConfig(name="run", storage_path=folder, failure_config=FailureConfig(max_failures=1)),
    )  # fmt: skip
    trainer.fit()
    # to here


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False)
        job(folder, STOPPED_AT, 2, 0)
        job(folder, STEPS, 3, 1)
        ray.shutdown()
        starts = sorted(tuple(map(int, segment.name.split(" from "))) for segment in Path(folder).glob("* from *"))
        segments = [(num, read(Path(folder) / f"{num} from {step}", num)) for num, step in starts]
    return 0 if compare(segments, NUM_ROWS, STEPS, **SIZES) else 1


if __name__ == "__main__":
    sys.exit(main())
