"""`Answering`: a store that answers in time or counts as gone.

The host of a store may vanish without a word. A request to it then waits as long as the kernel believes in the connection, a
quarter of an hour; so a thread of its own makes the requests, and it is that thread which is left waiting.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

_SECONDS = 300.0


class NoAnswer(RuntimeError):
    """The store has not answered in time."""


class _Request(NamedTuple):
    work: Callable[[], Any]
    answer: SimpleQueue[tuple[Any, Exception | None]]


class Answering:
    """For one thread at a time: a request that waits keeps the others waiting.

    Args:
        store: One of torch's. What is called on this is called on it; `NoAnswer` where that takes longer than ``seconds``.
    """

    seconds: float = _SECONDS
    """For one request from now on."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._requests: SimpleQueue[_Request | None] = SimpleQueue()
        threading.Thread(target=_answer, args=(self._requests,), daemon=True, name="rescale_data-store").start()
        weakref.finalize(self, self._requests.put, None).atexit = False

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def ask(*args: Any) -> Any:
            request = _Request(lambda: getattr(self._store, name)(*args), SimpleQueue())
            self._requests.put(request)
            try:
                value, error = request.answer.get(timeout=self.seconds)
            except Empty:
                raise NoAnswer(f"the store has not answered for {self.seconds:g} s") from None
            if error is not None:
                raise error
            return value

        return ask


def _answer(requests: SimpleQueue[_Request | None]) -> None:
    while (request := requests.get()) is not None:
        try:
            request.answer.put((request.work(), None))
        except Exception as error:
            request.answer.put((None, error))
        del request
