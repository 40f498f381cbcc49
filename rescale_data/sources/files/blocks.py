"""Random access to compressed files, by a copy whose blocks are each compressed on their own.

    block | block | ... | int64[B + 1] | int64[B] | int64 size | int64 block size | int64 B | int64 checksum | "RDBLOCK3"

B is the number of blocks, which hold as many bytes of the decompressed file each, the last one fewer. The arrays hold the byte
at which each block begins in the copy and the last one ends, and the checksum (CRC-32) of each block. The last checksum is that
of all numbers before it.
"""

from __future__ import annotations

import errno
import io
import zlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from rescale_data.sources.files.local_store import LocalStore
from rescale_data.sources.files.ranges import ArrowBuffer, MappedFile, RangeReader

BLOCK_BYTES = 2**20
_MAGIC = b"RDBLOCK3"
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
        file_tail = self._file.read(max(0, self._file.size - 24), 24).to_pybytes().rjust(24, b"\0")
        num_blocks, checksum = int.from_bytes(file_tail[:8], "little"), int.from_bytes(file_tail[8:16], "little")
        table_offset = self._file.size - 16 * num_blocks - 48
        table_bytes = self._file.read(max(0, table_offset), 16 * num_blocks + 32)
        if file_tail[16:] != _MAGIC or table_offset < 0 or zlib.crc32(table_bytes) != checksum:
            raise ValueError(f"{path} is not whole")
        table = np.frombuffer(table_bytes, dtype=np.int64)
        self._compressed_offsets, self._checksums = table[: num_blocks + 1], table[num_blocks + 1 : -3]
        self.size, self._block_bytes = table[-3:-1].tolist()
        # A copy that was made again has other blocks, if the file has changed.
        self._path, self._store_key_prefix = path, f"{path}|{checksum}"

    def read(self, offset: int, length: int) -> ArrowBuffer:
        stop = min(offset + length, self.size)
        if stop <= offset:
            return pa.py_buffer(b"")
        first_block, stop_block = offset // self._block_bytes, -(-stop // self._block_bytes)
        blocks = [self._read_block(block) for block in range(first_block, stop_block)]
        content = blocks[0] if len(blocks) == 1 else pa.py_buffer(b"".join(blocks))
        return content.slice(offset - first_block * self._block_bytes, stop - offset)

    def _read_block(self, block: int) -> ArrowBuffer:
        if self._store is None:
            return self._decompress(block)
        return self._store.read(f"{self._store_key_prefix}|{block}", partial(self._decompress, block))

    def _decompress(self, block: int) -> ArrowBuffer:
        start, stop = self._compressed_offsets[block : block + 2].tolist()
        size = min(self._block_bytes, self.size - block * self._block_bytes)
        compressed_block = self._file.read(start, stop - start)
        if zlib.crc32(compressed_block) != self._checksums[block]:
            raise OSError(errno.EIO, "a block was changed on the disk: delete the file, it is written anew", self._path)
        return self._codec.decompress(compressed_block, size)


def codec_of(file_name: str) -> str | None:
    """Return the compression codec that a file's name shows; `None` if the file is not compressed."""
    return next((codec for suffix, codec in CODECS.items() if file_name.endswith(suffix)), None)


def write_blocks(chunks: Iterator[bytes], path: str) -> None:
    """Write chunks of bytes, all but the last of one size, for `BlockRangeReader`; each is compressed as a block of its own."""
    codec, copy_offsets, sizes, checksums = pa.Codec("zstd"), [0], [0], list[int]()
    with open(path, "wb") as file:
        for chunk in chunks:
            compressed_chunk = codec.compress(chunk, asbytes=True)
            file.write(compressed_chunk)
            copy_offsets.append(copy_offsets[-1] + len(compressed_chunk))
            sizes.append(len(chunk))
            checksums.append(zlib.crc32(compressed_chunk))
        table = [*copy_offsets, *checksums, sum(sizes), max(sizes), len(checksums)]
        table_bytes = np.array(table, dtype=np.int64).tobytes()
        file.write(table_bytes + zlib.crc32(table_bytes).to_bytes(8, "little") + _MAGIC)


def decompress_chunks(stream: Any, codec: str) -> Iterator[bytes]:
    """Yield the decompressed bytes of a file, in chunks of `BLOCK_BYTES`; the last one may be shorter."""
    with pa.CompressedInputStream(stream, codec) as file:
        reader = io.BufferedReader(file, BLOCK_BYTES)  # pyarrow may return fewer bytes than requested
        while chunk := reader.read(BLOCK_BYTES):
            yield chunk
