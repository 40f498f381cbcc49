"""`Trainer` after a resume within an epoch: it logs the epoch that the data is at."""

from pathlib import Path
from typing import Any

import pytest
import torch

import rescale_data as rd

ROWS = [{"x": torch.tensor([float(i)])} for i in range(32)]


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.layer(x).pow(2).mean()}


def is_first_half(row: Any) -> bool:
    return bool(row["x"] < 16)


def first_half(shard: rd.Shard) -> rd.BaseNode[Any]:
    return rd.Filter(rd.Reader(ROWS, shard), is_first_half)


def train(folder: Path, resume: str | None, data: Any = ROWS, max_steps: int = -1) -> Any:
    module = pytest.importorskip("rescale_data.integrations.huggingface")
    given = module.TrainingArguments(
        str(folder), use_cpu=True, report_to=[], disable_tqdm=True, save_steps=1, logging_steps=1, num_train_epochs=2,
        per_device_train_batch_size=4, max_steps=max_steps,
    )  # fmt: skip
    loader = rd.DataLoader(data, global_batch_size=8, micro_batch_size=4, num_logical_shards=8)  # four steps an epoch
    trainer = module.DataStateMixin(Model(), given, train_loader=loader)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def test_the_epoch_after_a_resume_within_one(tmp_path: Path) -> None:
    whole = train(tmp_path, None)
    resumed = train(tmp_path, str(tmp_path / "checkpoint-6"))
    epochs = [[log["epoch"] for log in trainer.state.log_history if "loss" in log] for trainer in (whole, resumed)]
    assert epochs == [[step / 4 for step in range(1, 9)]] * 2
    assert (resumed.state.epoch, resumed.state.global_step) == (2.0, 8)


@pytest.mark.parametrize("step", range(1, 5))
def test_a_resume_in_any_epoch_of_rows_that_only_reading_counts(step: int, tmp_path: Path) -> None:
    """Of a loader without ``len`` the trainer cannot tell in which epoch it stands, or that it stands at the end of one."""
    whole = train(tmp_path, None, first_half, 5)  # two steps an epoch
    resumed = train(tmp_path, str(tmp_path / f"checkpoint-{step}"), first_half, 5)
    logs = [
        [(log["epoch"], log["loss"]) for log in each.state.log_history if "loss" in log] for each in (whole, resumed)
    ]
    assert logs[0] == logs[1]
    assert [epoch for epoch, _ in logs[0]] == [each / 5 for each in range(1, 6)]
