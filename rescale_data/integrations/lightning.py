"""Lightning (2.6): one callback, and the data order is in Lightning's checkpoints.

Lightning saves ``state_dict()`` of a training loader with its loops, on all ranks, and loads it before the first batch. What
it does not know is that the number of ranks may have changed: it counts micro batches of one rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import lightning.pytorch as pl

from rescale_data.engine.recipe import ENDED, UNDEALT
from rescale_data.loader import DataLoader


class DataState(pl.Callback):
    """Resumes a `rescale_data.DataLoader` with `Trainer.fit(ckpt_path=...)`, on any number of ranks.

    Give the loader to Lightning as it is, and ``accumulate_grad_batches=loader.gradient_accumulation_steps``. Build it where
    Lightning's process group is there: in ``train_dataloader()`` of a module or a data module.

    Validation and test loaders may be ours, too (``shuffle=False, tail="pad"``): each evaluation begins with the first row.

    Raises:
        ValueError: Another accumulation than the loader's; a loader without ``len``, of which Lightning would read a batch
            ahead of what a checkpoint says; ``limit_train_batches`` or ``overfit_batches``, which cut an epoch short.

    Example:
        >>> trainer = pl.Trainer(accelerator="cpu", callbacks=[DataState()], logger=False, enable_checkpointing=False)
    """

    def __init__(self) -> None:
        self._loaded: list[dict[str, Any]] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Look at what Lightning was told, and load what it has not: it leaves loaders new whose epoch it takes for over."""
        pairs = zip(_loaders(trainer.train_dataloader), self._loaded, strict=False)
        behind = [(loader, state) for loader, state in pairs if loader.step != state["step"]]
        for loader, state in behind:
            loader.load_state_dict(state)
        if behind:
            iter(trainer.fit_loop._data_fetcher)  # Lightning has iterators of these already  # pyright: ignore
        self._loaded = []
        for loader in _loaders(trainer.train_dataloader):
            steps = loader.gradient_accumulation_steps
            if trainer.accumulate_grad_batches != steps:
                raise ValueError(
                    f"Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches}), but the loader makes a global batch "
                    f"of {steps} micro batches a rank. Give accumulate_grad_batches={steps} or another micro_batch_size."
                )
            try:
                len(loader)
            except TypeError as error:
                raise ValueError(
                    f"{error} Lightning then reads a batch ahead, and a checkpoint would lose it. Give "
                    f"rd.DataLoader(steps_per_epoch=...)."
                ) from error
            if trainer.num_training_batches != len(loader):
                raise ValueError(
                    f"Lightning ends an epoch after {trainer.num_training_batches} of its {len(loader)} batches "
                    f"(limit_train_batches or overfit_batches). Give rd.DataLoader(steps_per_epoch=...) in their place."
                )

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Each evaluation begins with the first row, also after one that was cut short (Lightning's sanity check)."""
        _begin_again(trainer.val_dataloaders)

    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """As after a validation."""
        _begin_again(trainer.test_dataloaders)

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Count the micro batches of the epoch as this topology does, and begin the next epoch where one was at its end."""
        fit_loop = checkpoint["loops"]["fit_loop"]
        self._loaded = states = [
            state for state in fit_loop["state_dict"].get("combined_loader", []) if _is_ours(state)
        ]
        for state in states:
            _leave_ended_epoch(state)
            _recount(fit_loop, _accumulation(state), trainer.accumulate_grad_batches)


def _loaders(dataloaders: Any) -> Iterator[DataLoader]:
    """Ours among what a user has given: a loader, or lists and dicts of loaders."""
    if isinstance(dataloaders, DataLoader):
        yield dataloaders
    elif isinstance(dataloaders, Mapping):
        for loader in dataloaders.values():
            yield from _loaders(loader)
    elif isinstance(dataloaders, list | tuple):
        for loader in dataloaders:
            yield from _loaders(loader)


def _begin_again(dataloaders: Any) -> None:
    for loader in _loaders(dataloaders):
        loader.reset()


def _is_ours(state: Any) -> bool:
    return isinstance(state, Mapping) and {"shards", "global_batch_size", "dp_world_size", "micro_batch_size"} <= set(
        state
    )


def _accumulation(state: Mapping[str, Any]) -> int:
    return int(state["global_batch_size"]) // (int(state["dp_world_size"]) * int(state["micro_batch_size"]))


def _leave_ended_epoch(state: dict[str, Any]) -> None:
    """Lightning has counted an epoch whose last batch is taken; the loader's empty iterator would be a second one."""
    dealt = state["shards"]["dealt"]
    if bool((dealt == ENDED).all()):
        state["epoch"] += 1
        dealt.fill_(UNDEALT)


def _recount(fit_loop: dict[str, Any], saved: int, now: int) -> None:
    """Counts of micro batches in the present epoch; in a save at a batch's end "completed" lags by one, and stays so."""
    current = fit_loop["epoch_loop.batch_progress"]["current"]
    steps, begun = divmod(current["ready"], saved)
    if begun and saved != now:
        raise ValueError(
            f"The checkpoint was saved after {begun} of {saved} micro batches of a step, and the loader now makes {now}. "
            f"Lightning counts micro batches: resume it once with {saved}, or from a checkpoint at the end of a step."
        )
    more = steps * now + begun - current["ready"]
    for name in ("ready", "started", "processed", "completed"):
        current[name] += more
