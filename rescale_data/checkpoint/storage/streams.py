"""DCP's view of a store: streams that count and checksum what goes through them."""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

from torch.distributed.checkpoint.filesystem import FileSystemBase

from rescale_data.checkpoint.storage.store import Store, join


@dataclass(frozen=True)
class FileRecord:
    """What a file held when it was written: ``size`` in bytes and the CRC-32 of its content."""

    size: int
    crc32: int


class CheckedStream(io.RawIOBase):
    """A file being written, with the size and the CRC-32 of all that went into it."""

    def __init__(self, raw: BinaryIO) -> None:
        self.raw = raw
        self.record = FileRecord(0, 0)

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        view = memoryview(data).cast("B")
        self.raw.write(view)
        self.record = FileRecord(self.record.size + view.nbytes, zlib.crc32(view, self.record.crc32))
        return view.nbytes

    def tell(self) -> int:
        return self.record.size

    def fileno(self) -> int:
        # Asked for by os.fsync, which knows nothing of Python's buffer.
        self.raw.flush()
        return self.raw.fileno()

    def close(self) -> None:
        if not self.closed:
            self.raw.close()
        super().close()


class StoreFileSystem(FileSystemBase):
    """A ``Store`` as DCP's file system.

    Attributes:
        written: The record of each file that was written, by path.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.written: dict[str, FileRecord] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        if "w" not in mode:
            with self.store.open_read(os.fspath(path)) as raw:
                yield cast(io.IOBase, raw)
            return
        raw = self.store.open_write(os.fspath(path))
        stream = CheckedStream(raw)
        try:
            yield stream
            stream.close()
        except BaseException:
            self.store.discard(raw, os.fspath(path))
            raise
        self.written[os.fspath(path)] = stream.record

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str:
        return join(os.fspath(path), suffix)

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        self.store.rename(os.fspath(path), os.fspath(new_path))
        self.written[os.fspath(new_path)] = self.written.pop(os.fspath(path))

    def init_path(self, path: str | os.PathLike[str]) -> str:
        return os.fspath(path)

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        self.store.make_folder(os.fspath(path))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def exists(self, path: str | os.PathLike[str]) -> bool:
        return self.store.exists(os.fspath(path))

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        self.store.remove(os.fspath(path))
