"""Where checkpoints live: what saving, loading and retention need of a file system, and nothing else."""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, BinaryIO, TypeAlias, cast

StrPath: TypeAlias = str | os.PathLike[str]


class Store(ABC):
    """Files and folders by path. Paths are strings with ``/``; a folder need not exist before its files do.

    Attributes:
        renames: Whether a whole folder gets its name in one atomic step. Where it does not (object stores) a checkpoint
            is committed by the object that is written last.
    """

    renames: bool

    @abstractmethod
    def open_read(self, path: str) -> BinaryIO: ...

    @abstractmethod
    def open_write(self, path: str) -> BinaryIO:
        """A new file; it need not be visible before it is closed."""

    @abstractmethod
    def discard(self, stream: BinaryIO, path: str) -> None:
        """Give up a file that ``open_write`` began; errors on the way are swallowed, the first one counts."""

    @abstractmethod
    def is_file(self, path: str) -> bool: ...

    @abstractmethod
    def is_folder(self, path: str) -> bool: ...

    @abstractmethod
    def size(self, path: str) -> int:
        """Bytes of a file; ``FileNotFoundError`` where there is none."""

    @abstractmethod
    def modified(self, path: str) -> float:
        """Seconds since the epoch of a file's last change."""

    @abstractmethod
    def names(self, path: str) -> list[str]:
        """Names directly in a folder, sorted; empty where there is no folder."""

    @abstractmethod
    def make_folder(self, path: str) -> None: ...

    @abstractmethod
    def rename(self, old: str, new: str) -> None:
        """A file, or where ``renames`` a folder, under a new name."""

    @abstractmethod
    def remove(self, path: str) -> None:
        """A file; it may be gone already."""

    @abstractmethod
    def remove_folder(self, path: str) -> None:
        """A folder with all that is in it; it may be gone already."""

    @abstractmethod
    def sync_folder(self, path: str) -> None:
        """Make the names in a folder survive a power cut, where that is not so anyhow."""

    def exists(self, path: str) -> bool:
        return self.is_file(path) or self.is_folder(path)

    def read(self, path: str) -> bytes:
        with self.open_read(path) as stream:
            return stream.read()

    def write(self, path: str, content: bytes) -> None:
        stream = self.open_write(path)
        try:
            stream.write(content)
            stream.flush()
            self.sync_file(stream)
        except BaseException:
            self.discard(stream, path)
            raise
        stream.close()

    def sync_file(self, stream: BinaryIO) -> None:  # noqa: B027 - nothing to do unless a store says otherwise
        """Make what was written survive a power cut."""


def join(folder: str, *names: str) -> str:
    return "/".join([folder.rstrip("/"), *names])


def split(path: str) -> tuple[str, str]:
    """The folder that holds ``path``, and its name in there."""
    folder, _, name = path.rstrip("/").rpartition("/")
    return folder or "/", name


def open_store(path: StrPath, storage_options: Mapping[str, Any] | None = None) -> tuple[Store, str]:
    """The store that ``path`` is in, and ``path`` as that store spells it: a link to a checkpoint is the checkpoint.

    Args:
        path: A local path, or a URL that fsspec knows (``s3://bucket/run``, ``gs://``, ``az://``, ``memory://``).
        storage_options: Passed on to fsspec.

    Raises:
        TypeError: ``path`` is neither a string nor path-like.
        ValueError: the scheme is unknown, what it needs is not installed, or a URL came as a ``pathlib.Path``.
    """
    if not isinstance(cast(object, path), str | os.PathLike):
        raise TypeError(f"A checkpoint's path is a str or os.PathLike, not {type(path).__name__}.")
    text = os.fspath(path)
    if not isinstance(path, str) and re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", text):
        raise ValueError(f"{text!r} was a URL: pathlib has taken one of its slashes. Give a URL as a str.")
    if "://" in text and not text.startswith("file://"):
        from rescale_data.checkpoint.storage.objects import ObjectStore

        return ObjectStore(text, storage_options), text.rstrip("/")
    from rescale_data.checkpoint.storage.local import LocalStore

    return LocalStore(), os.path.realpath(text.removeprefix("file://"))
