"""Reads files behind URLs, by one request for each range, with retries; a local disk may keep the ranges."""

from __future__ import annotations

import math
import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import pyarrow as pa
from fsspec.asyn import AsyncFileSystem

from rescale_data.errors import checks_argument_types
from rescale_data.sources.counts import REQUEST_BYTES, REQUESTS, RETRIES, read_counters
from rescale_data.sources.decoded.ahead import exit_event
from rescale_data.sources.files.local_store import LocalStore
from rescale_data.sources.files.ranges import ArrowBuffer, RangeReader, RangesFile

T = TypeVar("T")

_REQUESTS_AT_ONCE = 16
_SMALL_READ = 2**16
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE = 0.5, 30.0
_LIMIT_DOUBLING_SECONDS = 30.0
_MIN_ANSWERS_FOR_LIMIT = 100
_ANSWERS_PER_LIMIT = 50  # limits are computed again after so many answers
_LISTING_TIMEOUT_FACTOR = 10
_OVERHEAD_BYTES = 2**20  # a request takes about as long as so many of its bytes, even if it asks for none
_MAX_START_DELAY_SECONDS = 10.0
_SLOW_DOWN_MARKS = ("SlowDown", "Slow Down", "SLOW_DOWN", "503", "429", "TooManyRequests")
# A request that ends in one of these is not made again
_FATAL = (IsADirectoryError, NotADirectoryError, NotImplementedError, AttributeError, KeyError, TypeError, ValueError)


@checks_argument_types
@dataclass(frozen=True, kw_only=True)
class Remote:
    """Options for reading files behind URLs.

    Args:
        timeout: Seconds that the last attempt of a request may take. Earlier attempts have less time: a request that takes four
            times as long as others of its size is made again, with four times the time. The first answer to any attempt counts.
        retries: Number of times that a failed request is made again, unless there is no such file or no permission. Pauses
            after a failure are random; their bound doubles each time, up to half a minute.
        max_requests: Number of requests that this process waits for at once, to a bucket or host. An answer that asks to slow
            down (503, 429) halves it; then it doubles again each half minute.
        read_ahead: Whether to fetch in the background what will be needed next, if ``cache_bytes`` has room for it.

    Raises:
        ValueError: A number is out of range.

    Example:
        >>> import rescale_data as rd
        >>> remote = rd.Remote(retries=8, max_requests=16)  # rd.ParquetSource("s3://bucket/data", remote=remote)
        >>> remote.retries
        8
    """

    timeout: float = 120.0
    retries: int = 5
    max_requests: int = 64
    read_ahead: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.timeout < math.inf or self.retries < 0 or self.max_requests < 1:
            raise ValueError(f"{self}: timeout is seconds, above 0; retries is at least 0, max_requests at least 1.")


class RemoteError(OSError):
    """Error raised if a file could not be read, even after retries; the message has its URL."""


class RemoteFile(RangeReader):
    """A remote file of an fsspec filesystem, of which any number of threads may read ranges.

    Args:
        filesystem: Filesystem of fsspec.
        path: Path of the file in it.
        remote: Options for reading it.
        size: Bytes of the file.
        stamp: A text that changes with the file; "" if it is not known.
        store: Store for ranges that were read; `None` to keep none.
    """

    def __init__(
        self, filesystem: Any, path: str, remote: Remote, size: int, stamp: str = "", store: LocalStore | None = None
    ) -> None:
        self._filesystem: Any = reconnected(filesystem)
        self._path, self._remote, self._stamp, self._store = path, remote, stamp, store
        self.url: str = self._filesystem.unstrip_protocol(path)
        self.size = size
        self._last_read: tuple[int, ArrowBuffer] = (0, pa.py_buffer(b""))

    def read(self, offset: int, length: int) -> ArrowBuffer:
        """Return ``length`` bytes that begin at ``offset``, fewer at the end of the file.

        Small reads that are close together are one request.
        """
        length = max(0, min(length, self.size - offset))
        window_offset, window = self._last_read
        if not window_offset <= offset <= offset + length <= window_offset + window.size:
            if length >= _SMALL_READ:
                return self._range(offset, length)
            window_offset, window = self._last_read = offset, self._range(offset, min(_SMALL_READ, self.size - offset))
        return window.slice(offset - window_offset, length)

    def read_many(self, ranges: Sequence[tuple[int, int]]) -> list[ArrowBuffer]:
        """Return several byte ranges, which are requested at the same time."""
        with ThreadPoolExecutor(_REQUESTS_AT_ONCE) as pool:
            return list(pool.map(self._range, *zip(*ranges, strict=True)))

    def as_arrow(self) -> Any:
        """Return the whole file as an object that pyarrow can read."""
        return pa.PythonFile(RangesFile(self), mode="r")

    def _range(self, offset: int, length: int) -> ArrowBuffer:
        def request() -> bytes:
            range_bytes = self._filesystem.cat_file(self._path, start=offset, end=offset + length)
            if len(range_bytes) != length:
                raise OSError(f"{len(range_bytes)} bytes arrived of {length}")
            read_counters().add(REQUEST_BYTES, length)
            return range_bytes

        def fetch() -> bytes:
            wait_random_time("reading")
            return attempt(self._remote, self.url, request, length, f", bytes {offset} to {offset + length - 1}")

        if not length:
            return pa.py_buffer(b"")
        if self._store is None or not self._stamp:  # a change of the file would not be seen
            return pa.py_buffer(fetch())
        return self._store.read(f"{self.url}|{self.size}|{self._stamp}|{offset}|{length}", fetch)


