from typing import Any

class TrainingArguments:
    output_dir: str | None
    gradient_accumulation_steps: int
    accelerator_config: Any
    ignore_data_skip: bool
    should_save: bool

class TrainerState:
    global_step: int

class TrainerControl: ...

class TrainerCallback:
    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None: ...

class Trainer:
    args: TrainingArguments
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def add_callback(self, callback: TrainerCallback) -> None: ...
    def get_train_dataloader(self) -> Any: ...
    def train(self, resume_from_checkpoint: str | bool | None = ..., *args: Any, **kwargs: Any) -> Any: ...
