"""What the examples of transformers' trainers share: a small model, a stop at a step, and a record of the rows."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback

from parts.rows import VOCABULARY, Record


class StopAt(TrainerCallback):
    """Stands for a job that is stopped."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step == self._step


def small_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
        )
    )


def record_rows(trainer: Trainer, record: Record) -> None:
    """Record the rows of each micro batch that the trainer trains."""
    training_step = trainer.training_step

    def recorded(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        record(trainer.state.global_step, inputs.pop("row"))
        return training_step(model, inputs, *args, **kwargs)

    trainer.training_step = recorded
