"""File systems of checkpoints: the operations that saving, loading and retention need.

A ``Store`` is the file system that DCP's reader and writer use, too. What they write is counted and checksummed on its way.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import io
import os
import shutil
import uuid
import zlib
from abc import abstractmethod
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO, TypeAlias, cast

import fsspec
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractFileSystem

from rescale_data.checkpoint.storage.dcp import FileSystemBase

StrPath: TypeAlias = str | os.PathLike[str]
_BUFFER_BYTES = 1 << 20
_NOT_FOUND_ERRORS = (FileNotFoundError, NotADirectoryError)


@dataclass(frozen=True)
class FileRecord:
    """The size and checksums of a written file.

    Args:
        size: The size in bytes.
        crc32s: The CRC-32 of each of its pieces in their order, four bytes each, in hexadecimal.
    """

    size: int
    crc32s: str = ""


class CheckedStream(io.RawIOBase):
    """Output stream that counts bytes and makes a CRC-32 of each piece; DCP asks for the position after each.

    Attributes:
        error: The system's error of a failed write, in place of which torch's writer of tensors raises another.
    """

    def __init__(self, raw_stream: BinaryIO) -> None:
        self.raw_stream = raw_stream
        self.error: OSError | None = None
        self._num_bytes, self._crc_piece_start, self._crc32, self._crc32s = 0, 0, 0, bytearray()

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        try:
            self.raw_stream.write(data)
        except OSError as error:
            self.error = error
            raise
        self._num_bytes, self._crc32 = self._num_bytes + len(data), zlib.crc32(data, self._crc32)
        return len(data)

    def tell(self) -> int:
        if self._num_bytes > self._crc_piece_start:
            self._crc32s += self._crc32.to_bytes(4, "big")
            self._crc_piece_start, self._crc32 = self._num_bytes, 0
        return self._num_bytes

    def record(self) -> FileRecord:
        return FileRecord(self.tell(), self._crc32s.hex())


class Store(FileSystemBase):
    """A file system of fsspec, with the operations that checkpoints need. Paths are strings with ``/``.

    Args:
        file_system: The file system.

    Attributes:
        file_system: The file system of fsspec.
        can_rename: True if files and folders can be renamed in one atomic step; object stores cannot.
        written_files: The record of each file that DCP has written in the save that runs, by path.
    """

    can_rename: bool

    def __init__(self, file_system: AbstractFileSystem) -> None:
        self.file_system = file_system
        self._file_system: Any = file_system
        self.written_files: dict[str, FileRecord] = {}

    def open_read(self, path: str) -> BinaryIO:
        return self._file_system.open(path, "rb")

    def open_write(self, path: str) -> BinaryIO:
        """Open a new file for writing; it need not be visible before it is closed."""
        return self._file_system.open(path, "wb")

    @abstractmethod
    def discard(self, stream: BinaryIO, path: str) -> None:
        """Discard an unfinished file that ``open_write`` opened; errors are ignored."""

    def is_file(self, path: str) -> bool:
        """True if ``path`` is a file. Every error but "not found" is raised: fsspec's own ``isfile`` calls it False."""
        try:
            return self._file_system.info(path)["type"] == "file"
        except _NOT_FOUND_ERRORS:
            return False

    def file_sizes(self, path: str) -> dict[str, int]:
        """Return the size in bytes of each file directly in a folder, by name; empty if there is no folder."""
        with contextlib.suppress(*_NOT_FOUND_ERRORS):
            listing = cast("list[dict[str, Any]]", self._file_system.ls(path, detail=True))
            return {split(entry["name"])[1]: int(entry["size"]) for entry in listing if entry["type"] == "file"}
        return {}

    def names(self, path: str) -> list[str]:
        """Return the names directly in a folder, sorted; empty if there is no folder."""
        try:
            listing = cast(list[str], self._file_system.ls(path, detail=False))
        except _NOT_FOUND_ERRORS:
            return []
        folder_name = split(path)[1]
        return sorted({name for name in (split(entry)[1] for entry in listing) if name and name != folder_name})

    def mkdir(self, path: Any) -> None:
        """Make a folder. Do nothing in an object store, where a folder begins with its first object."""

    def rename(self, path: str, new_path: str) -> None:  # type: ignore[override]
        """Rename a file, or a folder if ``can_rename``."""
        self._file_system.cp_file(path, new_path)  # mv would take a name with brackets for a pattern
        self.rm_file(path)

    def rm_file(self, path: Any) -> None:
        """Remove a file, if it exists."""
        with contextlib.suppress(FileNotFoundError):
            self._file_system.rm_file(path)

    def remove_folder(self, path: str) -> None:
        """Remove a file, or a folder with its content, if it exists. Of a link only the link is removed."""
        with contextlib.suppress(FileNotFoundError):
            self._file_system.rm(glob.escape(path), recursive=True)

    def remove_empty_folder(self, path: str) -> None:
        """Remove a folder if it is empty; do nothing in an object store."""

    def is_link(self, path: str) -> bool:
        """True if the path is a symbolic link; always False in an object store."""
        return False

    def sync_file(self, stream: BinaryIO) -> None:
        """Write a file through to the disk, so that it survives a power cut; do nothing in an object store."""

    def sync_folder(self, path: str) -> None:
        """Write the names in a folder through to the disk; do nothing in an object store."""

    def read(self, path: str) -> bytes:
        with self.open_read(path) as stream:
            return stream.read()

    def put(self, path: str, content: bytes | Callable[[BinaryIO], object]) -> None:
        """Write a file, new or in place of an existing one, in one atomic step.

        Args:
            content: Or what writes it into a stream.
        """
        with self._new_file(path) as stream:
            content(stream) if callable(content) else stream.write(content)

    @contextmanager
    def _new_file(self, path: str) -> Generator[BinaryIO]:
        raw_stream = self.open_write(path)
        try:
            yield raw_stream
            raw_stream.flush()
            self.sync_file(raw_stream)
            raw_stream.close()
        except BaseException as error:
            self.discard(raw_stream, path)
            if isinstance(error, OSError) and error.errno is not None and error.filename is None:
                error.filename = path
            raise

    # What DCP's reader and writer ask of a file system; the paths are those of ``init_path``.

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Generator[io.IOBase]:
        if "w" not in mode:
            with self.open_read(path) as raw_stream:
                yield cast(io.IOBase, raw_stream)
            return
        with self._new_file(path) as raw_stream:
            stream = CheckedStream(raw_stream)
            try:
                yield stream
            except BaseException as error:
                if stream.error is None or stream.error is error:
                    raise
                raise stream.error from error
        self.written_files[path.removesuffix(".tmp")] = stream.record()  # of DCP's metadata, until it is whole

    def concat_path(self, path: Any, suffix: str) -> str:
        return join(path, suffix)

    def init_path(self, path: StrPath) -> str:
        return os.fspath(path)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: StrPath) -> bool:
        return True

    def exists(self, path: Any) -> bool:
        return self.is_file(path) or bool(self.names(path))


