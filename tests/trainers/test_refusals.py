"""What the trainers' modules refuse: a trainer that was told otherwise than the loader."""

from pathlib import Path
from typing import Any

import pytest
import torch

import rescale_data as rd


def loader_of(**kwargs: Any) -> rd.DataLoader:
    return rd.DataLoader(range(32), global_batch_size=8, micro_batch_size=4, **kwargs)  # two micro batches a step


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"gradient_accumulation_steps": 1}, "steps=1.*the loader makes a global batch of 2 micro batches a rank"),
        ({"accelerator_config": {"split_batches": True}}, "split_batches=True: .* leave split_batches out"),
        ({"accelerator_config": {"dispatch_batches": True}}, "dispatch_batches=True: .* leave dispatch_batches out"),
    ],
)
def test_hugging_face(arguments: dict[str, Any], says: str, tmp_path: Path) -> None:
    module = pytest.importorskip("rescale_data.integrations.huggingface")
    given = {"gradient_accumulation_steps": 2, "use_cpu": True, "report_to": [], **arguments}
    with pytest.raises(ValueError, match=says):
        module.DataStateMixin(
            torch.nn.Linear(1, 1), module.TrainingArguments(str(tmp_path), **given), train_loader=loader_of()
        )


def test_hugging_face_checkpoint_without_the_data(tmp_path: Path) -> None:
    module = pytest.importorskip("rescale_data.integrations.huggingface")
    arguments = module.TrainingArguments(str(tmp_path), gradient_accumulation_steps=2, use_cpu=True, report_to=[])
    trainer = module.DataStateMixin(torch.nn.Linear(1, 1), arguments, train_loader=loader_of())
    assert arguments.ignore_data_skip
    (tmp_path / "checkpoint-3").mkdir()
    with pytest.raises(FileNotFoundError, match=r"checkpoint-3 holds no rescale_data\.pt: .*the checkpoint before it"):
        trainer.train(resume_from_checkpoint=True)


@pytest.mark.parametrize(
    ("arguments", "kwargs", "says"),
    [
        ({"accumulate_grad_batches": 1}, {}, r"Give accumulate_grad_batches=2 or another micro_batch_size"),
        ({"limit_train_batches": 3}, {}, r"after 3 of its 8 batches .* Give rd\.DataLoader\(steps_per_epoch"),
        ({}, {"repeat": True}, r"reads a batch ahead.* Give rd\.DataLoader\(steps_per_epoch=\.\.\.\)"),
    ],
)
def test_lightning(arguments: dict[str, Any], kwargs: dict[str, Any], says: str) -> None:
    module = pytest.importorskip("rescale_data.integrations.lightning")
    given = {"accumulate_grad_batches": 2, "max_steps": 2, **arguments}
    trainer = module.pl.Trainer(
        accelerator="cpu", devices=1, callbacks=[module.DataState()], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, **given,
    )  # fmt: skip
    model = module.pl.LightningModule()
    model.layer = torch.nn.Linear(1, 1)
    model.training_step = lambda batch, index: model.layer(batch[:, None].float()).sum()
    model.configure_optimizers = lambda: torch.optim.SGD(model.parameters())
    with pytest.raises(ValueError, match=says):
        trainer.fit(model, loader_of(**kwargs))
