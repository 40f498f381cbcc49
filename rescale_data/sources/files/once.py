"""Creates files in a shared folder: one of many processes writes a file while the others wait for it."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from fsspec.implementations.local import LocalFileSystem

from rescale_data.lease import Lease, LeaseObserver

T = TypeVar("T")
_POLL_SECONDS = 0.05


def open_or_create(path: str, read: Callable[[str], T], write: Callable[[str], None], *, wait: bool = True) -> T | None:
    """Open a file and return it. If it is missing or incomplete, one process writes it while the others wait.

    The process that holds the lease ``<path>.claim`` writes the file under another name and renames it. The lease of a dead
    process is deleted, so that another process can take it.

    Args:
        path: Path of the file.
        read: Opens the file; raises `ValueError` if the file is incomplete.
        write: Writes the file to the path that it is given.
        wait: Whether to wait for a process that is making the file. If not, return `None` in that case.
    """
    filesystem, lease_path = LocalFileSystem(), f"{path}.claim"
    observer = LeaseObserver(filesystem)
    while True:
        with suppress(FileNotFoundError, ValueError):
            return read(path)
        try:
            lease = Lease(filesystem, lease_path, exclusive=True)
        except FileExistsError:
            if observer.observe_holder(lease_path)[0] == "gone":
                with suppress(FileNotFoundError):
                    os.unlink(lease_path)
            elif wait:
                time.sleep(_POLL_SECONDS)
            else:
                return None
            continue
        with lease:
            with suppress(FileNotFoundError, ValueError):
                return read(path)
            write_atomically(path, write)


def write_atomically(path: str, write_file: Callable[[str], object]) -> None:
    """Write a file under another name, then rename it, so that no process sees half of it."""
    temporary_path = f"{path}.{uuid.uuid4().hex[:12]}.tmp"
    try:
        write_file(temporary_path)
        os.replace(temporary_path, path)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(temporary_path)
