"""How files behind URLs are read: a request a range, asked for again where it fails, and kept on disk where that is wanted."""

from __future__ import annotations

import math
import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa

from rescale_data.errors import checks_kinds
from rescale_data.sources.arrow_types import ArrowBuffer
from rescale_data.sources.counts import REQUEST_BYTES, RETRIES, counts
from rescale_data.sources.decoded.ahead import leaving
from rescale_data.sources.files.disk_cache import DiskCache, disk_cache
from rescale_data.sources.files.gate import Gate
from rescale_data.sources.files.hedge import Hedge
from rescale_data.sources.files.ranges import AsFile, Ranges

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

T = TypeVar("T")

_REQUESTS_AT_ONCE = 16
_SMALL = 2**16
_LONGEST_PAUSE = 30.0
_LONGEST_START = 10.0
_SLOW_DOWN = ("SlowDown", "Slow Down", "SLOW_DOWN", "503", "429", "TooManyRequests")
_PERMANENT = (
    FileNotFoundError,
    PermissionError,
    IsADirectoryError,
    NotADirectoryError,
    NotImplementedError,
    AttributeError,
    KeyError,
    TypeError,
    ValueError,
)


@checks_kinds
@dataclass(frozen=True, kw_only=True)
class Remote:
    """How files behind URLs are read.

    Args:
        retries: How often a request that failed is made again, unless there is no such file or no permission.
        backoff_seconds: Pause before the second attempt; each further one is twice as long, up to half a minute.
        deadline_seconds: For one range of one file, all attempts together.
        hedge_after: A request that takes longer than 99 % of those before is made a second time, and the first answer wins; so
            many seconds hold before a hundred have been answered. One request in fifty at most is made twice. `None`: never.
        max_requests: How many requests the processes of this user on this machine make at once. Half as many to a bucket or
            host after an answer of it that asks to slow down (503, 429); then more again, twice as many each half minute.
        cache_dir: A local folder to keep what was read in, shared by the processes of a machine; `None` for none.
        cache_dir_bytes: What may lie there; the ranges that were not used for longest go first, and one of more than an eighth
            of it is not kept.
        read_ahead: Whether to ask in the background for what will be needed next, where ``cache_bytes`` has room for it.

    Raises:
        ValueError: A number is out of range.

    Example:
        >>> import rescale_data as rd
        >>> remote = rd.Remote(retries=8, max_requests=64)  # rd.ParquetSource("s3://bucket/data", remote=remote)
        >>> remote.retries
        8
    """

    retries: int = 5
    backoff_seconds: float = 0.5
    deadline_seconds: float = 600.0
    hedge_after: float | None = 5.0
    max_requests: int = 256
    cache_dir: str | os.PathLike[str] | None = None
    cache_dir_bytes: int = 2**36
    read_ahead: bool = True

    def __post_init__(self) -> None:
        if self.retries < 0 or self.backoff_seconds < 0 or self.cache_dir_bytes < 1:
            raise ValueError(
                f"rd.Remote(retries={self.retries}, backoff_seconds={self.backoff_seconds}, cache_dir_bytes="
                f"{self.cache_dir_bytes}): retries and backoff_seconds are at least 0, cache_dir_bytes at least 1."
            )
        if not 0 < self.deadline_seconds < math.inf or self.max_requests < 1:
            raise ValueError(
                f"rd.Remote(deadline_seconds={self.deadline_seconds}, max_requests={self.max_requests}): give a time above 0, "
                f"and at least 1 request."
            )
        if self.hedge_after is not None and not 0 < self.hedge_after < self.deadline_seconds:
            raise ValueError(
                f"rd.Remote(hedge_after={self.hedge_after}, deadline_seconds={self.deadline_seconds}): a second request helps "
                f"before the deadline only. Give hedge_after between 0 and deadline_seconds, or None for no second request."
            )

    @property
    def kept(self) -> DiskCache | None:
        """What this process keeps in ``cache_dir``; ``ValueError`` where that can be no folder."""
        return None if self.cache_dir is None else disk_cache(os.fspath(self.cache_dir), self.cache_dir_bytes)


class RemoteError(OSError):
    """A file could not be read, although that was tried again and again; the message has its URL."""


