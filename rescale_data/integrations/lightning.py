"""Lightning (2.6): a callback that keeps the data order in Lightning's checkpoints.

Lightning saves ``state_dict()`` of a training loader with its loops, on all ranks, and loads it before the first batch. What
it does not know is that the number of ranks may have changed: it counts micro batches of one rank.
"""

from __future__ import annotations

import logging
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.utilities import CombinedLoader

from rescale_data.engine.states.codec import SavedState, at_next_epoch, decode, is_state
from rescale_data.integrations.dp_ranks import require_ranks
from rescale_data.loader import DataLoader

_logger = logging.getLogger("rescale_data")
_COUNTER_NAMES = ("ready", "started", "processed", "completed")
"""Names of Lightning's counters of micro batches."""


class DataState(pl.Callback):
    """Resumes a `rescale_data.DataLoader` with `Trainer.fit(ckpt_path=...)`, on any number of ranks.

    Build the loader in ``train_dataloader()`` of a module or a data module, where Lightning's process group is there, and leave
    ``Trainer(accumulate_grad_batches=)`` out: it is set to the loader's. Lightning has no such number with manual optimization,
    and DeepSpeed takes it too early: there, and where you give it, it is compared. A schedule that asks for
    ``trainer.estimated_stepping_batches`` needs it before this callback can know it: give it then.

    Other loaders may be ours, too (``shuffle=False, tail="pad"``): a validation, test or prediction begins with the first row.

    Raises:
        ValueError: Another accumulation or another number of data-parallel ranks than the loader's; a loader without ``len``,
            of which Lightning would read a batch ahead of what a checkpoint says; ``limit_train_batches`` or
            ``overfit_batches``, which cut an epoch short; ``reload_dataloaders_every_n_epochs``, which would begin anew;
            a checkpoint that has no state of a loader.

    Example:
        >>> trainer = pl.Trainer(accelerator="cpu", callbacks=[DataState()], logger=False, enable_checkpointing=False)
    """

    def __init__(self) -> None:
        self._loaded_states: list[dict[str, Any]] | None = None  # `None`: training does not begin from a checkpoint
        self._loader_made_early = False  # True if Lightning made the loader before accumulation could be set

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Record if Lightning has made the loader already, because ``configure_optimizers`` asked for the number of batches."""
        self._loader_made_early = trainer.train_dataloader is not None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Check Lightning's arguments, and load the states of loaders that Lightning has not loaded.

        It loads none if it considers the epoch to be over.
        """
        loaders, resumes_from_checkpoint = _rescale_loaders(trainer.train_dataloader), self._loaded_states is not None
        states, self._loaded_states = self._loaded_states or [], None
        if resumes_from_checkpoint and len(states) != len(loaders):
            raise ValueError(
                f"The checkpoint has the states of {len(states)} rd.DataLoader, and the trainer has {len(loaders)}: rows would "
                f"come again. Give the loaders that it was saved with, or begin a run with its weights, without ckpt_path=."
            )
        pairs = zip(loaders, states, strict=False)
        states_to_load = [(loader, state) for loader, state in pairs if loader.step != decode(state).header["step"]]
        for loader, state in states_to_load:
            loader.load_state_dict(state)
        if states_to_load:
            iter(trainer.fit_loop._data_fetcher)  # Lightning has iterators of these already  # pyright: ignore
        if trainer.reload_dataloaders_every_n_epochs:
            raise ValueError(
                f"Trainer(reload_dataloaders_every_n_epochs={trainer.reload_dataloaders_every_n_epochs}) would begin the run's "
                f"first epoch anew with each loader. Leave it out: a loader shuffles each epoch by itself; for other data "
                f"build another one, load its state into it, and call trainer.fit again."
            )
        for loader in loaders:
            num_ranks = (trainer.distributed_sampler_kwargs or {"num_replicas": 1})["num_replicas"]
            require_ranks(loader, num_ranks, "in train_dataloader()")
            self._set_accumulation(trainer, pl_module, loader.gradient_accumulation_steps)
            try:
                len(loader)
            except TypeError as error:
                raise ValueError(
                    f"{error} Lightning then reads a batch ahead, and a checkpoint would lose it. Give "
                    f"rd.DataLoader(steps_per_epoch=...)."
                ) from error
            if trainer.num_training_batches != len(loader) and not trainer.fast_dev_run:  # which saves nothing
                raise ValueError(
                    f"Lightning ends an epoch after {trainer.num_training_batches} of its {len(loader)} batches "
                    f"(limit_train_batches or overfit_batches). Give rd.DataLoader(steps_per_epoch=...) in their place."
                )
        for state in states[:1]:  # a batch has one of each loader
            _convert_batch_counts(
                trainer.fit_loop.epoch_loop.batch_progress.current, decode(state), trainer.accumulate_grad_batches
            )

    def _set_accumulation(self, trainer: pl.Trainer, pl_module: pl.LightningModule, steps: int) -> None:
        """Set ``accumulate_grad_batches`` to ``steps`` if it may be set and the user has not; else raise if it differs."""
        can_set_accumulation = pl_module.automatic_optimization and not isinstance(trainer.strategy, DeepSpeedStrategy)
        if trainer.accumulate_grad_batches == 1 and can_set_accumulation and not self._loader_made_early:
            trainer.accumulate_grad_batches = steps
        if trainer.accumulate_grad_batches != steps:
            raise ValueError(
                f"Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches}), but the loader makes a global batch of "
                f"{steps} micro batches a rank. Give accumulate_grad_batches={steps} or another micro_batch_size (it cannot "
                f"be set later than trainer.estimated_stepping_batches is asked for, nor with DeepSpeed; with manual "
                f"optimization it is 1)."
            )

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Reset the validation loaders, so that each evaluation begins with the first row, also after a sanity check."""
        _reset_loaders(trainer.val_dataloaders)

    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Reset the test loaders, so that each test begins with the first row."""
        _reset_loaders(trainer.test_dataloaders)

    def on_predict_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Reset the loaders of a prediction, so that each prediction begins with the first row."""
        _reset_loaders(trainer.predict_dataloaders)

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Keep the loaders' states until training begins; a state at the end of an epoch moves to the next epoch."""
        if not trainer.training:
            return  # an evaluation of a checkpoint: the next fit does not go on from it
        states = checkpoint["loops"]["fit_loop"]["state_dict"].get("combined_loader", [])
        states[:] = [at_next_epoch(state) if is_state(state) else state for state in states]
        self._loaded_states = [state for state in states if is_state(state)]
        for state in self._loaded_states[:1]:
            _complete_interrupted_batch(checkpoint["loops"]["fit_loop"])
            _undo_partial_step(checkpoint["loops"]["fit_loop"], decode(state))


