"""Byte ranges of files: a local file is memory-mapped, and a remote file takes one request for each range."""

from __future__ import annotations

import ctypes
import io
import mmap
import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, TypeAlias

import pyarrow as pa

_madvise = ctypes.CDLL(None).madvise
ArrowBuffer: TypeAlias = Any
"""Bytes that pyarrow keeps, mapped or copied; pyarrow has no annotations."""


class ChangedFileError(OSError, ValueError):
    """Error raised if a local file is no longer the one that was opened: its rows are not bad, they are other rows."""


class RangeReader(ABC):
    """Interface to a file that any number of threads may read at random."""

    size: int
    """Bytes of the file."""

    @abstractmethod
    def read(self, offset: int, length: int) -> ArrowBuffer:
        """Return ``length`` bytes that begin at ``offset``, fewer at the end of the file."""

    def read_many(self, ranges: Sequence[tuple[int, int]]) -> list[ArrowBuffer]:
        """Return several ranges, each given as ``(offset, length)``. A remote file requests all of them at the same time."""
        return [self.read(offset, length) for offset, length in ranges]

    def as_arrow(self) -> Any:
        """Return the whole file as an object that pyarrow can read."""
        return self.read(0, self.size)

    def release_with(self, holder: object, data: ArrowBuffer) -> None:  # noqa: B027
        """Free the memory of ``data``, which was read from this file, when the object ``holder`` is garbage-collected.

        A copy, as of a remote file, is freed with its holder in any case.
        """


class RangesFile(io.RawIOBase):
    """Read-only, unbuffered file object over byte ranges: each read call reads one range."""

    def __init__(self, range_reader: RangeReader) -> None:
        self._range_reader, self._offset = range_reader, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def size(self) -> int:
        """Return the number of bytes; pyarrow calls this."""
        return self._range_reader.size

    def tell(self) -> int:
        return self._offset

    def seek(self, offset: int, whence: int = 0) -> int:
        self._offset = offset + (0, self._offset, self._range_reader.size)[whence]
        return self._offset

    def readinto(self, buffer: Any, /) -> int:
        data = self._range_reader.read(self._offset, len(buffer))
        buffer[: data.size] = memoryview(data).cast("B")
        self._offset += data.size
        return data.size


class MappedFile(RangeReader):
    """A memory-mapped local file. Nothing is copied, and the page cache of the machine serves all of its processes."""

    def __init__(self, path: str) -> None:
        self._path, self._stat_when_mapped = path, os.stat(path)
        # The buffer keeps the mapping, but no file descriptor. An empty file cannot be mapped
        with pa.memory_map(path) if self._stat_when_mapped.st_size else pa.BufferReader(b"") as file:
            self._buffer = file.read_buffer()
        self.size: int = self._buffer.size

    def read(self, offset: int, length: int) -> ArrowBuffer:
        self._require_not_truncated()
        return self._buffer.slice(offset, max(0, min(length, self.size - offset)))

    def _require_not_truncated(self) -> None:
        """Raise `ChangedFileError` if the file became shorter since it was mapped: reading beyond its end raises SIGBUS."""
        try:
            file_stat = os.stat(self._path)
        except FileNotFoundError:  # removed: the mapping keeps the data
            return
        if file_stat.st_ino == self._stat_when_mapped.st_ino and file_stat.st_size < self._stat_when_mapped.st_size:
            raise ChangedFileError(
                f"{self._path} was cut off while it was read: it had {self._stat_when_mapped.st_size} bytes and has "
                f"{file_stat.st_size}. Write files anew under another name, and rename them."
            )

    def release_with(self, holder: object, data: ArrowBuffer) -> None:
        weakref.finalize(holder, _drop_pages, data).atexit = False


def _drop_pages(data: ArrowBuffer) -> None:
    """Release a mapped range's memory pages from this process. They stay in the page cache, and are mapped again when touched.

    Without this, all pages of a mapped file that a process ever touched count as its memory until the file is closed.
    """
    page_start = -(-data.address // mmap.PAGESIZE) * mmap.PAGESIZE
    page_stop = (data.address + data.size) // mmap.PAGESIZE * mmap.PAGESIZE
    if page_stop > page_start:
        num_bytes = ctypes.c_size_t(page_stop - page_start)
        _madvise(ctypes.c_void_p(page_start), num_bytes, ctypes.c_int(mmap.MADV_DONTNEED))
