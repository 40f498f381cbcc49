"""Byte ranges of files: a local file is mapped into memory, a remote one is read with a request for each range."""

from __future__ import annotations

import ctypes
import io
import mmap
import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cache
from typing import Any

import pyarrow as pa

from rescale_data.sources.arrow_types import ArrowBuffer


class Ranges(ABC):
    """A file, read at random by any number of threads."""

    @property
    @abstractmethod
    def size(self) -> int: ...

    @abstractmethod
    def read(self, offset: int, length: int) -> ArrowBuffer:
        """Return ``length`` bytes from ``offset`` on, fewer at the end of the file."""

    def read_many(self, places: Sequence[tuple[int, int]]) -> list[ArrowBuffer]:
        """Return several ranges, each given as ``(offset, length)``. Of a remote file they are requested at the same time."""
        return [self.read(offset, length) for offset, length in places]

    @abstractmethod
    def whole(self) -> Any:
        """Return the file in a form that pyarrow reads."""

    def release_with(self, user: object, data: ArrowBuffer) -> None:
        """Free the memory of ``data``, which was read, when ``user`` is collected."""
        del user, data  # a copy is freed with its holder


class AsFile(io.RawIOBase):
    """File object of `Ranges`, read-only and unbuffered: each read reads one range."""

    def __init__(self, ranges: Ranges) -> None:
        self._ranges, self._at = ranges, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def size(self) -> int:
        """Return the number of bytes; pyarrow calls this."""
        return self._ranges.size

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._ranges.size)[whence]
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        data = self._ranges.read(self._at, len(buffer))
        buffer[: data.size] = memoryview(data).cast("B")
        self._at += data.size
        return data.size


class Mapped(Ranges):
    """A mapped local file. Nothing is copied, and the page cache of the machine serves all of its processes."""

    def __init__(self, path: str) -> None:
        self._path, self._found = path, os.stat(path)
        if not self._found.st_size:  # there is nothing to map
            self._buffer = pa.py_buffer(b"")
            return
        with pa.memory_map(path) as file:  # the buffer keeps the mapping, but no file descriptor
            self._buffer = file.read_buffer()

    @property
    def size(self) -> int:
        return self._buffer.size

    def read(self, offset: int, length: int) -> ArrowBuffer:
        self._require_whole()
        return self._buffer.slice(offset, max(0, min(length, self.size - offset)))

    def whole(self) -> Any:
        self._require_whole()
        return self._buffer

    def _require_whole(self) -> None:
        """Raise ``OSError`` if the file was truncated since it was mapped: reading beyond its end would raise SIGBUS."""
        try:
            now = os.stat(self._path)
        except FileNotFoundError:  # removed: the mapping keeps the data
            return
        if now.st_ino == self._found.st_ino and now.st_size < self._found.st_size:
            raise OSError(
                f"{self._path} was cut off while it was read: it had {self._found.st_size} bytes and has {now.st_size}. "
                f"Write files anew under another name, and rename them."
            )

    def release_with(self, user: object, data: ArrowBuffer) -> None:
        weakref.finalize(user, _drop_pages, data).atexit = False


def _drop_pages(data: ArrowBuffer) -> None:
    """Unload the whole pages of a mapped range. They stay in the page cache, and are mapped again if they are touched again.

    Without this, all pages of a mapped file that a process ever touched count as its memory until the file is closed.
    """
    advise, dont_need = _madvise(), getattr(mmap, "MADV_DONTNEED", None)
    start = -(-data.address // mmap.PAGESIZE) * mmap.PAGESIZE
    stop = (data.address + data.size) // mmap.PAGESIZE * mmap.PAGESIZE
    if advise is not None and dont_need is not None and stop > start:
        advise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), ctypes.c_int(dont_need))


@cache
def _madvise() -> Any:
    return getattr(ctypes.CDLL(None), "madvise", None)
