"""`LocalStore`: ranges, decompressed blocks and pieces of fragments on a local disk, shared by all processes of a machine.

Each entry is a read-only file: its data and their CRC-32. It is written under another name and renamed, and mapped by its
readers. Its modification time is when it was written, its access time when it was last used. If several processes miss the
same range, one fetches it and the others wait. When the store is nearly full, entries that were not used for longest are
deleted first, by a process that has written much since it last looked. Files that killed processes left are deleted, too.
Data that cannot be kept is read again when it is needed: a store never ends a run.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import time
import zlib
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import Any

import pyarrow as pa

from rescale_data.sources.files.once import write_atomically
from rescale_data.sources.files.ranges import ArrowBuffer

_log = logging.getLogger(__name__)
_ENTRIES_FOLDER = "rescale_data-1"  # 1: version of the entries; other files in the user's folder are never deleted
_TRIM_DIVISOR = 64  # a process looks for entries to delete after it has written 1/64 of the bound
_FULL_FRACTION, _TRIMMED_FRACTION = 7 / 8, 3 / 4
_CHECKSUM_BYTES = 4
_ACCESS_TIME_SECONDS = 1.0  # an access time is exact to this, so that most reads do not write it
_MAX_VERIFIED_ENTRIES = 2**17  # about 10 MB
_MOUNTS = "/proc/mounts"
_SHARED_FILESYSTEMS = ("nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph")


class LocalStore:
    """Cache in one folder of a local disk. `local_store_for` returns the instance that this whole process shares.

    Args:
        folder: The folder, made if it is missing. Entries are in a folder of their own below it.
        max_bytes: Bound on the bytes of all entries, of all processes. An entry of more than an eighth of it is not kept.

    Raises:
        ValueError: The folder is on a file system that hosts share: locks and times of use are not reliable there.
    """

    def __init__(self, folder: str, max_bytes: int) -> None:
        self._given_folder, self._folder, self.max_bytes = folder, os.path.join(folder, _ENTRIES_FOLDER), max_bytes
        self._has_warned = self._is_disabled = False
        self._verified: set[int] = set()  # hashes of inode, time of writing and size: files whose checksum was verified
        self._bytes_since_trim = max_bytes  # look at the first write: other processes may have left much
        if (kind := _filesystem_type(folder)) in _SHARED_FILESYSTEMS:
            raise ValueError(f"cache_dir={folder!r} is on {kind}, which hosts share. Give one on a disk of this host.")
        try:
            os.makedirs(self._folder, exist_ok=True)
            if os.stat(self._folder).st_uid != os.getuid():
                raise PermissionError(f"another user has made {self._folder}")
        except OSError as error:
            self._is_disabled = True
            self._warn(error)

    def __reduce__(self) -> tuple[Callable[[str, int], LocalStore], tuple[str, int]]:
        return local_store_for, (self._given_folder, self.max_bytes)

    def read(self, name: str, fetch: Callable[[], Any]) -> ArrowBuffer:
        """Return the entry called ``name``. If it is missing, call ``fetch`` for its bytes and write them to the disk."""
        if self._is_disabled:
            return pa.py_buffer(fetch())
        if (data := self.get(name)) is not None:
            return data
        path = self._path(name)
        with self._hold_lock(path):
            if (data := self.get(name)) is None:  # another process may have brought it
                self._write_entry(path, data := pa.py_buffer(fetch()))
        return data

    def get(self, name: str) -> ArrowBuffer | None:
        """Return the entry called ``name``, memory-mapped; `None` if it is missing or damaged."""
        path = self._path(name)
        if self._is_disabled:
            return None
        try:
            entry_stat = os.stat(path)
        except OSError:
            return None
        data = _map_file(path)
        version = hash((entry_stat.st_ino, entry_stat.st_mtime_ns, data.size))
        if version not in self._verified:
            if not _has_valid_checksum(data):
                with suppress(OSError):
                    os.unlink(path)
                return None
            if len(self._verified) >= _MAX_VERIFIED_ENTRIES:
                self._verified.clear()
            self._verified.add(version)
        if time.time() - entry_stat.st_atime > _ACCESS_TIME_SECONDS:
            with suppress(OSError):
                os.utime(path, ns=(time.time_ns(), entry_stat.st_mtime_ns))
        return data.slice(0, data.size - _CHECKSUM_BYTES)

    def put(self, name: str, data: ArrowBuffer) -> None:
        """Write the entry called ``name`` if it is missing."""
        path = self._path(name)
        if not self._is_disabled and not os.path.exists(path):
            self._write_entry(path, data)

    @contextmanager
    def _hold_lock(self, path: str) -> Generator[None]:
        """Context manager: hold the lock of an entry's folder, one of 4,096; no lock if the folder cannot be made."""
        folder = os.path.dirname(path)
        try:
            os.makedirs(folder, exist_ok=True)
            lock_file = os.open(folder, os.O_RDONLY)
        except OSError:
            yield
            return
        _held_locks.add(lock_file)
        try:
            with suppress(OSError):  # a file system may have no locks
                fcntl.flock(lock_file, fcntl.LOCK_EX)
            yield
        finally:
            with suppress(OSError):
                fcntl.flock(lock_file, fcntl.LOCK_UN)  # otherwise a child that was forked meanwhile would hold it, too
            _held_locks.discard(lock_file)
            os.close(lock_file)

    def _write_entry(self, path: str, data: ArrowBuffer) -> None:
        if data.size > self.max_bytes // 8:
            return
        try:
            if self._bytes_since_trim + data.size > self.max_bytes // _TRIM_DIVISOR:
                self._trim_entries()
                self._bytes_since_trim = 0
            self._bytes_since_trim += data.size
            os.makedirs(os.path.dirname(path), exist_ok=True)
            write_atomically(path, lambda temporary: _write(temporary, data))
        except FileNotFoundError:
            pass  # another process, short of room, deleted the file before it was renamed
        except OSError as error:
            self._warn(error)

    def _warn(self, error: OSError) -> None:
        """Log a warning, once, that the store keeps no further data because of an error, such as a full disk."""
        if not self._has_warned:
            _log.warning(
                "cache_dir %s keeps nothing more: %s. Files are read and decoded again each time they are needed. Free space "
                "there, or give another local folder.", self._given_folder, error,
            )  # fmt: skip
        self._has_warned = True

    def _trim_entries(self) -> None:
        """Delete the entries that were not used for the longest time, if the folder is nearly full."""
        entries: list[tuple[float, int, str]] = []
        for folder, _, names in os.walk(self._folder):
            for name in names:
                with suppress(FileNotFoundError):
                    entry_stat = os.stat(path := os.path.join(folder, name))
                    entries.append((entry_stat.st_atime, entry_stat.st_size, path))
        total_bytes = sum(size for _, size, _ in entries)
        if total_bytes <= self.max_bytes * _FULL_FRACTION:
            return
        for _, size, path in sorted(entries):
            if total_bytes <= self.max_bytes * _TRIMMED_FRACTION:
                return
            with suppress(FileNotFoundError):
                os.unlink(path)
            total_bytes -= size

    def _path(self, name: str) -> str:
        name_digest = hashlib.blake2b(name.encode(), digest_size=20).hexdigest()
        return os.path.join(self._folder, name_digest[:3], name_digest)


