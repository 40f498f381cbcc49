"""`Ahead`: background threads that decode or fetch the data that will be needed next."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any


class Ahead:
    """Background work, begun before its result is needed.

    The work puts its result into the cache. Its errors are not raised here: a caller that misses the result does the work
    again, and gets the error.
    """

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._pool: ThreadPoolExecutor | None = None
        self._begun: dict[Hashable, Future[Any]] = {}
        self._lock = threading.Lock()
        self._stopped = False

    def begin(self, key: Hashable, work: Callable[[], Any]) -> None:
        """Start some work, unless work with this key is under way or `stop` was called."""
        with self._lock:
            if key in self._begun or self._stopped:
                return
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._num_threads, thread_name_prefix="rescale_data")
            self._begun[key] = future = self._pool.submit(work)
        future.add_done_callback(lambda _: self._begun.pop(key, None))

    def wait(self, key: Hashable) -> None:
        """Wait until the work is done, if it is under way."""
        if (future := self._begun.get(key)) is not None:
            with suppress(CancelledError):
                future.exception()

    def stop(self) -> None:
        """Cancel work that no thread has begun, and accept no more."""
        with self._lock:
            self._stopped = True
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)


_FETCHING_THREADS = 16

_ahead, _far_ahead = Ahead(1), Ahead(_FETCHING_THREADS)

_leaving = threading.Event()


def ahead() -> Ahead:
    """Return the `Ahead` of this process for decoding; it has one thread, because decoding takes a core."""
    return _ahead


def far_ahead() -> Ahead:
    """Return the `Ahead` of this process for work that waits for a network; it has many threads."""
    return _far_ahead


def leaving() -> threading.Event:
    """Return the event that is set when this process is about to end. Pauses wait for it, so that they then end at once."""
    return _leaving


def _leave() -> None:
    _leaving.set()
    _ahead.stop()
    _far_ahead.stop()


def _renew() -> None:
    """Begin anew in a forked child: it has no threads, and another thread may have held the locks."""
    global _ahead, _far_ahead, _leaving
    _ahead, _far_ahead, _leaving = Ahead(1), Ahead(_FETCHING_THREADS), threading.Event()


os.register_at_fork(after_in_child=_renew)

# Before Python calls the functions of `atexit`, it waits until the threads of all executors have done all submitted work. The
# hook that comes before this wait has no public name.
getattr(threading, "_register_atexit", atexit.register)(_leave)
