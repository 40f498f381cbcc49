"""Counters of reading (bytes, requests, seconds) in each process; a worker's counters lie in memory shared with the trainer."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

COUNTER_INDICES = READ_BYTES, REQUESTS, REQUEST_BYTES, RETRIES, READ_SECONDS, MAKE_SECONDS, MADE_BATCHES = range(7)
"""Indices of the counters:

- READ_BYTES: bytes of fragments, as they are in memory;
- REQUESTS, REQUEST_BYTES, RETRIES: requests for files behind URLs, all attempts; the bytes that they fetched; and the number of
  requests that were made again after an error or a stall;
- READ_SECONDS: seconds in which a batch waited for files and their decoding;
- MAKE_SECONDS: seconds in which batches were made, READ_SECONDS included;
- MADE_BATCHES: batches that a worker has made in its segment."""
READ_COUNTER_NAMES = ("read_seconds", "transform_seconds", "read_bytes", "requests", "request_bytes", "retries")
"""Names of what a logger gets, in the order of `by_name`."""
BACKGROUND_PREFIX = "rescale_data_"
"""Prefix of the names of threads that read ahead: their reading does not count as time that a batch waited."""


class ReadCounters:
    """The counters, one for each of `COUNTER_INDICES`, and the name of the file that is being read, empty if there is none."""

    def __init__(self) -> None:
        self.values: npt.NDArray[np.float64] = np.zeros(len(COUNTER_INDICES))
        self.file = ""
        self._lock = threading.Lock()

    def add(self, counter_index: int, value: float) -> None:
        with self._lock:
            self.values[counter_index] += value

    def move_values_to(self, target_array: npt.NDArray[np.float64]) -> None:
        """Copy the counters into another array, such as shared memory, and update that array from then on."""
        with self._lock:
            target_array[:] = self.values
            self.values = target_array

    @contextmanager
    def timed_read(self, file: str) -> Generator[None]:
        """Context manager: store the name of the file that a batch waits for, and add the elapsed time to READ_SECONDS.

        Threads that read ahead do neither, nor does a context inside of another one.
        """
        if self.file or threading.current_thread().name.startswith(BACKGROUND_PREFIX):
            yield
            return
        self.file, started = file, time.perf_counter()
        try:
            yield
        finally:
            self.file = ""
            self.add(READ_SECONDS, time.perf_counter() - started)


_counts = ReadCounters()
# Begun anew in a forked child: another thread of the parent may have held the lock
os.register_at_fork(after_in_child=_counts.__init__)


def read_counters() -> ReadCounters:
    """Return the counters of this process."""
    return _counts


def by_name(counters: Any) -> dict[str, float]:
    """Return the counters as a dict by name, for a logger.

    Args:
        counters: ``float64[7]``, see `COUNTER_INDICES`.
    """
    read_seconds, make_seconds = float(counters[READ_SECONDS]), float(counters[MAKE_SECONDS])
    values = [read_seconds, max(0.0, make_seconds - read_seconds), *map(float, counters[:READ_SECONDS])]
    return dict(zip(READ_COUNTER_NAMES, values, strict=True))
