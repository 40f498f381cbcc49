"""`Ahead`: one thread a process that decodes what will be needed next, while the rest works on what is there."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class Ahead:
    """Work that was begun before its result is asked for. Its errors are those of whoever asks."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._begun: dict[Hashable, Future[Any]] = {}
        self._lock = threading.Lock()

    def begin(self, key: Hashable, work: Callable[[], Any]) -> None:
        """Start the work, unless it has been."""
        with self._lock:
            if key in self._begun:
                return
            if self._pool is None:
                self._pool = ThreadPoolExecutor(1, thread_name_prefix="rescale_data")
            self._begun[key] = future = self._pool.submit(work)
        future.add_done_callback(lambda _: self._begun.pop(key, None))

    def wait(self, key: Hashable) -> None:
        """Until the work is done, if it was begun."""
        future = self._begun.get(key)
        if future is not None:
            future.exception()


_ahead = Ahead()


def ahead() -> Ahead:
    """That of this process."""
    return _ahead


def _renew() -> None:
    """A forked child has no thread."""
    global _ahead
    _ahead = Ahead()


os.register_at_fork(after_in_child=_renew)
