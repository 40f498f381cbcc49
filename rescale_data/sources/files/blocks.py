"""Random access into what a compressed file holds: a copy of it in blocks, each compressed on its own."""

from __future__ import annotations

import bisect
import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pyarrow as pa

from rescale_data.sources.arrow_types import ArrowBuffer
from rescale_data.sources.files.ranges import Mapped, Ranges
from rescale_data.state import Ints

BLOCK_BYTES = 2**20
CODECS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}


@dataclass(frozen=True)
class BlockTable:
    """The beginnings of blocks, ``int64[B + 1]`` each: among the bytes they stand for, and in the copy."""

    raw: Ints
    stored: Ints


class BlockRanges(Ranges):
    """The bytes that a copy in blocks stands for."""

    def __init__(self, path: str, table: BlockTable) -> None:
        self._copy, self._table = Mapped(path), table
        self._codec = pa.Codec("zstd")

    @property
    def size(self) -> int:
        return int(self._table.raw[-1])

    def read(self, offset: int, length: int) -> ArrowBuffer:
        raw = self._table.raw
        stop = min(offset + length, self.size)
        if stop <= offset:
            return pa.py_buffer(b"")
        first = bisect.bisect_right(cast(Any, raw), offset) - 1
        last = bisect.bisect_left(cast(Any, raw), stop)
        whole = b"".join([self._block(block) for block in range(first, last)])
        begin = int(raw[first])
        return pa.py_buffer(whole).slice(offset - begin, stop - offset)

    def whole(self) -> Any:
        return self.read(0, self.size)

    def _block(self, block: int) -> bytes:
        table = self._table
        start, stop = table.stored[block : block + 2].tolist()
        size = int(table.raw[block + 1] - table.raw[block])
        return self._codec.decompress(self._copy.read(start, stop - start), size, asbytes=True)


def codec_of(name: str) -> str | None:
    """Return the compression of a file, by its name; `None` for none."""
    return next((codec for suffix, codec in CODECS.items() if name.endswith(suffix)), None)


def write_blocks(chunks: Iterator[bytes], path: str) -> BlockTable:
    """Write the copy."""
    codec, raw, stored = pa.Codec("zstd"), [0], [0]
    with open(path, "wb") as file:
        for chunk in chunks:
            data = codec.compress(chunk, asbytes=True)
            file.write(data)
            raw.append(raw[-1] + len(chunk))
            stored.append(stored[-1] + len(data))
    return BlockTable(np.array(raw, dtype=np.int64), np.array(stored, dtype=np.int64))


def decompressed(stream: Any, codec: str) -> Iterator[bytes]:
    """Decompress a file, in pieces of `BLOCK_BYTES` but for the last."""
    with pa.CompressedInputStream(stream, codec) as file:
        whole = io.BufferedReader(file, BLOCK_BYTES)  # pyarrow returns less than was asked for
        while chunk := whole.read(BLOCK_BYTES):
            yield chunk
