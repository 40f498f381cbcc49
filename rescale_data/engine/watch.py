"""A batch that takes long: one warning says what the process that makes it is about.

Nothing is noted on the way. When a wait has been long a thread looks at the stack of the one that waits, and the innermost
function of this package that is at work tells what it does, and for whom.
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
"""What a thread is about in a module, the first that fits: the last ones call functions of the user's."""
_FEEDS = tuple(f"rescale_data.engine.{name}" for name in ("pool", "processes", "feed"))
"""What waits for batches that others make."""


class Watch:
    """Looks at one thread at work, and says once that it takes long.

    Args:
        seconds: What is long.
        say: Told for how many seconds the work has taken, and where the thread is.
        clock: In seconds.

    Attributes:
        seconds: As given.
        began: When the work began; `None` while there is none. Whoever works sets it, for nothing else is cheap enough.
        said: Whether something was said; whoever works may take it back.
        thread: The one that is looked at; 0 before `start`.
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
        self._process = 0  # whose thread looks

    def start(self) -> None:
        """Look at this thread from now on, every so often, in the background."""
        if not self.thread:
            self._stopped = threading.Event()
            given = weakref.ref(self), min(1.0, max(0.01, self.seconds / 4)), self._stopped
            looks = threading.Thread(target=_look, args=given, daemon=True, name="rescale_data-watch")
            looks.start()
            self._looks, self._process = looks, os.getpid()  # after the start, which Ctrl-C may keep from coming about
        self.thread = threading.get_ident()

    def stop(self) -> None:
        """Look no more, until the next start."""
        self.thread = 0
        if self._looks is not None and self._process == os.getpid():  # a fork has no thread
            self._stopped.set()
            self._looks.join(1.0)  # it may just be telling something

    def look(self) -> None:
        """Say it, if the work takes long and it has not been said."""
        began = self.began
        if began is None or began == self._told or self._clock() - began < self.seconds:
            return
        self._told, self.said = began, True
        self._say(self._clock() - began, frames().get(self.thread))


def _look(of: weakref.ref[Watch], pause: float, stopped: threading.Event) -> None:
    while not stopped.wait(pause) and (watch := of()) is not None:
        with suppress(Exception):  # it looks at what others change meanwhile
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
    """
    Args:
        called: The function, not of this package, that the innermost one of this package has called.
    """
    if counts().file:
        return f"reading {counts().file}"
    kind = next((kind for begin, kind in _KINDS if module.startswith(begin)), f"in {module}")
    if called is None:
        return kind
    return f"{kind}, {called.f_code.co_qualname} ({called.f_code.co_filename}, line {called.f_lineno})"


def _for_whom(ours: FrameType) -> str:
    """The logical shard and the row, as the innermost node knows them."""
    for frame in _outward(ours):
        node = frame.f_locals.get("self")
        if not isinstance(node, Node):
            continue
        shard, row = find_shard(node), ""  # pyright: ignore[reportUnknownArgumentType]
        with suppress(Exception):  # it is at work
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