def attempt(remote: Remote, url: str, send: Callable[[], T], num_bytes: int | None = None, detail: str = "") -> T:
    """Call ``send`` and return its result, with retries after time-outs and after errors that may be temporary.

    Args:
        remote: Time-outs and retries.
        url: URL of the file, for messages; its beginning is the bucket or host that requests are counted for.
        send: Makes the request.
        num_bytes: About how many bytes the request asks for; `None` if ``send`` makes many requests, such as a listing.
        detail: The part of the file that is requested, for messages.

    Raises:
        RemoteError: Each attempt failed.
        FileNotFoundError, PermissionError: The file is not there, or may not be read.
    """
    start_time, host, answers = time.monotonic(), "/".join(url.split("/")[:3]), list[Future[tuple[T, float]]]()
    request_limit, request_times = _request_limit(remote.max_requests, host), _request_times(host)
    for attempt_number in range(remote.retries + 1):
        is_last, wait_seconds = attempt_number == remote.retries, remote.timeout
        if num_bytes is None:
            wait_seconds *= _LISTING_TIMEOUT_FACTOR
        elif not is_last:
            wait_seconds = min(wait_seconds, request_times.limit_seconds(num_bytes) * 4**attempt_number)
        try:
            with request_limit.hold_request_slot():
                read_counters().add(REQUESTS, 1)
                answers.append(_start_request(send, request_limit))
                work_result, seconds_taken = _first_answer(answers, wait_seconds)
            if num_bytes is not None:
                request_times.add_answer(num_bytes, seconds_taken)
            return work_result
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{url}{detail} is not there: {error}") from error
        except PermissionError as error:
            raise PermissionError(f"{url}{detail} may not be read: {error}") from error
        except Exception as error:
            if isinstance(error, _FATAL):
                error.add_note(f"while {url}{detail} was read")
                raise
            if is_last or exit_event.is_set():
                raise _out_of_retries(url + detail, error, attempt_number + 1, time.monotonic() - start_time) from error
            if not isinstance(error, _NoAnswerError):  # to wait for an answer has been a pause
                exit_event.wait(random.uniform(0.0, min(_LONGEST_PAUSE, _FIRST_PAUSE_SECONDS * 2**attempt_number)))
        read_counters().add(RETRIES, 1)
    raise AssertionError


def _start_request(send_request: Callable[[], T], request_limit: RequestLimit) -> Future[tuple[T, float]]:
    """Start ``send_request`` in a new thread, and return a future of its result and of the seconds that it took.

    An error that asks to slow down lowers the limit, even if nobody waits for this answer any more.
    """
    answer: Future[tuple[T, float]] = Future()

    def run() -> None:
        start_time = time.monotonic()
        try:
            answer.set_result((send_request(), time.monotonic() - start_time))
        except BaseException as error:
            if any(mark in f"{type(error).__name__} {error}" for mark in _SLOW_DOWN_MARKS):
                request_limit.slow_down(start_time)
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True, name="rescale_data-request").start()
    return answer


def _first_answer(answers: list[Future[T]], wait_seconds: float) -> T:
    """Return the first answer to any attempt of a request; `_NoAnswerError` if none comes in ``wait_seconds``.

    Args:
        answers: Answers to all attempts so far. Earlier attempts go on, since a slow network may answer the first one. An error
            counts only if it is the error of the last attempt.
        wait_seconds: Time to wait.
    """
    deadline = time.monotonic() + wait_seconds
    while done_answers := wait(answers, max(0.0, deadline - time.monotonic()), FIRST_COMPLETED).done:
        for answer in done_answers:
            if answer.exception() is None:
                return answer.result()
        if answers[-1] in done_answers:
            return answers[-1].result()
        answers[:] = [answer for answer in answers if answer not in done_answers]
    raise _NoAnswerError(f"no answer in {wait_seconds:.1f} s")


class _NoAnswerError(TimeoutError):
    """No attempt of a request was answered before the last one timed out."""


