"""A loader, and a state with one, that have come to a step; the files of a save."""

from pathlib import Path
from typing import Any

import torch

import rescale_data as rd
from rescale_data.checkpoint.storage.claims import SaveId, find_save
from rescale_data.checkpoint.storage.store import DiskStore


def loader_at(step: int = 0, num_logical_shards: int = 12, num_rows: int = 10_000) -> rd.DataLoader:
    """Return a loader that has come to a step: by itself, also where there are other ranks."""
    sizes = {"global_batch_size": 4, "num_logical_shards": num_logical_shards, "dp_world_size": 1}
    loader = rd.DataLoader(range(num_rows), **sizes, repeat=True, prefetch=0)
    loader.skip(4 * step)
    return loader


def state_at(step: int = 0, size: int = 300) -> dict[str, Any]:
    """Return a state in which every value says which step it is of."""
    return {"weights": torch.full((size,), float(step)), "step": step, "loader": loader_at(step)}


def save_at(path: Path) -> SaveId:
    save = find_save(DiskStore(), str(path))
    assert save is not None
    return save


def data(path: Path) -> Path:
    return path / save_at(path).folder


def manifest(path: Path) -> Path:
    return path / save_at(path).manifest


def flip(file: Path, at: int) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)
