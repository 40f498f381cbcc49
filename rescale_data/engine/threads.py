"""Background threads; Ctrl-C may interrupt a wait for them at any moment.

Not `threading.Event`: an interrupted wait may leave its lock held. Not `Thread.join` for a thread that is at work: after Ctrl-C
within it, Python takes a running thread for one that has ended.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any, Generic, TypeAlias, TypeVar
from weakref import WeakKeyDictionary, WeakSet, ref

T = TypeVar("T")
_EXIT_WAIT_SECONDS = 5.0


class WaitableFlag:
    """A flag that one thread sets once, and that one other thread may wait for."""

    def __init__(self) -> None:
        self.is_set, self._wake_queue = False, SimpleQueue[None]()

    def set(self) -> None:
        self.is_set = True
        self._wake_queue.put(None)

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until the flag is set, at most `seconds`; return True if it is set."""
        if not self.is_set:
            with suppress(Empty):
                self._wake_queue.get(timeout=seconds)
        return self.is_set


class WorkResult(Generic[T]):
    """The result of work that another thread does, or the error to raise in its place."""

    def __init__(self) -> None:
        self._results: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()

    def run_work(self, work: Callable[[], T]) -> None:
        """Run `work`, and store its result or its error for `get`."""
        try:
            self._results.put((work(), None))
        except BaseException as error:
            self._results.put((None, error))

    def fail(self, error: BaseException) -> None:
        """Make `get` raise an error at once, although the work goes on."""
        self._results.put((None, error))

    def get(self, seconds: float | None = None) -> T:
        """Wait for the result and return it, once; signal handlers and Ctrl-C run during the wait.

        Raises:
            Empty: The work has taken `seconds`. It goes on.
        """
        value, error = self._results.get(timeout=seconds)
        try:
            if error is not None:
                raise error
        finally:
            del error  # its traceback holds this frame
        return value


def run_in_thread(work: Callable[[], T], seconds: float | None = None) -> T:
    """Return ``work()``, run in another thread; raise `Empty` after `seconds`, while the thread goes on."""
    result = WorkResult[T]()
    threading.Thread(target=result.run_work, args=(work,), daemon=True, name="rescale_data-store").start()
    return result.get(seconds)


class TaskThread:
    """A background thread that runs tasks in the order in which they are put, until it is ended or collected.

    Args:
        name: The name of the thread, after "rescale_data-".
    """

    def __init__(self, name: str) -> None:
        self._tasks, self._ended_flag = _TaskQueue(), WaitableFlag()
        # Puts itself when self is collected; Ctrl-C within a `__del__` would be lost
        owner = ref(self, self._tasks.put)
        args = self._tasks, self._ended_flag, owner
        self._thread = threading.Thread(target=_run_tasks, args=args, daemon=True, name=f"rescale_data-{name}")
        self._thread.start()
        self._owner_pid = os.getpid()
        _task_threads.add(self)

    def put(self, task: Callable[[], None]) -> None:
        self._tasks.put(task)

    def end(self, seconds: float | None = None) -> None:
        """End the thread after the tasks put so far, and wait for its end, at most `seconds`."""
        if self._owner_pid != os.getpid():  # a forked process has no such thread
            return
        self._tasks.put(None)
        if self._ended_flag.wait(seconds):
            self._thread.join()


_TaskQueue: TypeAlias = SimpleQueue[Callable[[], Any] | None]
_task_threads: WeakSet[TaskThread] = WeakSet()
_exit_calls_by_owner: WeakKeyDictionary[Any, Callable[[Any], object]] = WeakKeyDictionary()


def call_at_exit(owner: T, function: Callable[[T], object]) -> None:
    """Call ``function(owner)`` when the interpreter exits, before the threads of this module end, if the owner still lives."""
    _exit_calls_by_owner[owner] = function


def _run_tasks(tasks: _TaskQueue, ended_flag: WaitableFlag, owner: ref[TaskThread]) -> None:
    while (task := tasks.get()) is not None and task is not owner:
        task()
        del task  # what it refers to can be collected
    ended_flag.set()


@atexit.register
def _end_all_threads() -> None:
    """End all threads before the interpreter exits, because a thread that waits in C code then would crash the process."""
    for owner, function in list(_exit_calls_by_owner.items()):
        function(owner)
    deadline = monotonic() + _EXIT_WAIT_SECONDS
    for thread in list(_task_threads):
        thread.end(max(0.0, deadline - monotonic()))
