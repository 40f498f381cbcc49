from typing import Any

class LightningModule:
    automatic_optimization: bool

class Trainer:
    accumulate_grad_batches: int
    num_training_batches: int | float
    reload_dataloaders_every_n_epochs: int
    fast_dev_run: int | bool
    training: bool
    strategy: object
    fit_loop: Any
    distributed_sampler_kwargs: dict[str, Any] | None
    @property
    def train_dataloader(self) -> Any: ...
    @property
    def val_dataloaders(self) -> Any: ...
    @property
    def test_dataloaders(self) -> Any: ...

class Callback:
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None: ...
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None: ...
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None: ...
    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None: ...
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None: ...
