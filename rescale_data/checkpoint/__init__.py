"""Save, load and retain checkpoints: one DCP checkpoint holds the model, the optimizer and the data order."""

from rescale_data.checkpoint.convert.safetensors import from_safetensors, to_safetensors
from rescale_data.checkpoint.convert.torch_save import from_torch_save, to_torch_save
from rescale_data.checkpoint.data_state import check_checkpoint, load_changed, read_data_state
from rescale_data.checkpoint.loading import LoadReport, load
from rescale_data.checkpoint.manager import CheckpointManager, Saving
from rescale_data.checkpoint.rank_values import PerRank
from rescale_data.checkpoint.run_reader import RunReader
from rescale_data.checkpoint.saving import save
from rescale_data.checkpoint.storage.open import verify

__all__ = [
    "CheckpointManager",
    "LoadReport",
    "PerRank",
    "RunReader",
    "Saving",
    "check_checkpoint",
    "from_safetensors",
    "from_torch_save",
    "load",
    "load_changed",
    "read_data_state",
    "save",
    "to_safetensors",
    "to_torch_save",
    "verify",
]
