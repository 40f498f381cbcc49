"""Leases: who is reading a checkpoint, so that retention leaves it alone.

A lease is a small file beside the checkpoints, so that it works between processes and on object stores. The reader writes its
lease and then looks whether the checkpoint is still committed; who deletes takes the commit away and then looks for leases.
One of the two always sees the other.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import socket
import time
import uuid
from collections.abc import Generator
from typing import Any

from rescale_data.checkpoint.storage.store import Store, join, split

logger = logging.getLogger(__name__)

STEP = re.compile(r"step-(\d+)")
LEASES = ".leases"
# The lease of a reader that was killed on another host counts this long, in seconds.
LIFETIME = 6 * 3600.0


@contextlib.contextmanager
def reading(store: Store, path: str) -> Generator[None]:
    """Hold a lease on the checkpoint at ``path``, if retention may delete it and the folder can be written."""
    folder, name = split(path)
    if not STEP.fullmatch(name) or not store.is_folder(path):
        yield
        return
    lease = join(folder, LEASES, f"{name}-{uuid.uuid4().hex}.json")
    written = _write(store, lease)
    try:
        yield
    finally:
        if written:
            with contextlib.suppress(Exception):
                store.rm_file(lease)


def is_read(store: Store, path: str) -> bool:
    """Whether anyone holds a lease on the checkpoint at ``path``. Leases of readers that are gone are removed."""
    folder, name = split(path)
    names = [entry for entry in store.names(join(folder, LEASES)) if entry.rpartition("-")[0] == name]
    alive = [_is_alive(store, join(folder, LEASES, entry)) for entry in names]
    return any(alive)


def _write(store: Store, lease: str) -> bool:
    try:
        store.mkdir(split(lease)[0])
        store.write(lease, json.dumps({"host": socket.gethostname(), "pid": os.getpid()}).encode())
    except Exception as error:
        logger.debug("No lease on %s: %s. A run that deletes checkpoints there cannot see this reader.", lease, error)
        return False
    return True


def _is_alive(store: Store, lease: str) -> bool:
    """Whether its reader lives, as far as can be known: it is of this host, or the lease is young. It may hold anything."""
    content: Any = None
    try:
        young = store.modified(lease) > time.time() - LIFETIME
        with contextlib.suppress(ValueError):  # it is being written, or its writer was killed
            content = json.loads(store.read(lease))
    except FileNotFoundError:
        return False
    here = isinstance(content, dict) and content.get("host") == socket.gethostname()
    pid = content.get("pid") if here else None
    if young and (type(pid) is not int or _runs(pid)):
        return True
    store.rm_file(lease)
    return False


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
