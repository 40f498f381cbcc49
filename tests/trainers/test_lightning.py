"""Lightning: what `DataState` refuses, and what it does where Lightning takes an epoch for over and loads no loader."""

import contextlib

import pytest
import torch

import rescale_data as rd

pl = pytest.importorskip("lightning.pytorch")
ROWS = [{"x": torch.tensor([float(i)]), "row": i} for i in range(50)]


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer, self.rows = torch.nn.Linear(1, 1), []

    def training_step(self, batch, index):
        self.rows.append(batch["row"].tolist())
        return self.layer(batch["x"]).pow(2).mean()

    def validation_step(self, batch, index):
        self.rows.append(batch["row"].tolist())

    test_step = predict_step = validation_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

    def train_dataloader(self):
        return rd.DataLoader(ROWS, global_batch_size=12, num_logical_shards=24)


def trainer_of(*callbacks, **limits):
    from rescale_data.integrations.lightning import DataState

    quiet = dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False)
    return pl.Trainer(accelerator="cpu", callbacks=[DataState(), *callbacks], **limits, **quiet)


def rows_of(path, max_epochs, max_steps=-1, *, resume=False):
    model, trainer = Model(), trainer_of(max_epochs=max_epochs, max_steps=max_steps)
    trainer.fit(model, ckpt_path=path if resume else None)
    trainer.save_checkpoint(path)
    return model.rows


@pytest.mark.parametrize(("epochs", "steps", "more"), [(1, -1, 8), (2, -1, 4), (3, 6, 2)])
def test_saved_after_a_fit(epochs, steps, more, tmp_path):
    """At the end of its epochs, and where ``max_steps`` ended one, of which the rest is then the next of Lightning's."""
    whole = rows_of(tmp_path / "whole.ckpt", 3)
    begun = rows_of(tmp_path / "a.ckpt", epochs, steps)
    rest = rows_of(tmp_path / "a.ckpt", 3, resume=True)
    assert len(rest) == more
    assert [*begun, *rest] == whole[: len(begun) + more]


@pytest.mark.parametrize(("work", "limit"), [("validate", "val"), ("test", "test"), ("predict", "predict")])
def test_an_evaluation_begins_with_the_first_row_after_one_that_was_cut_short(work, limit):
    model, loader = Model(), rd.DataLoader(ROWS[:24], global_batch_size=12, shuffle=False, tail="pad")
    for batches in (1, 2):
        model.rows.clear()
        getattr(trainer_of(**{f"limit_{limit}_batches": batches}), work)(model, loader)
        assert model.rows == [list(range(12)), list(range(12, 24))][:batches]


def test_two_loaders_that_go_on_with_another_micro_batch(tmp_path):
    """Lightning counts the micro batches of both as one."""

    def fit(micro_batch_size, steps, path):
        sizes = {"global_batch_size": 8, "micro_batch_size": micro_batch_size, "num_logical_shards": 8}
        loaders = [rd.DataLoader(ROWS[:48], seed=seed, **sizes) for seed in range(2)]
        model, rows = Model(), []

        def step(batches, batch_idx):
            rows.append([batch["row"].tolist() for batch in batches])
            return model.layer(batches[0]["x"]).pow(2).mean()

        model.training_step = step
        trainer = trainer_of(max_steps=steps, max_epochs=5)
        trainer.fit(model, loaders, ckpt_path=path)
        return trainer, rows

    fit(4, 3, None)[0].save_checkpoint(tmp_path / "a.ckpt")
    for micro_batch_size in (2, 8):
        trainer, rows = fit(micro_batch_size, 9, tmp_path / "a.ckpt")
        assert trainer.global_step == 9
        assert len(rows) == 6 * 8 // micro_batch_size
        assert trainer.fit_loop.epoch_loop.batch_progress.current.ready == 3 * 8 // micro_batch_size


class SavesWithinAStep(pl.Callback):
    def __init__(self, path):
        self.path = path

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if (trainer.current_epoch, batch_idx) == (0, 4):
            trainer.save_checkpoint(self.path)


def test_a_save_within_a_balanced_step_goes_on_with_the_step(tmp_path):
    """The model in it is that of the step's beginning, and so is the loader."""
    sizes = {"global_batch_size": 12, "micro_batch_size": 4, "num_logical_shards": 24}

    def fit(path, *callbacks):
        torch.manual_seed(0)
        model, trainer = Model(), trainer_of(*callbacks, max_epochs=2)
        balance = rd.Balance(cost=lambda row: 1 + row["row"] % 7, over="rank")
        trainer.fit(model, rd.DataLoader(ROWS[:48], balance=balance, **sizes), ckpt_path=path)
        return trainer, model

    path = tmp_path / "a.ckpt"
    before, whole = fit(None, SavesWithinAStep(path))
    after, rest = fit(path)
    assert rest.rows == whole.rows[3:]
    assert all(torch.equal(one, other) for one, other in zip(whole.parameters(), rest.parameters(), strict=True))
    one, other = (trainer.fit_loop.epoch_loop for trainer in (before, after))
    assert one.batch_progress.state_dict() == other.batch_progress.state_dict()
    assert (one._batches_that_stepped, one.global_step) == (other._batches_that_stepped, other.global_step)


