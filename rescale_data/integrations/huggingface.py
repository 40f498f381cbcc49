"""Hugging Face `Trainer` (transformers 5): a mixin that trains from a `rescale_data.DataLoader` and saves its state.

The state lies in each checkpoint as ``rescale_data.pt``, beside the trainer's own files. With `accelerate` alone nothing of
this is needed: ``accelerator.register_for_checkpointing(loader)``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint, has_length

from rescale_data.engine.base_loader import call_with_stream
from rescale_data.engine.states.codec import at_next_epoch
from rescale_data.engine.stream import Stream
from rescale_data.integrations.dp_ranks import require_ranks
from rescale_data.loader import DataLoader

STATE_FILE = "rescale_data.pt"


class DataStateMixin(Trainer):
    """`Trainer` that saves the data order in checkpoints; use it directly or in ``class MyTrainer(DataStateMixin, Trainer)``.

    Args:
        train_loader: What is trained from, in place of ``train_dataset``; built after ``TrainingArguments``, which start the
            process group. Leave ``gradient_accumulation_steps`` out, which is set to the loader's. With DeepSpeed, and where
            you give it, it is compared.

    Raises:
        ValueError: An argument that says of batches, order or workers what the loader does not, or that takes a dataset;
            another number of data-parallel ranks than the loader's; or a packer with ``labels=True``, whose labels are shifted,
            without ``collate_fn=causal_lm_batch``. docs/trainers.md lists all arguments.
        FileNotFoundError: A checkpoint without the state of the data.

    Example:
        >>> class MyTrainer(DataStateMixin, Trainer): ...
    """

    def __init__(self, *args: Any, train_loader: DataLoader, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not isinstance(cast(object, train_loader), DataLoader):
            raise TypeError(f"train_loader= is a {type(train_loader).__name__}: give rd.DataLoader(dataset, ...).")
        if self.train_dataset is not None:
            raise ValueError("The trainer has a train_dataset= and a train_loader=: give rd.DataLoader the dataset.")
        self._train_loader = train_loader
        if self.args.gradient_accumulation_steps == 1 and not self.is_deepspeed_enabled:
            self.args.gradient_accumulation_steps = train_loader.gradient_accumulation_steps
        num_ranks = self.args.world_size // (self.get_tp_size() * self.get_cp_size() * self.get_sp_size())
        _check_arguments(self.args, train_loader, num_ranks)
        _refuse_shifted_labels(train_loader)
        self.args.ignore_data_skip = True  # the loader stands where it stood: nothing is to be read again
        self.add_callback(_SaveDataState(train_loader))

    def get_train_dataloader(self) -> Any:
        return self._train_loader if has_length(self._train_loader) else _LoaderWithoutLength(self._train_loader)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        checkpoint = resume_from_checkpoint
        if checkpoint is True:
            checkpoint = get_last_checkpoint(str(self.args.output_dir))
        if checkpoint:
            self._train_loader.load_state_dict(at_next_epoch(_load_data_state(Path(checkpoint))))
        # transformers refuses True without a checkpoint
        return super().train(resume_from_checkpoint or None, *args, **kwargs)


class _LoaderWithoutLength:
    """Batches of a loader without ``len``. After a resume the trainer counts epochs from 0, so this has no ``set_epoch``."""

    def __init__(self, loader: DataLoader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)


class _SaveDataState(TrainerCallback):
    def __init__(self, loader: DataLoader) -> None:
        self._loader = loader

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Correct the logged epoch, which the trainer counts anew after a resume; without ``len`` it has ``max_steps``."""
        loader = self._loader
        micro_batches = state.global_step * loader.gradient_accumulation_steps
        state.epoch = micro_batches / len(loader) if has_length(loader) else state.global_step / state.max_steps

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        data_state = self._loader.state_dict()  # collective: this hook runs on all ranks
        if args.should_save:
            checkpoint_folder = Path(str(args.output_dir)) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
            torch.save(data_state, checkpoint_folder / f"{STATE_FILE}.tmp")
            os.replace(checkpoint_folder / f"{STATE_FILE}.tmp", checkpoint_folder / STATE_FILE)


def _check_arguments(args: TrainingArguments, loader: DataLoader, num_ranks: int) -> None:
    require_ranks(loader, num_ranks, "after TrainingArguments()")
    if args.gradient_accumulation_steps != loader.gradient_accumulation_steps:
        raise ValueError(
            f"TrainingArguments(gradient_accumulation_steps={args.gradient_accumulation_steps}), but the loader makes a global "
            f"batch of {loader.gradient_accumulation_steps} micro batches a rank. Give that, or another micro_batch_size."
        )
    micro_batch_size = call_with_stream(loader, lambda stream: stream.layout.micro_batch_size)
    allowed_values: dict[str, tuple[tuple[Any, ...], str]] = {  # values, and the argument of the loader that says it
        "per_device_train_batch_size": ((micro_batch_size,), "micro_batch_size"),
        "dataloader_num_workers": ((0, loader.options.num_workers), "num_workers"),
        "data_seed": ((None, loader.options.seed), "seed"),
        "train_sampling_strategy": (("random",), "shuffle"),
        "auto_find_batch_size": ((False,), "micro_batch_size"),
    }
    for name, (values, loader_argument) in allowed_values.items():
        value = getattr(args, name)
        if value not in values:
            raise ValueError(
                f"TrainingArguments({name}={value!r}), but the loader makes the batches, and as it was built the argument may "
                f"be {' or '.join(map(repr, dict.fromkeys(values)))}. For other batches give rd.DataLoader({loader_argument}=)."
            )
    for name in ("split_batches", "dispatch_batches"):
        if getattr(args.accelerator_config, name, None):
            raise ValueError(
                f"accelerator_config has {name}=True: accelerate would deal the batches of one rank to all. Each rank has "
                f"its own from rd.DataLoader; leave {name} out."
            )


def _has_shifted_labels(stream: Stream) -> bool:
    return any(getattr(node, "labels", False) for _, node in stream.schema.root.walk())


def _refuse_shifted_labels(loader: DataLoader) -> None:
    if call_with_stream(loader, _has_shifted_labels) and loader.options.collate_fn is None:
        raise ValueError(
            "The packer has labels=True, so labels[t] is the token after tokens[t]. Models of transformers shift labels "
            "themselves, and would learn the token after the next. Give rd.DataLoader(collate_fn=causal_lm_batch), from "
            "rescale_data.integrations.causal_lm."
        )


def _load_data_state(checkpoint: Path) -> dict[str, Any]:
    state_file = checkpoint / STATE_FILE
    if not state_file.exists():
        pattern = f"{PREFIX_CHECKPOINT_DIR}-*/{STATE_FILE}"
        checkpoints = [str(path.parent) for folder in (checkpoint.parent, checkpoint) for path in folder.glob(pattern)]
        raise FileNotFoundError(
            f"{checkpoint} holds no {STATE_FILE}: there is no such folder, it was saved without DataStateMixin, or the job was "
            f"killed at it. Resume from another checkpoint; there are {sorted(checkpoints)}."
        )
    return torch.load(state_file, weights_only=True)