def _filesystem_type(folder: str) -> str:
    """Return the type of the file system that a folder is on, such as "nfs"; empty if it is not known."""
    path, nearest_mount = os.path.realpath(folder), ("", "")
    with suppress(OSError), open(_MOUNTS) as mounts:
        for _, mount_point, filesystem_type, *_ in map(str.split, mounts):
            if len(mount_point) >= len(nearest_mount[0]) and os.path.commonpath([mount_point, path]) == mount_point:
                nearest_mount = mount_point, filesystem_type
    return nearest_mount[1]


def _map_file(path: str) -> ArrowBuffer:
    """Return the bytes of a file, memory-mapped; none if the file is missing or empty."""
    try:
        with pa.memory_map(path) as file:  # the mapping outlives the file, even its deletion
            return file.read_buffer()
    except (OSError, pa.ArrowInvalid):
        return pa.py_buffer(b"")


def _write(path: str, data: ArrowBuffer) -> None:
    with open(path, "wb") as file:
        file.write(memoryview(data))
        file.write(zlib.crc32(data).to_bytes(_CHECKSUM_BYTES, "little"))
        os.fchmod(file.fileno(), 0o400)  # read-only: truncated while mapped, it would end readers by SIGBUS


def _has_valid_checksum(data: ArrowBuffer) -> bool:
    """True if a file ends with the correct checksum of its data."""
    size = max(0, data.size - _CHECKSUM_BYTES)
    return data.slice(size).to_pybytes() == zlib.crc32(data.slice(0, size)).to_bytes(_CHECKSUM_BYTES, "little")


_stores: dict[str, LocalStore] = {}
_held_locks: set[int] = set()


def _reset_after_fork() -> None:
    """Close the parent's lock files in a forked child, which would otherwise keep the locks after the parent's death."""
    for lock_file in _held_locks:
        os.close(lock_file)
    _held_locks.clear()


os.register_at_fork(after_in_child=_reset_after_fork)


def local_store_for(folder: str, max_bytes: int) -> LocalStore:
    """Return this process's store for a folder, created on first use; its bound is the largest that was requested."""
    store = _stores.get(folder)
    if store is None:
        store = _stores[folder] = LocalStore(folder, max_bytes)
    store.max_bytes = max(store.max_bytes, max_bytes)
    return store
