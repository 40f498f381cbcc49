"""One piece of work in the background at a time, whose failure is raised once and never lost."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

logger = logging.getLogger(__name__)


class Background:
    """A thread for one job after the other.

    The interpreter waits for the job that runs before it exits. A failure is logged when it happens, and raised by the next
    ``settle``.

    Attributes:
        num_waits: How often ``settle`` had to wait, or has to now.
        wait_seconds: How long in all.
    """

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._running: Future[None] | None = None
        self.num_waits = 0
        self.wait_seconds = 0.0

    def submit(self, work: Callable[[], None]) -> Future[None]:
        """Start ``work``. ``settle`` comes first."""
        self._running = self._pool.submit(_logged, work)
        return self._running

    def follow_up(self, work: Callable[[], None]) -> None:
        """Do ``work``, which does not raise, when the job that runs is done and before the next one."""
        with contextlib.suppress(RuntimeError):  # the interpreter exits: the next run does it
            self._pool.submit(work)

    def idle(self) -> None:
        """Return when nothing is being done."""
        with contextlib.suppress(RuntimeError):
            self._pool.submit(int).result()

    def settle(self) -> None:
        """Wait for the job that runs; raise what it raised."""
        running, self._running = self._running, None
        if running is None:
            return
        if not running.done():
            start = time.perf_counter()
            self.num_waits += 1
            running.exception()
            self.wait_seconds += time.perf_counter() - start
        running.result()

    def forget(self) -> None:
        """Wait for the job that runs, whose failure was raised already."""
        running, self._running = self._running, None
        if running is not None:
            running.exception()

    def close(self) -> None:
        """Wait for the job that runs; raise what it raised. No more jobs."""
        try:
            self.settle()
        finally:
            self._pool.shutdown(wait=True)


def _logged(work: Callable[[], None]) -> None:
    try:
        work()
    except BaseException as error:
        logger.error("In the background: %s: %s", type(error).__name__, error)
        raise
