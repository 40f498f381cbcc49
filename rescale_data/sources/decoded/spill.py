"""`Spill`: what left the cache, as files in a folder with a bound, mapped back when it is asked for."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import threading
import uuid
import weakref
from collections import OrderedDict
from collections.abc import Hashable
from contextlib import suppress
from typing import Any

import pyarrow as pa

from rescale_data.sources.arrow_types import ArrowBuffer

_logger = logging.getLogger("rescale_data")
_PREFIX, _LOCK = "rescale_data-spill-", "in_use"


class Spill:
    """Files of one process, the oldest deleted first. They go with the process, or with the next one if it is killed.

    Args:
        folder: Made where it is missing; this process uses a folder of its own in it.
        max_bytes: Of all files.
    """

    def __init__(self, folder: str, max_bytes: int) -> None:
        self.max_bytes, self.nbytes = max_bytes, 0
        self._files: OrderedDict[Hashable, tuple[str, int]] = OrderedDict()
        self._mutex, self._works = threading.RLock(), True
        os.makedirs(folder, exist_ok=True)
        _sweep(folder)
        self._folder, lock = _locked_folder(folder)
        weakref.finalize(self, _remove, self._folder, lock, os.getpid())

    def put(self, key: Hashable, data: ArrowBuffer) -> None:
        """Write what is not there yet; what exceeds the bound by itself is left out."""
        with self._mutex:
            if key in self._files or data.size > self.max_bytes or not self._works:
                return
            while self.nbytes + data.size > self.max_bytes:
                self._delete(next(iter(self._files)))
            path = os.path.join(self._folder, uuid.uuid4().hex)
            try:
                with open(path, "wb") as file:
                    file.write(memoryview(data))
            except OSError as error:
                self._go_without(path, error)
                return
            self._files[key] = path, data.size
            self.nbytes += data.size

    def _go_without(self, path: str, error: OSError) -> None:
        """Keep what is there and add nothing more: all works without, with more reading."""
        self._works = False
        with suppress(OSError):
            os.unlink(path)
        _logger.warning(
            "Nothing more is spilled to %s: %s. What leaves the cache is read and decoded again when it is needed. Free space "
            "there, or give another spill_dir or a larger cache_bytes.", self._folder, error,
        )  # fmt: skip

    def get(self, key: Hashable) -> ArrowBuffer | None:
        """The bytes at ``key``, mapped; `None` where there are none."""
        with self._mutex:
            found = self._files.get(key)
            if found is None:
                return None
            with pa.memory_map(found[0]) as file:  # the mapping outlives the file, even its deletion
                return file.read_buffer()

    def _delete(self, key: Hashable) -> None:
        path, size = self._files.pop(key)
        self.nbytes -= size
        with suppress(FileNotFoundError):
            os.unlink(path)


_spills: dict[str, Spill] = {}


def spill_in(folder: str, max_bytes: int) -> Spill:
    """Return the spill folder of this process in a folder; its bound is the largest one requested."""
    spill = _spills.get(folder)
    if spill is None:
        spill = _spills[folder] = Spill(folder, max_bytes)
    spill.max_bytes = max(spill.max_bytes, max_bytes)
    return spill


def _locked_folder(above: str) -> tuple[str, int]:
    """Make a folder of this process, and hold its lock; one that another process swept away before that is made again."""
    while True:
        folder = os.path.join(above, f"{_PREFIX}{uuid.uuid4().hex[:12]}")
        os.mkdir(folder)
        lock = os.open(path := os.path.join(folder, _LOCK), os.O_CREAT | os.O_RDWR)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if os.path.exists(path):
            return folder, lock
        os.close(lock)


def _sweep(folder: str) -> None:
    """Remove what processes left that were killed: nobody holds their lock."""
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        if not name.startswith(_PREFIX):
            continue
        with suppress(OSError):
            lock = os.open(os.path.join(path, _LOCK), os.O_RDWR)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                fcntl.flock(lock, fcntl.LOCK_UN)  # a child that was forked meanwhile has the lock as well
                os.close(lock)


def _remove(folder: str, lock: int, process: int) -> None:
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):
        os.close(lock)


def _renew(*_: Any) -> None:
    """A forked child leaves its parent's files alone."""
    _spills.clear()


os.register_at_fork(after_in_child=_renew)
