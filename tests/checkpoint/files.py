"""Where the files of a checkpoint are, for tests that damage them."""

from __future__ import annotations

from pathlib import Path

from rescale_data.checkpoint.storage.claims import find
from rescale_data.checkpoint.storage.store import DiskStore


def data(path: Path) -> Path:
    """The folder of DCP's files of the checkpoint at `path`."""
    save = find(DiskStore(), str(path))
    assert save is not None
    return path / save.folder


def manifest(path: Path) -> Path:
    """The manifest of the checkpoint at `path`."""
    save = find(DiskStore(), str(path))
    assert save is not None
    return path / save.manifest
