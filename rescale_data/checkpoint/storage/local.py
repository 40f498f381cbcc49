"""Checkpoints in a local folder, or one that is mounted like it."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from typing import BinaryIO

from fsspec.implementations.local import LocalFileSystem

from rescale_data.checkpoint.storage.store import Store


class LocalStore(Store):
    """The file system of this machine. ``rename`` of a folder is atomic; files and names are synced."""

    renames = True

    def __init__(self) -> None:
        super().__init__(LocalFileSystem())

    def open_read(self, path: str) -> BinaryIO:
        mode = os.stat(path).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # a device has no end, and a pipe no beginning
            raise OSError(errno.EINVAL, "It is neither a file nor a folder", path)
        return open(path, "rb")

    def open_write(self, path: str) -> BinaryIO:
        return open(path, "wb")

    def discard(self, stream: BinaryIO, path: str) -> None:
        with contextlib.suppress(OSError):
            stream.close()
        with contextlib.suppress(OSError):
            os.unlink(path)

    def is_folder(self, path: str) -> bool:
        return os.path.isdir(path)

    def sizes(self, path: str) -> dict[str, int]:
        if not os.path.isdir(path):
            return {}
        with os.scandir(path) as entries:
            return {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}

    def names(self, path: str) -> list[str]:
        return sorted(os.listdir(path)) if os.path.isdir(path) else []

    def make_folder(self, path: str) -> None:
        os.makedirs(path, exist_ok=True)

    def is_link(self, path: str) -> bool:
        return os.path.islink(path)

    def rename(self, path: str, new_path: str) -> None:  # type: ignore[override]
        os.replace(path, new_path)

    def remove_folder(self, path: str) -> None:
        if self.is_link(path):
            self.remove(path)
        else:
            shutil.rmtree(path, ignore_errors=True)

    def sync_file(self, stream: BinaryIO) -> None:
        os.fsync(stream.fileno())

    def sync_folder(self, path: str) -> None:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
