"""What the trainers' modules refuse: a trainer that was told otherwise than the loader. And what they set themselves."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch

import rescale_data as rd


def loader_of(**kwargs: Any) -> rd.DataLoader:
    return rd.DataLoader(range(32), global_batch_size=8, micro_batch_size=4, **kwargs)  # two micro batches a step


TWO_RANKS = {"dp_rank": 0, "dp_world_size": 2}


def hugging_face_trainer(folder: Path, loader: Any, dataset: Any = None, **arguments: Any) -> Any:
    module = pytest.importorskip("rescale_data.integrations.huggingface")
    sizes = {"per_device_train_batch_size": 4, **arguments}
    given = module.TrainingArguments(str(folder), use_cpu=True, report_to=[], **sizes)
    return module.DataStateMixin(torch.nn.Linear(1, 1), given, train_loader=loader, train_dataset=dataset)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"gradient_accumulation_steps": 4}, "steps=4.*the loader makes a global batch of 2 micro batches a rank"),
        ({"dataloader_num_workers": 3}, r"num_workers=3\), but .* may be 0\. .*rd\.DataLoader\(num_workers="),
        ({"per_device_train_batch_size": 3}, r"batch_size=3\), but .* may be 4\. .*rd\.DataLoader\(micro_batch_size="),
        ({"data_seed": 3}, r"seed=3\), but .* may be None or 0\. .*rd\.DataLoader\(seed="),
        ({"train_sampling_strategy": "sequential"}, r"may be 'random'\. .*rd\.DataLoader\(shuffle="),
        ({"auto_find_batch_size": True}, r"may be False\. .*rd\.DataLoader\(micro_batch_size="),
        ({"accelerator_config": {"split_batches": True}}, "split_batches=True: .* leave split_batches out"),
        ({"accelerator_config": {"dispatch_batches": True}}, "dispatch_batches=True: .* leave dispatch_batches out"),
        ({"dataset": [1, 2]}, r"a train_dataset= and a train_loader=: give rd\.DataLoader the dataset"),
        ({"loader": [1, 2]}, r"train_loader= is a list: give rd\.DataLoader"),
        ({"loader": TWO_RANKS}, "has 1 data-parallel ranks, but the loader serves its rows to 2"),
    ],
)
def test_hugging_face(arguments: dict[str, Any], says: str, tmp_path: Path) -> None:
    loader = arguments.get("loader", {})
    given = {**arguments, "loader": loader_of(**loader) if isinstance(loader, dict) else loader}
    with pytest.raises((ValueError, TypeError), match=says):
        hugging_face_trainer(tmp_path, **given)


def test_hugging_face_names_the_checkpoints_that_there_are(tmp_path: Path) -> None:
    trainer = hugging_face_trainer(tmp_path, loader_of())
    assert (trainer.args.gradient_accumulation_steps, trainer.args.ignore_data_skip) == (2, True)
    with pytest.raises(ValueError, match="No valid checkpoint found in output directory"):
        trainer.train(resume_from_checkpoint=True)  # and no run from the first row
    (tmp_path / "checkpoint-3").mkdir()
    with pytest.raises(FileNotFoundError, match=r"checkpoint-3 holds no rescale_data\.pt: .*another checkpoint"):
        trainer.train(resume_from_checkpoint=True)
    torch.save(loader_of().state_dict(), tmp_path / "checkpoint-3" / "rescale_data.pt")
    for folder in ("checkpoint-9", ""):
        with pytest.raises(FileNotFoundError, match=r"there is no such folder.* there are \['.*/checkpoint-3'\]"):
            trainer.train(resume_from_checkpoint=str(tmp_path / folder))


def test_torchtitan() -> None:
    module = pytest.importorskip("rescale_data.integrations.torchtitan")
    pipeline = lambda *given: rd.Reader(range(96), given[-1])  # noqa: E731
    config = module.RescaleDataLoader.Config(pipeline=pipeline, global_batch_size=8)
    sizes = {"dp_world_size": 1, "dp_rank": 0, "seq_len": 4, "local_batch_size": 4}
    module.RescaleDataLoader(config, snapshot_every_n_steps=4, **sizes)
    says = r"saves every 3 batches, but with global_batch_size=8 the loader takes 2 a step"
    with pytest.raises(ValueError, match=says):
        module.RescaleDataLoader(config, snapshot_every_n_steps=3, **sizes)


def lightning(**arguments: Any) -> tuple[Any, Any]:
    module = pytest.importorskip("rescale_data.integrations.lightning")
    trainer = module.pl.Trainer(
        accelerator="cpu", devices=1, callbacks=[module.DataState()], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, **{"max_steps": 2, **arguments},
    )  # fmt: skip
    model = module.pl.LightningModule()
    model.layer = torch.nn.Linear(1, 1)
    model.training_step = lambda batch, batch_idx: model.layer(batch[:, None].float()).sum()
    model.configure_optimizers = lambda: torch.optim.SGD(model.parameters())
    return trainer, model


@pytest.mark.parametrize(
    ("arguments", "kwargs", "says"),
    [
        ({"accumulate_grad_batches": 4}, {}, r"Give accumulate_grad_batches=2 or another micro_batch_size"),
        ({"manual": True}, {}, "with manual optimization it is 1"),
        ({}, TWO_RANKS, r"has 1 data-parallel ranks, but the loader serves its rows to 2"),
        ({"reload_dataloaders_every_n_epochs": 1}, {}, r"would begin the run's first epoch anew .* Leave it out"),
        ({"limit_train_batches": 3}, {}, r"after 3 of its 8 batches .* Give rd\.DataLoader\(steps_per_epoch"),
        ({}, {"repeat": True}, r"reads a batch ahead.* Give rd\.DataLoader\(steps_per_epoch=\.\.\.\)"),
    ],
)
def test_lightning(arguments: dict[str, Any], kwargs: dict[str, Any], says: str) -> None:
    trainer, model = lightning(**{name: value for name, value in arguments.items() if name != "manual"})
    model.automatic_optimization = "manual" not in arguments
    with pytest.raises(ValueError, match=says):
        trainer.fit(model, loader_of(**kwargs))


def test_lightning_resumes_from_a_state_of_the_data_and_trains_anew_after_an_evaluation(tmp_path: Path) -> None:
    trainer, model = lightning()
    trainer.fit(model, torch.utils.data.DataLoader(range(32), 4))
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    trainer, model = lightning(max_steps=4)
    with pytest.raises(ValueError, match=r"states of 0 rd\.DataLoader, and the trainer has 1: .* without ckpt_path="):
        trainer.fit(model, loader_of(), ckpt_path=tmp_path / "saved.ckpt", weights_only=True)
    trainer, model = lightning()
    trainer.fit(model, loader := loader_of())
    assert (trainer.accumulate_grad_batches, trainer.global_step, loader.step) == (2, 2, 2), "those of the loader"
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    trainer, model = lightning()
    model.validation_step = lambda batch, batch_idx: None
    trainer.validate(model, loader_of(), ckpt_path=tmp_path / "saved.ckpt", weights_only=True)
    trainer.fit(model, loader := loader_of())
    assert (trainer.global_step, loader.step) == (2, 2)


def test_lightning_tries_a_batch() -> None:
    trainer, model = lightning(fast_dev_run=True)
    trainer.fit(model, loader_of())
    assert trainer.global_step == 1


def test_lightning_does_not_count_steps_before_it_knows_the_accumulation() -> None:
    for given, says in ((1, "cannot be set later than trainer.estimated_stepping_batches"), (2, "")):
        trainer, model = lightning(accumulate_grad_batches=given, max_epochs=1)

        def configure(trainer: Any = trainer, model: Any = model) -> torch.optim.Optimizer:
            assert trainer.estimated_stepping_batches == 2  # max_steps
            return torch.optim.SGD(model.parameters())

        model.configure_optimizers = configure
        with pytest.raises(ValueError, match=says) if says else contextlib.nullcontext():
            trainer.fit(model, loader_of())
