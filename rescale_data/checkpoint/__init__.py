"""One checkpoint, kept safe: saving, loading and keeping the one DCP checkpoint of model, optimizer and data order.

Names are imported when they are used: DCP takes its time.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rescale_data.checkpoint.api import LoadReport, load, save
    from rescale_data.checkpoint.convert.safetensors import from_safetensors, to_safetensors
    from rescale_data.checkpoint.convert.torch_save import from_torch_save, to_torch_save
    from rescale_data.checkpoint.data_state import check_checkpoint, load_changed, read_data_state
    from rescale_data.checkpoint.manager import CheckpointManager, RunReader, Saving
    from rescale_data.checkpoint.optimizer.full import (
        full_optimizer_state,
        load_full_optimizer_state,
        load_optimizer_stream,
        stream_optimizer_state,
    )
    from rescale_data.checkpoint.rank_values import PerRank
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
    "full_optimizer_state",
    "load",
    "load_changed",
    "load_full_optimizer_state",
    "load_optimizer_stream",
    "read_data_state",
    "save",
    "stream_optimizer_state",
    "to_safetensors",
    "to_torch_save",
    "verify",
]

_HOMES = {
    "api": ("LoadReport", "load", "save"),
    "convert.safetensors": ("from_safetensors", "to_safetensors"),
    "convert.torch_save": ("from_torch_save", "to_torch_save"),
    "data_state": ("check_checkpoint", "load_changed", "read_data_state"),
    "manager": ("CheckpointManager", "RunReader", "Saving"),
    "optimizer.full": (
        "full_optimizer_state",
        "load_full_optimizer_state",
        "load_optimizer_stream",
        "stream_optimizer_state",
    ),
    "rank_values": ("PerRank",),
    "storage.open": ("verify",),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
