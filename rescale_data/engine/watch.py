"""Logs one warning if a batch takes long, with a text that says what the process that makes the batch is doing.

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

from rescale_data.engine.threads import WaitableFlag
from rescale_data.nodes.base import Node
from rescale_data.nodes.below import find_shard
from rescale_data.sources.counts import read_counters

SLOW_SECONDS = 10.0
"""Seconds that the loader waits for a batch before it logs a warning, once for this batch, that names what it waits for."""
_logger = logging.getLogger("rescale_data")
_PACKAGE, _USER_FUNCTION = "rescale_data.", "in a function of the user's"
_WORK_KINDS = (
    ("rescale_data.sources.", "reading"),
    *((f"rescale_data.engine.{name}", "waiting for other ranks") for name in ("ranks", "threads")),
    *((f"rescale_data.nodes.{name}", _USER_FUNCTION) for name in ("map", "filter", "tokenize", "clean", "foreign")),
    *((f"rescale_data.engine.{name}", _USER_FUNCTION) for name in ("runner", "recipe", "feed")),
)
"""The kind of work that a thread does, by the prefix of its module's name; the first match counts.

The last modules call functions of the user."""
_WAITING_MODULES = tuple(f"rescale_data.engine.{name}" for name in ("pool", "processes", "message", "feed"))
"""Modules whose functions wait for batches that other threads or processes make."""


class Watchdog:
    """Watches one thread, and reports work that takes longer than a given time, once each.

    Args:
        report_after_seconds: Work that takes longer is reported.
        report: Makes a report; called with the seconds since the work began, and the innermost frame of the thread.
        clock: Returns the time in seconds.

    Attributes:
        report_after_seconds: The argument of this name.
        start_time: The time at which the work began; `None` while there is no work. The watched thread sets it, since nothing
            else is cheap enough.
        report_made: True if a report was made; the watched thread may reset it.
        thread_id: The id of the watched thread, which sets it together with `start_time`; 0 before.
        is_running: True from `start` to `stop`.
    """

    def __init__(
        self,
        report_after_seconds: float,
        report: Callable[[float, FrameType | None], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.start_time: float | None = None
        self.report_after_seconds, self._report, self._clock = report_after_seconds, report, clock
        self.thread_id, self.report_made, self._reported_start_time = 0, False, -1.0
        self._stop_flag, self.is_running = WaitableFlag(), False
        self._watcher: threading.Thread | None = None
        self._watcher_pid = 0  # the process that has the background thread

    def start(self) -> None:
        """Start a background thread that looks at the watched thread at intervals."""
        if not self.is_running:
            self._stop_flag = WaitableFlag()
            args = weakref.ref(self), min(1.0, max(0.01, self.report_after_seconds / 4)), self._stop_flag
            thread = threading.Thread(target=_watch_loop, args=args, daemon=True, name="rescale_data-watch")
            thread.start()
            self._watcher, self._watcher_pid = thread, os.getpid()  # only after the start, which Ctrl-C may prevent
        self.is_running = True

    def stop(self) -> None:
        """Stop watching, until `start` is called again."""
        self.is_running = False
        if self._watcher is not None and self._watcher_pid == os.getpid():  # a forked process has no such thread
            self._stop_flag.set()
            self._watcher.join(1.0)  # a report may be under way

    def report_if_slow(self) -> None:
        """Report the current work if it takes too long and was not reported before."""
        began = self.start_time
        if began is None or began == self._reported_start_time or self._clock() - began < self.report_after_seconds:
            return
        self._reported_start_time, self.report_made = began, True
        self._report(self._clock() - began, stacks().get(self.thread_id))


def _watch_loop(watch_ref: weakref.ref[Watchdog], pause_seconds: float, stop_flag: WaitableFlag) -> None:
    while not stop_flag.wait(pause_seconds) and (watch := watch_ref()) is not None:
        with suppress(Exception):  # other threads change what it looks at
            watch.report_if_slow()
        del watch


def stacks() -> dict[int, FrameType]:
    """Return the innermost stack frame of each thread, by the id of the thread."""
    return getattr(sys, "_current_frames")()  # noqa: B009 - documented, in spite of its name


def describe(innermost_frame: FrameType | None) -> str:
    """Return a text about the work of a thread: its kind, the function, the logical shard and the last row drawn."""
    callee = None
    for frame in outer_frames(innermost_frame):
        module = _module(frame)
        if module.startswith(_PACKAGE):
            return f"{_describe_work(module, callee)}{_describe_shard(frame)}"
        callee = frame
    return "it is in no function of rescale_data"


def waits_for_batches(innermost_frame: FrameType | None) -> bool:
    """True if the innermost function of this package on a thread's stack waits for batches that others make."""
    modules = [_module(frame) for frame in outer_frames(innermost_frame) if _module(frame).startswith(_PACKAGE)]
    # The functions of `threads` wait for their callers
    return next((module for module in modules if module != f"{_PACKAGE}engine.threads"), "") in _WAITING_MODULES


def _describe_work(module: str, callee: FrameType | None) -> str:
    """Return the kind of work done in a module as text, with the function outside this package that it has called, if any.

    Args:
        callee: The frame of a function, not of this package, that the innermost function of this package has called.
    """
    if read_counters().file:
        return f"reading {read_counters().file}"
    work = next((work for module_prefix, work in _WORK_KINDS if module.startswith(module_prefix)), f"in {module}")
    if callee is None:
        return work
    return f"{work}, {callee.f_code.co_qualname} ({callee.f_code.co_filename}, line {callee.f_lineno})"


def _describe_shard(package_frame: FrameType) -> str:
    """Return a text that names the logical shard and the last row drawn of the innermost node on a stack; it may be empty."""
    for frame in outer_frames(package_frame):
        node = frame.f_locals.get("self")
        if not isinstance(node, Node):
            continue
        shard, row_text = find_shard(node), ""  # pyright: ignore[reportUnknownArgumentType]
        with suppress(Exception):  # the node is at work
            row_text = node.locate()
        shard_text = "" if shard is None else f", logical shard {shard.index}"
        return shard_text + (f", last row drawn: {row_text}" if row_text else "")
    return ""


def outer_frames(frame: FrameType | None) -> Generator[FrameType]:
    """Yield a frame and the frames that have called it, from the inside out."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))
