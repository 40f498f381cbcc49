"""Load a checkpoint whose mixtures had fewer sources."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import StorageReader

from rescale_data.checkpoint.check import TABLE, find_prefix, open_checkpoint, read_header


def load_changed(path: str | os.PathLike[str] | StorageReader, loader: Stateful, key: str | None = None) -> None:
    """Go on from a DCP checkpoint although sources were added to a `WeightedSampler`, which ``dcp.load`` refuses.

    For all else load the same checkpoint with ``dcp.load``, without the loader in its dict. The added sources begin with
    their first row, removed ones are dropped with a warning, the others go on; the new weights count from now on. Ranks,
    workers and batch sizes may change at the same time. Every rank reads the whole table, a few integers a logical shard.

    Args:
        path: The checkpoint's folder, or a DCP `StorageReader`.
        loader: With the new pipeline; a `DataLoader` or ``rescale_data.xla.DeviceLoader``.
        key: Where the loader's state is in the checkpoint, ``"loader"``; default: found by its fields.

    Raises:
        FileNotFoundError: There is no DCP checkpoint.
        DataStateError: It holds no data state, or one that differs in more than that.
    """
    reader, entries = open_checkpoint(path)
    prefix = find_prefix(entries, key)
    state = read_header(reader, prefix)
    loader.load_state_dict({**state, "shards": _read_table(reader, entries, prefix + TABLE)})


def _read_table(reader: StorageReader, entries: dict[str, Any], prefix: str) -> dict[str, torch.Tensor]:
    table: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
        if name.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
    }
    load(table, storage_reader=reader, no_dist=True)
    return {name.removeprefix(prefix): tensor for name, tensor in table.items()}