class RemoteFile(Ranges):
    """A file of an fsspec filesystem, read a range at a time, by any number of threads.

    Args:
        filesystem: Of fsspec.
        path: In it.
        size: Bytes; `None` to ask.
        stamp: What changes when the file does.
        remote: How to read it.
    """

    def __init__(
        self, filesystem: AbstractFileSystem, path: str, remote: Remote, size: int | None = None, stamp: str = ""
    ) -> None:
        self._filesystem: Any = filesystem
        self._path, self._remote, self._stamp = path, remote, stamp
        self.url: str = self._filesystem.unstrip_protocol(path)
        self._size = size if size is not None else int(self._try(lambda: self._filesystem.info(path)["size"]))
        self._window: tuple[int, ArrowBuffer] = (0, pa.py_buffer(b""))

    @property
    def size(self) -> int:
        return self._size

    def read(self, offset: int, length: int) -> ArrowBuffer:
        """The bytes from ``offset`` on, less where the file ends. Small reads near each other are one request."""
        length = max(0, min(length, self.size - offset))
        begin, window = self._window
        if not begin <= offset <= offset + length <= begin + window.size:
            if length >= _SMALL:
                return self._range(offset, length)
            begin, window = self._window = offset, self._range(offset, min(_SMALL, self.size - offset))
        return window.slice(offset - begin, length)

    def read_many(self, places: Sequence[tuple[int, int]]) -> list[ArrowBuffer]:
        """Several ranges, asked for at the same time."""
        offsets, lengths = [offset for offset, _ in places], [length for _, length in places]
        return list(_pool().map(self._range, offsets, lengths))

    def whole(self) -> Any:
        """The file as pyarrow takes it."""
        return pa.PythonFile(AsFile(self), mode="r")

    def _range(self, offset: int, length: int) -> ArrowBuffer:
        def request() -> bytes:
            data = self._filesystem.cat_file(self._path, start=offset, end=offset + length)
            if len(data) != length:
                raise OSError(f"{len(data)} bytes arrived of {length} at {offset}")
            counts().add(REQUEST_BYTES, length)
            return data

        def fetch() -> bytes:
            spread_out("reading")
            return self._try(request)

        if not length:
            return pa.py_buffer(b"")
        kept = self._remote.kept
        if kept is None:
            return pa.py_buffer(fetch())
        name = f"{self.url}|{self.size}|{self._stamp}|{offset}|{length}"
        return pa.py_buffer(kept.read(name, length, fetch))

    def _try(self, work: Callable[[], T]) -> T:
        return attempt(self._remote, self.url, work, self._remote.hedge_after)


def attempt(remote: Remote, url: str, work: Callable[[], T], hedge_after: float | None = None) -> T:
    """What ``work`` returns, tried again and again where it fails for a reason that may pass, until the deadline.

    Args:
        hedge_after: See `Remote`; `None` for work that is not done twice.
    """
    started = time.monotonic()
    gate = _gate(remote.max_requests, "/".join(url.split("/")[:3]))

    def admitted() -> T:
        with gate.enter() as since:
            try:
                return work()
            except Exception as error:
                if _asks_to_slow_down(error):
                    gate.slow_down(since)
                raise

    for number in range(remote.retries + 1):
        left = started + remote.deadline_seconds - time.monotonic()
        try:
            return _hedge.call(admitted, hedge_after, left)
        except Exception as error:
            if isinstance(error, _PERMANENT):
                raise
            pause = _pause(remote.backoff_seconds, number)
            seconds = time.monotonic() - started
            if number == remote.retries or leaving.is_set() or seconds + pause >= remote.deadline_seconds:
                raise _spent(url, error, number + 1, seconds) from error
        counts().add(RETRIES, 1)
        leaving.wait(pause)
    raise AssertionError


def _asks_to_slow_down(error: Exception) -> bool:
    return any(mark in f"{type(error).__name__} {error}" for mark in _SLOW_DOWN)


def _spent(url: str, error: Exception, attempts: int, seconds: float) -> RemoteError:
    return RemoteError(
        f"{url} could not be read in {attempts} attempts over {seconds:.1f} s; the last one: "
        f"{type(error).__name__}: {error}. Look to the network, the credentials in storage_options=, or allow more: "
        f"remote=rd.Remote(retries=..., backoff_seconds=..., deadline_seconds=...)."
    )


def _pause(backoff: float, attempt: int) -> float:
    """Between a half and the whole of a time that doubles, so that ranks do not come back all at once."""
    return min(_LONGEST_PAUSE, backoff * 2**attempt) * random.uniform(0.5, 1.0)


def spread_out(what: str) -> None:
    """Ranks that start together do not ask together: wait, once in a process, up to a second for each 400 of them."""
    ranks = os.environ.get("WORLD_SIZE", "1")
    longest = min(_LONGEST_START, (int(ranks) - 1) / 400 if ranks.isdigit() else 0.0)
    with _lock:
        begin = _begin.setdefault(what, time.monotonic() + random.uniform(0.0, longest))
    leaving.wait(max(0.0, begin - time.monotonic()))


_begin: dict[str, float] = {}
_hedge = Hedge()
_gate = lru_cache(maxsize=16)(Gate)
_lock = threading.Lock()
_requests: ThreadPoolExecutor | None = None


def _pool() -> ThreadPoolExecutor:
    global _requests
    with _lock:
        if _requests is None:
            _requests = ThreadPoolExecutor(_REQUESTS_AT_ONCE, thread_name_prefix="rescale_data-requests")
        return _requests


def _renew() -> None:
    """A forked child has no thread, and the lock may have been held."""
    global _requests, _lock, _hedge, _begin
    _requests, _lock, _hedge, _begin = None, threading.Lock(), Hedge(), {}


os.register_at_fork(after_in_child=_renew)
