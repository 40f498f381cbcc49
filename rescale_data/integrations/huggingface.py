"""Hugging Face `Trainer` (transformers 5): a mixin that trains from a `rescale_data.DataLoader` and keeps its state.

The state lies in each checkpoint as ``rescale_data.pt``, beside the trainer's own files. With `accelerate` alone nothing of
this is needed: ``accelerator.register_for_checkpointing(loader)``.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint

from rescale_data.loader import DataLoader

FILE = "rescale_data.pt"


class DataStateMixin(Trainer):
    """`Trainer` with the data order in its checkpoints: ``class MyTrainer(DataStateMixin, Trainer)``, or use it as it is.

    Args:
        train_loader: What is trained from, in place of ``train_dataset``. Its micro batch is the loader's
            (``per_device_train_batch_size`` only counts in the trainer's logs).

    Raises:
        ValueError: Another accumulation than the loader's, or batches that accelerate would split or send around.
        FileNotFoundError: A checkpoint without the state of the data.

    Example:
        >>> class MyTrainer(DataStateMixin, Trainer): ...
    """

    def __init__(self, *args: Any, train_loader: DataLoader, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._train_loader = train_loader
        _require_fit(self.args, train_loader)
        self.args.ignore_data_skip = True  # the loader stands where it stood: nothing is to be read again
        self.add_callback(_SaveDataState(train_loader))

    def get_train_dataloader(self) -> Any:
        return self._train_loader

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        if resume_from_checkpoint is True:
            resume_from_checkpoint = get_last_checkpoint(str(self.args.output_dir))
        if resume_from_checkpoint:
            self._train_loader.load_state_dict(_read(Path(resume_from_checkpoint)))
        return super().train(resume_from_checkpoint or None, *args, **kwargs)


class _SaveDataState(TrainerCallback):
    def __init__(self, loader: DataLoader) -> None:
        self._loader = loader

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        data_state = self._loader.state_dict()  # collective: this hook runs on all ranks
        if args.should_save:
            folder = Path(str(args.output_dir)) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
            torch.save(data_state, folder / f"{FILE}.tmp")
            os.replace(folder / f"{FILE}.tmp", folder / FILE)


def _require_fit(args: TrainingArguments, loader: DataLoader) -> None:
    if args.gradient_accumulation_steps != loader.gradient_accumulation_steps:
        raise ValueError(
            f"TrainingArguments(gradient_accumulation_steps={args.gradient_accumulation_steps}), but the loader makes a global "
            f"batch of {loader.gradient_accumulation_steps} micro batches a rank. Give that, or another micro_batch_size."
        )
    for name in ("split_batches", "dispatch_batches"):
        if getattr(args.accelerator_config, name, None):
            raise ValueError(
                f"accelerator_config has {name}=True: accelerate would deal the batches of one rank to all. Each rank has "
                f"its own from rd.DataLoader; leave {name} out."
            )


def _read(checkpoint: Path) -> dict[str, Any]:
    file = checkpoint / FILE
    if not file.exists():
        raise FileNotFoundError(
            f"{checkpoint} holds no {FILE}: it was saved without DataStateMixin, or the job was killed at it. Resume "
            f"from the checkpoint before it."
        )
    return torch.load(file, weights_only=True)