def _rescale_loaders(dataloaders: Any) -> list[DataLoader]:
    """Return the loaders of this package among ``dataloaders``: one loader, or nested lists and dicts of loaders."""
    return [loader for loader in CombinedLoader(dataloaders).flattened if isinstance(loader, DataLoader)]


def _reset_loaders(dataloaders: Any) -> None:
    for loader in _rescale_loaders(dataloaders):
        loader.reset()


def _complete_interrupted_batch(fit_loop_state: dict[str, Any]) -> None:
    """Count a micro batch as trained, and warn, if an exception or a signal saved the checkpoint while it was trained.

    The loader's state counts it as delivered. Lightning would train one in its place, and all later steps would begin within a
    global batch.
    """
    progress = fit_loop_state["epoch_loop.batch_progress"]
    if progress["current"]["processed"] < progress["current"]["ready"]:
        _logger.warning(
            "The checkpoint was saved while micro batch %d of an epoch was trained (an exception or a signal). The model does "
            "not have its rows, and the run goes on behind them, or where steps are balanced at the beginning of its step. "
            "To train them resume from an earlier checkpoint.", progress["current"]["ready"],
        )  # fmt: skip
        for lightning_counts in (progress["current"], progress["total"]):  # as Lightning saves at the end of a batch
            ready = lightning_counts["ready"]
            lightning_counts |= {"started": ready, "processed": ready, "completed": ready - 1}


def _undo_partial_step(fit_loop_state: dict[str, Any], state: SavedState) -> None:
    """Reset Lightning's counts to the beginning of a step that was saved unfinished, if the loader begins it again.

    The model is that of the step's beginning, too: what Lightning has accumulated since is in no checkpoint.
    """
    global_batch_size, dp_world_size, micro_batch_size = state.sizes
    progress = fit_loop_state["epoch_loop.batch_progress"]
    num_in_step = progress["current"]["ready"] % (global_batch_size // (dp_world_size * micro_batch_size))
    if num_in_step and not state.clock.samples_in_begun_step(global_batch_size):
        fit_loop_state["epoch_loop.state_dict"]["_batches_that_stepped"] -= 1  # Lightning adds it again
        for lightning_counts in (progress["current"], progress["total"]):
            for name in _COUNTER_NAMES:
                lightning_counts[name] -= num_in_step


def _convert_batch_counts(batch_counts: Any, state: SavedState, new_accum: int) -> None:
    """Convert Lightning's counts of micro batches in the epoch to the present number of micro batches a step.

    "completed", which is one less in some saves, stays one less.
    """
    global_batch_size, dp_world_size, micro_batch_size = state.sizes
    old_accum = global_batch_size // (dp_world_size * micro_batch_size)
    steps, num_in_step = divmod(batch_counts.ready, old_accum)
    if num_in_step and old_accum != new_accum:
        raise ValueError(
            f"The checkpoint was saved after {num_in_step} of {old_accum} micro batches of a step, and the loader now makes "
            f"{new_accum}. Lightning counts micro batches: resume it once with {old_accum}, or from a checkpoint at the end of "
            f"a step."
        )
    count_change = steps * new_accum + num_in_step - batch_counts.ready
    for name in _COUNTER_NAMES:
        setattr(batch_counts, name, getattr(batch_counts, name) + count_change)
