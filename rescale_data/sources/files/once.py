"""Files that one of many processes makes while the others wait, in any shared folder."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from fsspec.implementations.local import LocalFileSystem

from rescale_data.lease import Lease, Watch

T = TypeVar("T")
_POLL_SECONDS = 0.05


def open_once(path: str, kind: Callable[[str], T], make: Callable[[str], None], *, wait: bool = True) -> T | None:
    """Return a file, opened. If it is not there or not whole, one process makes it while the others wait.

    The process that holds the lease ``<path>.claim`` writes the file under another name and renames it. The lease of a dead
    process is deleted, so that another process can take it.

    Args:
        path: Path of the file.
        kind: Opens it; a `ValueError` where the file is not whole.
        make: Writes the file to the path that it is given.
        wait: Whether to wait for a process that is making the file. If not, return `None` in that case.
    """
    files, claim = LocalFileSystem(), f"{path}.claim"
    watch = Watch(files)
    while True:
        with suppress(FileNotFoundError, ValueError):
            return kind(path)
        try:
            lease = Lease(files, claim, exclusive=True)
        except FileExistsError:
            if watch.look(claim)[0] == "gone":
                with suppress(FileNotFoundError):
                    os.unlink(claim)
            elif wait:
                time.sleep(_POLL_SECONDS)
            else:
                return None
            continue
        with lease:
            with suppress(FileNotFoundError, ValueError):
                return kind(path)
            write_aside(path, make)


def write_aside(path: str, make: Callable[[str], object]) -> None:
    """Write a file under another name and rename it, so that no process sees half of it."""
    aside = f"{path}.{uuid.uuid4().hex[:12]}.tmp"
    try:
        make(aside)
        os.replace(aside, path)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(aside)
