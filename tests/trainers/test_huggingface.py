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


def train(folder: Path, resume: str | None) -> Any:
    module = pytest.importorskip("rescale_data.integrations.huggingface")
    given = module.TrainingArguments(
        str(folder), use_cpu=True, report_to=[], disable_tqdm=True, save_steps=1, logging_steps=1, num_train_epochs=2,
        per_device_train_batch_size=4,
    )  # fmt: skip
    loader = rd.DataLoader(ROWS, global_batch_size=8, micro_batch_size=4)  # four steps an epoch
    trainer = module.DataStateMixin(Model(), given, train_loader=loader)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def test_the_epoch_after_a_resume_within_one(tmp_path: Path) -> None:
    whole = train(tmp_path, None)
    resumed = train(tmp_path, str(tmp_path / "checkpoint-6"))
    epochs = [[log["epoch"] for log in trainer.state.log_history if "loss" in log] for trainer in (whole, resumed)]
    assert epochs == [[step / 4 for step in range(1, 9)]] * 2
    assert (resumed.state.epoch, resumed.state.global_step) == (2.0, 8)
