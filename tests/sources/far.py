"""Local files as if they were far away: requests are counted, wait for one another, stall and fail as a test says."""

import os
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

from fsspec.implementations.local import LocalFileSystem


class Far(LocalFileSystem):
    """Local files, as ``far://<path>``.

    Attributes:
        asked: Number of requests, by the name of the file of which bytes are asked for, or by "ls" and "info".
        num_bytes: Number of bytes that were asked for.
        together: So many requests for bytes are answered together, if so many come.
        most_at_once: Requests for bytes that were under way at once, at most.
        failures: What the next requests for bytes raise.
        unknown: Ends of paths that cannot be listed or looked at, once each.
        stall: Called in each request for bytes.
    """

    protocol = "far"
    cachable = False
    asked: ClassVar[Counter[str]] = Counter()
    num_bytes: ClassVar[int] = 0
    together: ClassVar[int] = 1
    at_once: ClassVar[int] = 0
    most_at_once: ClassVar[int] = 0
    failures: ClassVar[list[Exception]] = []
    unknown: ClassVar[list[str]] = []
    stall: ClassVar[Callable[[], object]] = int
    lock: ClassVar[threading.Condition] = threading.Condition()

    @classmethod
    def forget(cls) -> None:
        cls.asked.clear()
        cls.num_bytes, cls.together, cls.most_at_once, cls.stall = 0, 1, 0, int
        cls.failures, cls.unknown = [], []

    @classmethod
    def requests(cls) -> int:
        """Return the number of requests for bytes."""
        return sum(count for name, count in cls.asked.items() if name not in ("ls", "info"))

    def _look(self, kind: str, path: Any) -> None:
        Far.asked[kind] += isinstance(path, str)  # else it is of a listing
        end = next((end for end in Far.unknown if os.fspath(path).rstrip("/").endswith(end)), None)
        if end is not None:
            Far.unknown.remove(end)
            raise OSError("503 slow down")

    def ls(self, path: str, detail: bool = False, **kwargs: Any) -> Any:
        self._look("ls", path)
        return super().ls(path, detail, **kwargs)

    def info(self, path: str, **kwargs: Any) -> Any:
        self._look("info", path)
        return super().info(path, **kwargs)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        with Far.lock:
            Far.asked[os.path.basename(path)] += 1
            Far.at_once += 1
            Far.most_at_once = max(Far.at_once, Far.most_at_once)
            failure = Far.failures.pop(0) if Far.failures else None
            Far.lock.notify_all()
            Far.lock.wait_for(lambda: Far.most_at_once >= Far.together, timeout=60)
            Far.at_once -= 1
        Far.stall()
        if failure is not None:
            raise failure
        data = super().cat_file(path, start, end, **kwargs)
        with Far.lock:
            Far.num_bytes += len(data)
        return data
