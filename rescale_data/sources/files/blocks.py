"""Random access to compressed files, by a copy whose blocks are each compressed on their own.

    block | block | ... | int64[B + 1] | int64[B + 1] | int64[B] | int64 B | int64 checksum | "RDBLOCK2"

B is the number of blocks. The arrays hold the byte at which each block begins and the last one ends, in the decompressed file
and in the copy, and the checksum (CRC-32) of each block. The last checksum is that of the arrays and B.
"""

from __future__ import annotations

import bisect
import errno
import io
import zlib
from collections.abc import Iterator
from functools import partial
from typing import Any, cast

import numpy as np
import pyarrow as pa

from rescale_data.sources.arrow_types import ArrowBuffer
from rescale_data.sources.files.local_store import LocalStore
from rescale_data.sources.files.ranges import MappedFile, RangeReader

BLOCK_BYTES = 2**20
_MAGIC = b"RDBLOCK2"
CODECS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}


class BlockRangeReader(RangeReader):
    """Byte ranges of a compressed file's content, read from a copy in blocks; ``ValueError`` if the copy is incomplete.

    Args:
        path: Path of the copy.
        store: Store for blocks that were decompressed; `None` to keep none.
    """

    def __init__(self, path: str, store: LocalStore | None = None) -> None:
        self._store = store
        self._file, self._codec = MappedFile(path), pa.Codec("zstd")
        copy_tail = self._file.read(max(0, self._file.size - 24), 24).to_pybytes().rjust(24, b"\0")
        num_offsets, checksum = int.from_bytes(copy_tail[:8], "little") + 1, int.from_bytes(copy_tail[8:16], "little")
        table_offset = self._file.size - 24 * num_offsets - 16
        table_bytes = self._file.read(max(0, table_offset), 24 * num_offsets)
        if copy_tail[16:] != _MAGIC or table_offset < 0 or zlib.crc32(table_bytes) != checksum:
            raise ValueError(f"{path} is not whole")
        table = np.frombuffer(table_bytes, dtype=np.int64)
        self._content_offsets, self._copy_offsets = table[: 2 * num_offsets].reshape(2, -1)
        self._checksums = table[2 * num_offsets : -1]
        # A copy that was made again has other blocks, if the file has changed.
        self._path, self._store_key_prefix = path, f"{path}|{checksum}"

    @property
    def size(self) -> int:
        return int(self._content_offsets[-1])

    def read(self, offset: int, length: int) -> ArrowBuffer:
        offsets = self._content_offsets
        stop = min(offset + length, self.size)
        if stop <= offset:
            return pa.py_buffer(b"")
        first_block = bisect.bisect_right(cast(Any, offsets), offset) - 1
        stop_block = bisect.bisect_left(cast(Any, offsets), stop)
        blocks = [self._read_block(block) for block in range(first_block, stop_block)]
        content = blocks[0] if len(blocks) == 1 else pa.py_buffer(b"".join(blocks))
        content_offset = int(offsets[first_block])
        return content.slice(offset - content_offset, stop - offset)

    def as_arrow(self) -> Any:
        return self.read(0, self.size)

    def _read_block(self, block: int) -> ArrowBuffer:
        if self._store is None:
            return self._decompress(block)
        return self._store.read(f"{self._store_key_prefix}|{block}", partial(self._decompress, block))

    def _decompress(self, block: int) -> ArrowBuffer:
        start, stop = self._copy_offsets[block : block + 2].tolist()
        size = int(self._content_offsets[block + 1] - self._content_offsets[block])
        compressed_block = self._file.read(start, stop - start)
        if zlib.crc32(compressed_block) != self._checksums[block]:
            raise OSError(
                errno.EIO, "a block was changed on the disk: delete the file, and it is written anew", self._path
            )
        return self._codec.decompress(compressed_block, size)


def codec_of(file_name: str) -> str | None:
    """Return the compression codec that a file's name shows; `None` if the file is not compressed."""
    return next((codec for suffix, codec in CODECS.items() if file_name.endswith(suffix)), None)


def write_blocks(chunks: Iterator[bytes], path: str) -> None:
    """Write chunks of bytes to a file for `BlockRangeReader`; each chunk is compressed as a block of its own."""
    codec, offsets, copy_offsets, checksums = pa.Codec("zstd"), [0], [0], list[int]()
    with open(path, "wb") as file:
        for chunk in chunks:
            compressed_chunk = codec.compress(chunk, asbytes=True)
            file.write(compressed_chunk)
            offsets.append(offsets[-1] + len(chunk))
            copy_offsets.append(copy_offsets[-1] + len(compressed_chunk))
            checksums.append(zlib.crc32(compressed_chunk))
        table_bytes = np.array([*offsets, *copy_offsets, *checksums, len(checksums)], dtype=np.int64).tobytes()
        file.write(table_bytes + zlib.crc32(table_bytes).to_bytes(8, "little") + _MAGIC)


def decompress_chunks(stream: Any, codec: str) -> Iterator[bytes]:
    """Yield the decompressed bytes of a file, in chunks of `BLOCK_BYTES`; the last one may be shorter."""
    with pa.CompressedInputStream(stream, codec) as file:
        reader = io.BufferedReader(file, BLOCK_BYTES)  # pyarrow may return fewer bytes than requested
        while chunk := reader.read(BLOCK_BYTES):
            yield chunk
