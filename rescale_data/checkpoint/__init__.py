"""One checkpoint, kept safe: saving, loading and keeping the one DCP checkpoint of model, optimizer and data order."""

from rescale_data.checkpoint.convert import from_torch_save, to_torch_save
from rescale_data.checkpoint.data_state import read_data_state
from rescale_data.checkpoint.full_optimizer import (
    full_optimizer_state,
    load_full_optimizer_state,
    load_optimizer_stream,
    stream_optimizer_state,
)
from rescale_data.checkpoint.load import LoadReport, load
from rescale_data.checkpoint.manager import CheckpointManager
from rescale_data.checkpoint.safetensors import from_safetensors, to_safetensors
from rescale_data.checkpoint.save import save
from rescale_data.checkpoint.verify import verify

__all__ = [
    "CheckpointManager",
    "LoadReport",
    "from_safetensors",
    "from_torch_save",
    "full_optimizer_state",
    "load",
    "load_full_optimizer_state",
    "load_optimizer_stream",
    "read_data_state",
    "save",
    "stream_optimizer_state",
    "to_safetensors",
    "to_torch_save",
    "verify",
]
