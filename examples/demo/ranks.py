"""The ranks of one segment as processes that never outlive this one."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from multiprocessing.queues import SimpleQueue
from typing import Any, cast

GRACE_SECONDS = 10.0
START_METHOD = "spawn"
"""Ranks take the blocked signal of `run_ranks` from this process itself, not from a server's."""


class RankFailedError(RuntimeError):
    """A rank raised or died; the message holds its traceback."""


def run_ranks(
    world_size: int, function: Callable[..., None], *args: Any, tick: Callable[[], None] = lambda: None
) -> None:
    """Run ``function(rank, *args)`` in ``world_size`` processes; if one fails, or on Ctrl-C, stop all of them.

    Every second ``tick`` is called.

    Each rank leads a process group of its own, with its loader's workers in it, so that this process can stop a rank with
    all that it started.
    """
    context = multiprocessing.get_context(START_METHOD)
    failures: SimpleQueue[str] = context.SimpleQueue()
    processes = [context.Process(target=_rank, args=(rank, failures, function, args)) for rank in range(world_size)]
    try:
        signal.pthread_sigmask(
            signal.SIG_BLOCK, {signal.SIGINT}
        )  # ranks inherit this, so Ctrl-C is for this process alone
        for process in processes:
            process.start()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        _wait_for_all(processes, failures, tick)
    finally:
        _stop([process for process in processes if process.pid])


def _rank(rank: int, failures: SimpleQueue[str], function: Callable[..., None], args: tuple[Any, ...]) -> None:
    os.setpgrp()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        function(rank, *args)
    except Exception:
        failures.put(f"rank {rank} failed:\n\n{traceback.format_exc()[-6000:]}")
        sys.exit(1)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.killpg(os.getpgrp(), signal.SIGKILL)


def _wait_for_all(processes: list[BaseProcess], failures: SimpleQueue[str], tick: Callable[[], None]) -> None:
    running = {process.sentinel: rank for rank, process in enumerate(processes)}
    while running:
        ended = wait(list(running), timeout=1)
        if not ended:
            tick()
        for sentinel in ended:
            rank = running.pop(cast(int, sentinel))
            processes[rank].join()
            if code := processes[rank].exitcode:
                raise RankFailedError(
                    failures.get() if not failures.empty() else f"rank {rank} died with exit code {code}."
                )


def _stop(processes: list[BaseProcess]) -> None:
    """Ask the ranks to end, then end whatever is left of their process groups."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not leave half of them
    for process in processes:
        if process.exitcode is None:
            process.terminate()
    deadline = time.monotonic() + GRACE_SECONDS
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    for process in processes:
        process.kill()
        with contextlib.suppress(ProcessLookupError, PermissionError):  # where the whole group has ended
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()
    signal.signal(signal.SIGINT, before)
