"""Counters of what this process has read; a worker counts in memory that the trainer's process sees too."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

FIELDS = READ_BYTES, REQUESTS, REQUEST_BYTES, RETRIES, READ_SECONDS, MAKE_SECONDS, MADE = range(7)
"""Bytes of fragments as they are in memory; requests for files behind URLs, all attempts, the bytes that they brought, and how
many were made again after an error or a stall; seconds in which a batch waited for files and their decoding, and was
made, these included; batches that a worker has made in its leg."""
BACKGROUND = "rescale_data_"
"""How names of threads begin that read ahead: no batch waits for them."""


class Counts:
    """Numbers by `FIELDS`, and the file that is being read: empty where none is."""

    def __init__(self) -> None:
        self.values: npt.NDArray[np.float64] = np.zeros(len(FIELDS))
        self.file = ""
        self._lock = threading.Lock()

    def add(self, field: int, value: float) -> None:
        with self._lock:
            self.values[field] += value

    def keep_in(self, values: npt.NDArray[np.float64]) -> None:
        """Go on counting in other memory."""
        with self._lock:
            values[:] = self.values
            self.values = values

    @contextmanager
    def reading(self, file: str) -> Generator[None]:
        """While a batch waits for a file."""
        if self.file or threading.current_thread().name.startswith(BACKGROUND):
            yield
            return
        self.file, started = file, time.perf_counter()
        try:
            yield
        finally:
            self.file = ""
            self.add(READ_SECONDS, time.perf_counter() - started)


_counts = Counts()


def counts() -> Counts:
    """Return the counters of this process."""
    return _counts


def told(values: Any) -> dict[str, float]:
    """For a logger.

    Args:
        values: ``float64[FIELDS]``.
    """
    reads = float(values[READ_SECONDS])
    return {
        "read_bytes": float(values[READ_BYTES]),
        "read_seconds": reads,
        "transform_seconds": max(0.0, float(values[MAKE_SECONDS]) - reads),
        "requests": float(values[REQUESTS]),
        "request_bytes": float(values[REQUEST_BYTES]),
        "retries": float(values[RETRIES]),
    }


def _renew() -> None:
    """A forked child counts for itself; the lock may have been held."""
    global _counts
    _counts = Counts()


os.register_at_fork(after_in_child=_renew)
