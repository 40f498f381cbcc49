"""Ranges of bytes as a file that Python and pyarrow read."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rescale_data.sources.files.ranges import Ranges


class AsFile(io.RawIOBase):
    """Read-only and unbuffered: each read is one of the ranges."""

    def __init__(self, ranges: Ranges) -> None:
        self._ranges, self._at = ranges, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def size(self) -> int:
        """As pyarrow asks for it."""
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
