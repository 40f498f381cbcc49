"""Files that one of many processes makes and the others wait for, on any shared folder."""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress

_POLL_SECONDS = 0.05
_BEAT_SECONDS = 2.0
_DEAD_SECONDS = 30.0


def make_once(path: str, is_good: Callable[[], bool], make: Callable[[str], None], *, wait: bool = True) -> None:
    """Let one process make a file; when this returns it is there.

    Whoever creates ``<path>.claim`` makes the file aside and renames it, touching the claim all the while. A claim that
    stands still is that of a dead process, and is taken over.

    Args:
        path: Of the file.
        is_good: Whether it is there and is the right one.
        make: Writes it to the path that it is given.
        wait: Whether to wait for a process that is making it.
    """
    watch = _Watch(f"{path}.claim")
    while not is_good():
        if not watch.claim():
            if not wait:
                return
            time.sleep(_POLL_SECONDS)
            continue
        with _beating(watch.path):
            if not is_good():
                write_aside(path, make)


def write_aside(path: str, make: Callable[[str], object]) -> None:
    """Make a file under another name and rename it, so that nobody sees half of it."""
    aside = f"{path}.{uuid.uuid4().hex[:12]}.tmp"
    try:
        make(aside)
        os.replace(aside, path)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(aside)


class _Watch:
    """A claim as this process sees it. Only our own clock says how long it has stood still: others may be wrong."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._seen, self._since = -1, time.monotonic()

    def claim(self) -> bool:
        try:
            os.close(os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            return True
        except FileExistsError:
            self._break_if_dead()
            return False

    def _break_if_dead(self) -> None:
        with suppress(FileNotFoundError):
            beat = os.stat(self.path).st_mtime_ns
            if beat != self._seen:
                self._seen, self._since = beat, time.monotonic()
            elif time.monotonic() - self._since > _DEAD_SECONDS:
                os.unlink(self.path)


@contextmanager
def _beating(path: str) -> Generator[None]:
    """Touch a claim until the work is done, then give it up."""
    done = threading.Event()

    def beat() -> None:
        while not done.wait(_BEAT_SECONDS):
            with suppress(OSError):
                os.utime(path)

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        with suppress(FileNotFoundError):
            os.unlink(path)
