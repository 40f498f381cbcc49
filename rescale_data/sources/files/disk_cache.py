"""`DiskCache`: ranges of remote files on a local disk, shared by all processes of a machine, with a bound.

Each range is a file of its own, written aside and renamed. Of several processes that miss the same range one fetches it, and
the others wait. What was not used for longest is deleted first, by whoever has written enough to look: also files aside, which
killed processes leave. What could not be kept is fetched again when it is wanted: a cache never ends a run.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from rescale_data.sources.files.once import write_aside

_log = logging.getLogger(__name__)
_OWN = "rescale_data-ranges"  # what else lies in the user's folder is not ours to delete
_LOCKS = os.path.join(tempfile.gettempdir(), f"rescale_data-{os.getuid()}-ranges")
_LOOK_AFTER = 64  # of the bound, in what one process has written
_FULL, _TRIMMED = 7 / 8, 3 / 4


class DiskCache:
    """One folder.

    Args:
        folder: Made where it is missing. What lies there is this class's own, in a folder in it.
        max_bytes: What may lie there.

    Raises:
        ValueError: There can be no such folder.
    """

    def __init__(self, folder: str, max_bytes: int) -> None:
        self._folder, self.max_bytes = os.path.join(folder, _OWN), max_bytes
        self._told = False
        self._written = max_bytes  # look at once: others may have left much
        try:
            os.makedirs(self._folder, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"cache_dir={folder!r} cannot be used: {error}. Give a folder that may be written to."
            ) from error

    def read(self, name: str, length: int, fetch: Callable[[], bytes]) -> bytes:
        """The bytes called ``name``, fetched where they are not there."""
        path = self._path(name)
        data = _read(path, length)
        if data is not None:
            return data
        with self._alone(path):
            data = _read(path, length)  # another process may have brought it
            if data is not None:
                return data
            data = fetch()
            if length <= self.max_bytes // 8:
                self._keep(path, data)
        return data

    @contextmanager
    def _alone(self, path: str) -> Generator[None]:
        """Hold the lock of this range, and of few others, on this machine; where there can be none, go on without."""
        number = hashlib.blake2b(path.encode(), digest_size=20).hexdigest()[:3]
        try:
            os.makedirs(_LOCKS, mode=0o700, exist_ok=True)
            if os.stat(_LOCKS).st_uid != os.getuid():
                raise PermissionError("another user has made it")
            lock = os.open(os.path.join(_LOCKS, number), os.O_CREAT | os.O_RDWR, 0o600)
        except OSError:
            yield
            return
        _held.add(lock)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            fcntl.flock(
                lock, fcntl.LOCK_UN
            )  # a child that was forked meanwhile has the lock as well, until it is undone
            _held.discard(lock)
            os.close(lock)

    def _keep(self, path: str, data: bytes) -> None:
        try:
            if self._written + len(data) > self.max_bytes // _LOOK_AFTER:
                self._trim()
                self._written = 0
            self._written += len(data)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            write_aside(path, lambda aside: Path(aside).write_bytes(data))
        except FileNotFoundError:
            pass  # another process, short of room, deleted the file aside
        except OSError as error:
            self._tell(error)

    def _tell(self, error: OSError) -> None:
        """Say once that reading goes on without what could not be written, as on a full disk."""
        if not self._told:
            _log.warning(
                "cache_dir %s keeps nothing more: %s. Ranges are fetched each time they are read.", self._folder, error
            )
        self._told = True

    def _trim(self) -> None:
        """Delete the oldest files where the folder is nearly full."""
        found: list[tuple[float, int, str]] = []
        for folder, _, names in os.walk(self._folder):
            for name in names:
                with suppress(FileNotFoundError):
                    info = os.stat(path := os.path.join(folder, name))
                    found.append((info.st_mtime, info.st_size, path))
        total = sum(size for _, size, _ in found)
        if total <= self.max_bytes * _FULL:
            return
        for _, size, path in sorted(found):
            if total <= self.max_bytes * _TRIMMED:
                return
            with suppress(FileNotFoundError):
                os.unlink(path)
            total -= size

    def _path(self, name: str) -> str:
        key = hashlib.blake2b(name.encode(), digest_size=20).hexdigest()
        return os.path.join(self._folder, key[:2], key)


def _read(path: str, length: int) -> bytes | None:
    """Return the bytes of a file; `None` where it is not whole: another process may have deleted it, or let nobody read it."""
    with suppress(OSError):
        with open(path, "rb") as file:
            data = file.read()
        if len(data) == length:
            with suppress(OSError):
                os.utime(path)
            return data
    return None


_caches: dict[str, DiskCache] = {}
_held: set[int] = set()


def _renew() -> None:
    """Close what a forked child has of its parent's locks: it would hold them after the parent was killed."""
    for lock in _held:
        os.close(lock)
    _held.clear()


os.register_at_fork(after_in_child=_renew)


def disk_cache(folder: str, max_bytes: int) -> DiskCache:
    """Return the cache of this process in a folder."""
    found = _caches.get(folder)
    if found is None or found.max_bytes != max_bytes:
        found = _caches[folder] = DiskCache(folder, max_bytes)
    return found
