"""`Gate`: at most so many requests at once, over all processes of a machine; fewer where the other side asks for it."""

from __future__ import annotations

import fcntl
import hashlib
import os
import random
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from rescale_data.sources.files.once import write_aside

_PAUSE = 0.01
_RECOVERY_SECONDS = 30.0


class Gate:
    """Whoever holds the lock of one of ``limit`` files makes a request. The kernel lets go of those of dead processes.

    Args:
        limit: Requests at once.
        asked: Who is asked, such as a bucket. One that asks to slow down slows no other.
        folder: Of the lock files; by default one of this user and machine.
    """

    def __init__(self, limit: int, asked: str = "", folder: str | None = None) -> None:
        self._limit = limit
        self._folder = folder or os.path.join(tempfile.gettempdir(), f"rescale_data-{os.getuid()}-requests")
        name = hashlib.blake2b(asked.encode(), digest_size=8).hexdigest()
        self._slowed = os.path.join(self._folder, f"slowed-{name}")
        os.makedirs(self._folder, exist_ok=True)

    @contextmanager
    def enter(self) -> Generator[float]:
        """Wait for one's turn, and hold it; the time at which it began."""
        lock = self._take()
        try:
            yield time.time()
        finally:
            os.close(lock)

    def slow_down(self, since: float) -> None:
        """A request made at ``since`` was too many: half as many from now on, for all processes; some time later more again.

        What was under way when that happened last is often refused together, and counts once.
        """
        _, slowed_at = self._last()
        if since < slowed_at <= time.time():
            return
        half = max(1, self.limit // 2)
        with suppress(OSError):
            write_aside(self._slowed, lambda aside: Path(aside).write_text(f"{half} {time.time()}"))

    @property
    def limit(self) -> int:
        """How many there may be now."""
        half, since = self._last()
        return recovered(half, self._limit, time.time() - since)

    def _last(self) -> tuple[int, float]:
        """To how many it was slowed last, and when."""
        try:
            with open(self._slowed) as file:
                half, since = file.read().split()
            return int(half), float(since)
        except (OSError, ValueError):
            return self._limit, 0.0

    def _take(self) -> int:
        while True:
            limit = self.limit
            for slot in random.sample(range(limit), limit):
                lock = os.open(os.path.join(self._folder, str(slot)), os.O_CREAT | os.O_RDWR, 0o600)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return lock
                except BlockingIOError:
                    os.close(lock)
            time.sleep(_PAUSE * random.uniform(0.5, 1.5))


def recovered(slowed: int, limit: int, seconds: float) -> int:
    """How many requests at once, some time after they were slowed: twice as many each half minute."""
    doublings = min(30.0, max(0.0, seconds) / _RECOVERY_SECONDS)
    return min(limit, int(slowed * 2**doublings))
