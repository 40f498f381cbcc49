"""Files that one of many processes makes while the others wait, in any shared folder."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable
from contextlib import suppress

from fsspec.implementations.local import LocalFileSystem

from rescale_data.lease import Lease, Watch

_POLL_SECONDS = 0.05


def make_once(path: str, is_good: Callable[[], bool], make: Callable[[str], None], *, wait: bool = True) -> None:
    """Let one process make a file, and wait until it is there.

    The process that holds the lease ``<path>.claim`` writes the file under another name and renames it. The lease of a dead
    process is deleted, so that another process can take it.

    Args:
        path: Path of the file.
        is_good: Returns True if the file is there and is the right one.
        make: Writes the file to the path that it is given.
        wait: Whether to wait for a process that is making the file. If not, return at once in that case.
    """
    files, claim = LocalFileSystem(), f"{path}.claim"
    watch = Watch(files)
    while not is_good():
        try:
            lease = Lease(files, claim, exclusive=True)
        except FileExistsError:
            if watch.look(claim)[0] == "gone":
                with suppress(FileNotFoundError):
                    os.unlink(claim)
            elif wait:
                time.sleep(_POLL_SECONDS)
            else:
                return
            continue
        with lease:
            if not is_good():
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
