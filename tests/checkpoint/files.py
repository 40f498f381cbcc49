"""Where the files of a checkpoint are, for tests that damage them."""

from pathlib import Path

from rescale_data.checkpoint.storage.claims import SaveId, find
from rescale_data.checkpoint.storage.store import DiskStore


def save_at(path: Path) -> SaveId:
    save = find(DiskStore(), str(path))
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