@pytest.mark.parametrize("fails_at", [6, 7, 8])
def test_a_save_while_a_batch_is_trained_goes_on_with_whole_steps(fails_at, tmp_path, caplog):
    """An exception or a signal of SLURM saves there. The batch is lost to the model, and a warning says so."""

    def fit(path, fails=0):
        model, rows = Model(), []

        def step(batch, batch_idx):
            if len(rows) + 1 == fails:
                trainer.save_checkpoint(tmp_path / "a.ckpt")
            rows.append((trainer.global_step, batch["row"].tolist()))
            return model.layer(batch["x"]).pow(2).mean()

        model.training_step = step
        trainer = trainer_of(max_epochs=3)
        trainer.fit(model, rd.DataLoader(ROWS[:48], global_batch_size=12, micro_batch_size=6), ckpt_path=path)
        return rows

    whole = fit(None, fails_at)
    rest = fit(tmp_path / "a.ckpt")
    assert [rows for _, rows in rest] == [rows for _, rows in whole[fails_at:]]
    assert [step for step, _ in rest] == [(fails_at - 1) // 2 + (i + fails_at % 2) // 2 for i in range(len(rest))]
    assert "saved while micro batch" in caplog.text


def loader_of(**kwargs):
    return rd.DataLoader(ROWS[:32], global_batch_size=8, micro_batch_size=4, **kwargs)  # two micro batches a step


def of_two_steps(**arguments):
    return trainer_of(**{"max_steps": 2, **arguments}), Model()


@pytest.mark.parametrize(
    ("arguments", "kwargs", "says"),
    [
        ({"accumulate_grad_batches": 4}, {}, r"Give accumulate_grad_batches=2 or another micro_batch_size"),
        ({"manual": True}, {}, "with manual optimization it is 1"),
        ({}, {"dp_rank": 0, "dp_world_size": 2}, r"has 1 data-parallel ranks, but the loader serves its rows to 2"),
        ({"reload_dataloaders_every_n_epochs": 1}, {}, r"would begin the run's first epoch anew .* Leave it out"),
        ({"limit_train_batches": 3}, {}, r"after 3 of its 8 batches .* Give rd\.DataLoader\(steps_per_epoch"),
        ({}, {"repeat": True}, r"reads a batch ahead.* Give rd\.DataLoader\(steps_per_epoch=\.\.\.\)"),
    ],
)
def test_what_is_refused(arguments, kwargs, says):
    trainer, model = of_two_steps(**{name: value for name, value in arguments.items() if name != "manual"})
    model.automatic_optimization = "manual" not in arguments
    with pytest.raises(ValueError, match=says):
        trainer.fit(model, loader_of(**kwargs))


def test_it_resumes_from_a_state_of_the_data_and_trains_anew_after_an_evaluation(tmp_path):
    trainer, model = of_two_steps()
    trainer.fit(model, torch.utils.data.DataLoader(ROWS[:32], 4))
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    trainer, model = of_two_steps(max_steps=4)
    with pytest.raises(ValueError, match=r"states of 0 rd\.DataLoader, and the trainer has 1: .* without ckpt_path="):
        trainer.fit(model, loader_of(), ckpt_path=tmp_path / "saved.ckpt", weights_only=True)
    trainer, model = of_two_steps()
    trainer.fit(model, loader := loader_of())
    assert (trainer.accumulate_grad_batches, trainer.global_step, loader.step) == (2, 2, 2), "those of the loader"
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    trainer, model = of_two_steps()
    trainer.validate(model, loader_of(), ckpt_path=tmp_path / "saved.ckpt", weights_only=True)
    trainer.fit(model, loader := loader_of())
    assert (trainer.global_step, loader.step) == (2, 2)


def test_it_tries_a_batch():
    trainer, model = of_two_steps(fast_dev_run=True)
    trainer.fit(model, loader_of())
    assert trainer.global_step == 1


def test_it_does_not_count_steps_before_it_knows_the_accumulation():
    for given, says in ((1, "cannot be set later than trainer.estimated_stepping_batches"), (2, "")):
        trainer, model = of_two_steps(accumulate_grad_batches=given, max_epochs=1)

        def configure(trainer=trainer, model=model):
            assert trainer.estimated_stepping_batches == 2  # max_steps
            return torch.optim.SGD(model.parameters())

        model.configure_optimizers = configure
        with pytest.raises(ValueError, match=says) if says else contextlib.nullcontext():
            trainer.fit(model, loader_of())
