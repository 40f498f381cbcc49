"""`Hedge`: a request that takes longer than nearly all others is made a second time, and the first answer wins.

Dean and Barroso, "The Tail at Scale" (2013): what stalls is most often one connection, not the other side.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, as_completed, wait
from contextlib import suppress
from typing import TypeVar

from rescale_data.sources.counts import HEDGES, REQUESTS, counts

T = TypeVar("T")

_KNOWN_AFTER = 100
_OF_REQUESTS = 50
_LATE, _SOON = 0.99, 0.1


class Hedge:
    """What one process knows of how long answers take.

    At most one request in fifty is made again, so that a network that is slow is not asked for more.
    """

    def __init__(self) -> None:
        self._took: deque[float] = deque(maxlen=1000)
        self._lock = threading.Lock()
        self.requests = self.hedges = 0

    def delay(self, at_first: float) -> float:
        """Seconds after which an answer is late: later than 99 % of the last thousand, and no less than a tenth of a second.

        Args:
            at_first: Before there are a hundred.
        """
        with self._lock:
            if len(self._took) < _KNOWN_AFTER:
                return at_first
            return max(_SOON, sorted(self._took)[int(len(self._took) * _LATE)])

    def call(self, work: Callable[[], T], at_first: float | None, seconds: float) -> T:
        """What the first of one or two calls returns.

        Args:
            work: May be abandoned: it runs in a thread of its own.
            at_first: See `delay`; `None` for one call only.
            seconds: For all of it.

        Raises:
            TimeoutError: There is no answer.
        """
        until = time.monotonic() + seconds
        begun = [self._begin(work)]
        late = seconds if at_first is None else min(seconds, self.delay(at_first))
        wait(begun, late)
        if not begun[0].done() and late < seconds and self._may_hedge():
            begun.append(self._begin(work))
        failure: BaseException = TimeoutError(f"no answer in {seconds:.1f} s")
        with suppress(TimeoutError):
            for answer in as_completed(begun, max(0.0, until - time.monotonic())):
                if (error := answer.exception()) is None:
                    value, took = answer.result()
                    with self._lock:
                        self._took.append(took)
                    return value
                failure = error  # the other may still do better
        raise failure

    def _may_hedge(self) -> bool:
        with self._lock:
            allowed = self.hedges < 1 + self.requests // _OF_REQUESTS
            self.hedges += allowed
        counts().add(HEDGES, allowed)
        return allowed

    def _begin(self, work: Callable[[], T]) -> Future[tuple[T, float]]:
        """What it returns, and the seconds that it took."""
        answer: Future[tuple[T, float]] = Future()

        def run() -> None:
            started = time.monotonic()
            try:
                answer.set_result((work(), time.monotonic() - started))
            except Exception as error:
                answer.set_exception(error)

        counts().add(REQUESTS, 1)
        with self._lock:
            self.requests += 1
        threading.Thread(target=run, daemon=True, name="rescale_data-request").start()
        return answer
