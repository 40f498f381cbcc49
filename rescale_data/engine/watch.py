"""Warns once if a batch takes long, and says what the process that makes it is doing.

Nothing is recorded in advance. After a long wait, a background thread looks at the stack of the thread that waits. The
innermost function of this package there shows the kind of work, and the logical shard.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Generator
from contextlib import suppress
from types import FrameType

from rescale_data.nodes.base import Node
from rescale_data.nodes.below import find_shard
from rescale_data.sources.counts import counts

_logger = logging.getLogger("rescale_data")
_OURS, _USERS = "rescale_data.", "in a function of the user's"
_KINDS = (
    ("rescale_data.sources.", "reading"),
    *((f"rescale_data.engine.{name}", "waiting for other ranks") for name in ("ranks", "agreement")),
    *((f"rescale_data.nodes.{name}", _USERS) for name in ("map", "filter", "tokenize", "clean", "foreign")),
    *((f"rescale_data.engine.{name}", _USERS) for name in ("runner", "recipe", "feed")),
)
"""The work of a thread, by the beginning of its module's name; the first that fits counts. The last modules call functions of
the user."""
_FEEDS = tuple(f"rescale_data.engine.{name}" for name in ("pool", "processes", "feed"))
"""Modules that wait for batches which others make."""


class Watch:
    """Watches one thread at work, and reports once if the work takes long.

    Args:
        seconds: Work that takes longer is reported.
        say: Makes a report; called with the seconds since the work began, and the innermost frame of the thread.
        clock: Returns the time in seconds.

    Attributes:
        seconds: As given.
        began: The time at which the work began; `None` while there is no work. The watched thread sets it, since nothing else
            is cheap enough.
        said: True if a report was made; the watched thread may reset it.
        thread: The id of the watched thread; 0 before `start`.
    """

    def __init__(
        self,
        seconds: float,
        say: Callable[[float, FrameType | None], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.began: float | None = None
        self.seconds, self._say, self._clock = seconds, say, clock
        self.thread, self.said, self._told = 0, False, -1.0
        self._stopped = threading.Event()
        self._looks: threading.Thread | None = None
        self._process = 0  # the process that has the background thread

    def start(self) -> None:
        """Watch the calling thread from now on, at intervals, in the background."""
        if not self.thread:
            self._stopped = threading.Event()
            given = weakref.ref(self), min(1.0, max(0.01, self.seconds / 4)), self._stopped
            looks = threading.Thread(target=_look, args=given, daemon=True, name="rescale_data-watch")
            looks.start()
            self._looks, self._process = looks, os.getpid()  # only after the start, which Ctrl-C may prevent
        self.thread = threading.get_ident()

    def stop(self) -> None:
        """Stop watching, until the next `start`."""
        self.thread = 0
        if self._looks is not None and self._process == os.getpid():  # a forked process has no such thread
            self._stopped.set()
            self._looks.join(1.0)  # a report may be under way

    def look(self) -> None:
        """Report the work if it takes long and was not reported before."""
        began = self.began
        if began is None or began == self._told or self._clock() - began < self.seconds:
            return
        self._told, self.said = began, True
        self._say(self._clock() - began, frames().get(self.thread))


def _look(of: weakref.ref[Watch], pause: float, stopped: threading.Event) -> None:
    while not stopped.wait(pause) and (watch := of()) is not None:
        with suppress(Exception):  # other threads change what it looks at
            watch.look()
        del watch


def frames() -> dict[int, FrameType]:
    """Return the innermost frame of each thread."""
    return getattr(sys, "_current_frames")()  # noqa: B009 - documented, in spite of its name


def describe(innermost: FrameType | None) -> str:
    """Return the work of a thread in words: its kind, the function, the logical shard and the row that it has drawn."""
    called = None
    for frame in _outward(innermost):
        module = _module(frame)
        if module.startswith(_OURS):
            return f"{_work(module, called)}{_for_whom(frame)}"
        called = frame
    return "it is in no function of rescale_data"


def waits(innermost: FrameType | None) -> bool:
    """True if the innermost function of this package waits for batches that others make."""
    ours = (_module(frame) for frame in _outward(innermost) if _module(frame).startswith(_OURS))
    return next(ours, "") in _FEEDS


def _work(module: str, called: FrameType | None) -> str:
    """Return the kind of work in a module, and the function of the user if there is one.

    Args:
        called: The frame of a function, not of this package, that the innermost function of this package has called.
    """
    if counts().file:
        return f"reading {counts().file}"
    kind = next((kind for begin, kind in _KINDS if module.startswith(begin)), f"in {module}")
    if called is None:
        return kind
    return f"{kind}, {called.f_code.co_qualname} ({called.f_code.co_filename}, line {called.f_lineno})"


def _for_whom(ours: FrameType) -> str:
    """Return the logical shard and the last row drawn, in words, as the innermost node knows them."""
    for frame in _outward(ours):
        node = frame.f_locals.get("self")
        if not isinstance(node, Node):
            continue
        shard, row = find_shard(node), ""  # pyright: ignore[reportUnknownArgumentType]
        with suppress(Exception):  # the node is at work
            row = node.locate()
        of_shard = "" if shard is None else f", logical shard {shard.index}"
        return of_shard + (f", last row drawn: {row}" if row else "")
    return ""


def _outward(frame: FrameType | None) -> Generator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))
