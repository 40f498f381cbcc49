"""`Ahead`: threads that decode or fetch what will be needed next, while the process works on what is there."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any


class Ahead:
    """Work that was begun before its result is asked for. Its errors are those of whoever asks."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._pool: ThreadPoolExecutor | None = None
        self._begun: dict[Hashable, Future[Any]] = {}
        self._lock = threading.Lock()
        self._stopped = False

    def begin(self, key: Hashable, work: Callable[[], Any]) -> None:
        """Start the work, unless it has been."""
        with self._lock:
            if key in self._begun or self._stopped:
                return
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._num_threads, thread_name_prefix="rescale_data")
            self._begun[key] = future = self._pool.submit(work)
        future.add_done_callback(lambda _: self._begun.pop(key, None))

    def wait(self, key: Hashable) -> bool:
        """Until the work is done, if it was begun; whether it was, and is done now without an error."""
        future = self._begun.get(key)
        try:
            return future is not None and future.exception() is None
        except CancelledError:
            return False

    def stop(self) -> None:
        """Leave what has not been begun, and begin nothing more."""
        with self._lock:
            self._stopped = True
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)


_FETCHING_THREADS = 16

_ahead, _far_ahead = Ahead(1), Ahead(_FETCHING_THREADS)

leaving = threading.Event()
"""Set when the process is about to end: nobody waits any more for what threads are about to do."""


def ahead() -> Ahead:
    """That of this process for what takes a core: one thread."""
    return _ahead


def far_ahead() -> Ahead:
    """That of this process for what waits for a network and not for a core."""
    return _far_ahead


def _leave() -> None:
    leaving.set()
    _ahead.stop()
    _far_ahead.stop()


def _renew() -> None:
    """A forked child has no thread."""
    global _ahead, _far_ahead
    _ahead, _far_ahead = Ahead(1), Ahead(_FETCHING_THREADS)


os.register_at_fork(after_in_child=_renew)

# An executor's threads are waited for before `atexit` calls anything, until they have done all that was ever submitted. What
# comes before that has no public name.
getattr(threading, "_register_atexit", atexit.register)(_leave)
