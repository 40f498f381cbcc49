"""Counters of reading in this process. A worker counts in memory that the trainer's process sees, too."""

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
"""Indices of the counters:

- READ_BYTES: bytes of fragments, as they are in memory;
- REQUESTS, REQUEST_BYTES, RETRIES: requests for files behind URLs, all attempts; the bytes that they fetched; and the number of
  requests that were made again after an error or a stall;
- READ_SECONDS: seconds in which a batch waited for files and their decoding;
- MAKE_SECONDS: seconds in which batches were made, READ_SECONDS included;
- MADE: batches that a worker has made in its segment."""
BACKGROUND = "rescale_data_"
"""Prefix of the names of threads that read ahead: no batch waits for them."""


class Counts:
    """Counters, one for each of `FIELDS`, and the file that is being read: empty if none is."""

    def __init__(self) -> None:
        self.values: npt.NDArray[np.float64] = np.zeros(len(FIELDS))
        self.file = ""
        self._lock = threading.Lock()

    def add(self, field: int, value: float) -> None:
        with self._lock:
            self.values[field] += value

    def keep_in(self, values: npt.NDArray[np.float64]) -> None:
        """Copy the counters into other memory and go on counting there."""
        with self._lock:
            values[:] = self.values
            self.values = values

    @contextmanager
    def reading(self, file: str) -> Generator[None]:
        """Keep the name of the file that a batch waits for in this context, and count the seconds as READ_SECONDS.

        Threads that read ahead do neither, nor does a context inside of another one.
        """
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
    """Return the counters by name, for a logger.

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
    """Give a forked child counters of its own: another thread of the parent may have held the lock."""
    global _counts
    _counts = Counts()


os.register_at_fork(after_in_child=_renew)