class ObjectStore(Store):
    """A bucket: objects appear whole or not at all, and a folder is a common prefix of object names.

    Listings are never cached: what another rank or another job wrote must be seen.
    """

    can_rename = False

    def __init__(self, url: str, storage_options: Mapping[str, Any] | None = None) -> None:
        fs_options = {"use_listings_cache": False, **(storage_options or {})}
        if fs_options["use_listings_cache"]:
            raise ValueError(
                "use_listings_cache=True would hide what other jobs save. Leave it out of storage_options."
            )
        try:
            super().__init__(fsspec.core.url_to_fs(url, **fs_options)[0])
        except (ValueError, ImportError) as error:
            raise ValueError(
                f"{url!r} cannot be opened: {error}. "
                f"Install the fsspec package for it (s3fs, gcsfs, adlfs), or give a local path."
            ) from error

    def read(self, path: str) -> bytes:
        return bytes(self._file_system.cat_file(path))  # by one request: a claim may be put again in the meantime

    def discard(self, stream: BinaryIO, path: str) -> None:
        # close() would commit the part that was written: abort the upload, and mark the file as closed.
        with contextlib.suppress(Exception):
            cast(Any, stream).discard()
        with contextlib.suppress(Exception):
            cast(Any, stream).closed = True


class DiskStore(Store):
    """The file system of this machine. ``rename`` of a folder is atomic; files and names are synced."""

    can_rename = True

    def __init__(self) -> None:
        super().__init__(LocalFileSystem())

    def open_read(self, path: str) -> BinaryIO:
        if self._file_system.info(path)["type"] == "other":  # a device has no end, and a pipe no beginning
            raise OSError(errno.EINVAL, "It is neither a file nor a folder", path)
        return open(path, "rb")

    def open_write(self, path: str) -> BinaryIO:
        return open(path, "wb", _BUFFER_BYTES)

    def discard(self, stream: BinaryIO, path: str) -> None:
        with contextlib.suppress(OSError):
            stream.close()
        with contextlib.suppress(OSError):
            os.unlink(path)

    def file_sizes(self, path: str) -> dict[str, int]:
        with contextlib.suppress(*_NOT_FOUND_ERRORS), os.scandir(path) as entries:
            return {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}
        return {}

    def names(self, path: str) -> list[str]:
        with contextlib.suppress(*_NOT_FOUND_ERRORS):
            return sorted(os.listdir(path))
        return []

    def mkdir(self, path: Any) -> None:
        os.makedirs(path, exist_ok=True)

    def put(self, path: str, content: bytes | Callable[[BinaryIO], object]) -> None:
        if os.path.exists(path) and not os.path.isfile(path):
            raise OSError(errno.EISDIR, "It is a folder or a device; give the path of a file", path)
        temporary_path = f"{path}.{uuid.uuid4().hex[:12]}.tmp"
        super().put(temporary_path, content)
        try:
            self.rename(temporary_path, path)
        except BaseException:
            self.rm_file(temporary_path)
            raise
        self.sync_folder(split(path)[0])

    def remove_empty_folder(self, path: str) -> None:
        with contextlib.suppress(OSError):
            os.rmdir(path)

    def is_link(self, path: str) -> bool:
        return os.path.islink(path)

    def rename(self, path: str, new_path: str) -> None:  # type: ignore[override]
        os.replace(path, new_path)

    def remove_folder(self, path: str) -> None:
        if self.is_link(path) or self.is_file(path):
            self.rm_file(path)
        else:
            shutil.rmtree(path, ignore_errors=True)

    def sync_file(self, stream: BinaryIO) -> None:
        os.fsync(stream.fileno())

    def sync_folder(self, path: str) -> None:
        folder_descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
        try:
            os.fsync(folder_descriptor)
        finally:
            os.close(folder_descriptor)


@contextmanager
def new_folder(store: Store, final_path: str) -> Generator[str]:
    """Yield a temporary folder, renamed to `final_path` at the end, or removed on an error; in an object store `final_path`."""
    if not store.can_rename:
        yield final_path
        return
    folder, name = split(final_path)
    temporary_folder = join(folder, f".{name}.{uuid.uuid4().hex[:12]}.tmp")
    store.mkdir(temporary_folder)
    try:
        yield temporary_folder
        store.rename(temporary_folder, final_path)
        store.sync_folder(folder)
    finally:
        store.remove_folder(temporary_folder)


def join(folder: str, *names: str) -> str:
    return "/".join([folder.rstrip("/"), *names])


def split(path: str) -> tuple[str, str]:
    """Return the folder that contains ``path``, and the name of ``path`` in it."""
    folder, _, name = path.rstrip("/").rpartition("/")
    return folder or "/", name