class RequestTimes:
    """Time limits for requests, computed from the seconds that the last thousand answers took.

    A request that takes far longer is worth making again: mostly one connection stalls, not the server.
    """

    def __init__(self) -> None:
        self._seconds_per_byte: deque[float] = deque(maxlen=1000)
        self._p99_seconds_per_byte = math.inf  # seconds a byte in which 99 % of requests are answered
        self._num_answers, self._lock = 0, threading.Lock()

    def add_answer(self, num_bytes: int, seconds: float) -> None:
        """Add the seconds that the answer to a request took."""
        with self._lock:
            self._seconds_per_byte.append(seconds / (num_bytes + _OVERHEAD_BYTES))
            self._num_answers += 1
            if self._num_answers >= _MIN_ANSWERS_FOR_LIMIT and self._num_answers % _ANSWERS_PER_LIMIT == 0:
                self._p99_seconds_per_byte = sorted(self._seconds_per_byte)[int(len(self._seconds_per_byte) * 0.99)]

    def limit_seconds(self, num_bytes: int) -> float:
        """Return four times the seconds in which 99 % of requests of this size are answered, at least 50 ms.

        Until a hundred requests were answered, it is 5 s, and 1 s more for each MiB.
        """
        if self._p99_seconds_per_byte == math.inf:
            return 5.0 + num_bytes / 2**20
        return max(0.05, 4 * self._p99_seconds_per_byte * (num_bytes + _OVERHEAD_BYTES))


class RequestLimit:
    """Limit on the number of simultaneous requests, which is halved if a server asks to slow down."""

    def __init__(self, max_requests: int) -> None:
        self._max_requests = self._reduced_limit = max_requests
        self._reduced_at = -math.inf
        self._num_running, self._condition = 0, threading.Condition()

    @contextmanager
    def hold_request_slot(self) -> Generator[None]:
        """Context manager: wait until one more request is allowed, and count it as running."""
        with self._condition:
            while self._num_running >= self.num_allowed_requests:
                self._condition.wait(1.0)  # the limit grows with time
            self._num_running += 1
        try:
            yield
        finally:
            with self._condition:
                self._num_running -= 1
                self._condition.notify()

    @property
    def num_allowed_requests(self) -> int:
        """Number of requests that are allowed at once at present. It doubles each half minute after `slow_down`."""
        doublings = min(30.0, (time.monotonic() - self._reduced_at) / _LIMIT_DOUBLING_SECONDS)
        return min(self._max_requests, int(self._reduced_limit * 2**doublings))

    def slow_down(self, start_time: float) -> None:
        """Halve the limit, because the server refused a request that began at the time ``start_time``.

        Several requests that are refused together count once.
        """
        with self._condition:
            if start_time >= self._reduced_at:
                self._reduced_limit, self._reduced_at = max(1, self.num_allowed_requests // 2), time.monotonic()


def reconnected(filesystem: Any) -> Any:
    """Return a filesystem with connections and a thread of this process, not the parent's from before a fork."""
    if not isinstance(filesystem, AsyncFileSystem):
        return filesystem
    return type(filesystem)(*filesystem.storage_args, **filesystem.storage_options)


def _out_of_retries(label: str, error: Exception, attempts: int, seconds: float) -> RemoteError:
    return RemoteError(
        f"{label} could not be read in {attempts} attempts over {seconds:.1f} s; the last one: "
        f"{type(error).__name__}: {error}. Look to the network, the credentials in storage_options=, or allow more: "
        f"remote=rd.Remote(timeout=..., retries=...)."
    )


def wait_random_time(activity_name: str) -> None:
    """Wait a random time, so that ranks that start together do not send their requests at the same moment.

    The wait is at most 1 s for each 400 ranks, and at most 10 s. A process waits once for each ``activity_name``.
    """
    num_ranks = os.environ.get("WORLD_SIZE", "1")
    max_wait_seconds = min(_MAX_START_DELAY_SECONDS, (int(num_ranks) - 1) / 400 if num_ranks.isdigit() else 0.0)
    start_time = _start_times.setdefault(activity_name, time.monotonic() + random.uniform(0.0, max_wait_seconds))
    exit_event.wait(max(0.0, start_time - time.monotonic()))


@lru_cache(maxsize=64)
def _request_limit(max_requests: int, host: str) -> RequestLimit:
    """Return this process's limit on requests to one bucket or host; other buckets and hosts have limits of their own."""
    return RequestLimit(max_requests)


@lru_cache(maxsize=64)
def _request_times(host: str) -> RequestTimes:
    """Return the `RequestTimes` of one bucket or host: time limits from how long its last answers to this process took."""
    return RequestTimes()


_start_times: dict[str, float] = {}

# A forked child has no threads that send requests, and another thread of the parent may have held a lock
for _clear in (_start_times.clear, _request_limit.cache_clear, _request_times.cache_clear):
    os.register_at_fork(after_in_child=_clear)
