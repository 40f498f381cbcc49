"""`BackgroundRunner`: background threads that decode or fetch data before it is needed."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any


class BackgroundRunner:
    """Runs functions in background threads before their results are needed.

    The work puts its result into the cache. Its errors are not raised here: a caller that misses the result does the work
    again, and gets the error.
    """

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._pool: ThreadPoolExecutor | None = None
        self._futures: dict[Hashable, Future[Any]] = {}
        self._lock = threading.Lock()
        self._is_stopped = False

    def begin(self, key: Hashable, work: Callable[[], Any]) -> None:
        """Submit a function to the threads, unless one with this key is queued or running, or `stop` was called."""
        with self._lock:
            if key in self._futures or self._is_stopped:
                return
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._num_threads, thread_name_prefix="rescale_data")
            self._futures[key] = future = self._pool.submit(work)
        future.add_done_callback(lambda _: self._futures.pop(key, None))

    def wait(self, key: Hashable) -> None:
        """Wait until the function that was submitted with ``key`` has returned; return at once if there is none."""
        if (future := self._futures.get(key)) is not None:
            with suppress(CancelledError):
                future.exception()

    def stop(self) -> None:
        """Cancel the queued functions that no thread has started, and accept no new ones."""
        with self._lock:
            self._is_stopped = True
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)


_FETCHERS = 16

decode_runner = BackgroundRunner(1)
"""This process's `BackgroundRunner` for decoding, with one thread, because decoding keeps a core busy."""
fetch_runner = BackgroundRunner(_FETCHERS)
"""This process's `BackgroundRunner` for requests over a network, with many threads, because they mostly wait."""
exit_event = threading.Event()
"""The event that is set when this process begins to exit. Pauses wait on it, so that they then end at once."""


def _stop_all() -> None:
    exit_event.set()
    decode_runner.stop()
    fetch_runner.stop()


# Begun anew in a forked child: it has no threads, and another thread of the parent may have held a lock
for _reset in (partial(decode_runner.__init__, 1), partial(fetch_runner.__init__, _FETCHERS), exit_event.__init__):
    os.register_at_fork(after_in_child=_reset)

# Before Python calls the functions of `atexit`, it waits until the threads of all executors have done all submitted work. The
# hook that comes before this wait has no public name.
getattr(threading, "_register_atexit", atexit.register)(_stop_all)
