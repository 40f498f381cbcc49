"""Checkpoints in an object store: anything that fsspec reaches by URL."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, BinaryIO, cast

import fsspec

from rescale_data.checkpoint.storage.store import Store, StrPath, split


class ObjectStore(Store):
    """A bucket. Objects appear whole or not at all; a folder is what its objects' names have in common.

    Listings are never cached: what another rank or another job wrote must be seen.
    """

    renames = False

    def __init__(self, url: str, storage_options: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        options = {"use_listings_cache": False, **(storage_options or {})}
        try:
            self._fs: Any = fsspec.core.url_to_fs(url, **options)[0]
        except (ValueError, ImportError) as error:
            raise ValueError(
                f"{url!r} cannot be opened: {error}. "
                f"Install the fsspec package for it (s3fs, gcsfs, adlfs), or give a local path."
            ) from error

    def open_read(self, path: str) -> BinaryIO:
        return cast(BinaryIO, self._fs.open(path, "rb"))

    def open_write(self, path: str) -> BinaryIO:
        return cast(BinaryIO, self._fs.open(path, "wb"))

    def discard(self, stream: BinaryIO, path: str) -> None:
        # close() would commit the part that was written: abort the upload, and mark the file as closed.
        with contextlib.suppress(Exception):
            cast(Any, stream).discard()
        with contextlib.suppress(Exception):
            cast(Any, stream).closed = True

    def is_file(self, path: str) -> bool:
        return bool(self._fs.isfile(path))

    def is_folder(self, path: str) -> bool:
        return bool(self.names(path))

    def size(self, path: str) -> int:
        return int(self._fs.size(path))

    def sizes(self, path: str) -> dict[str, int]:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            listed = cast("list[dict[str, Any]]", self._fs.ls(path, detail=True))
            return {split(entry["name"])[1]: int(entry["size"]) for entry in listed if entry["type"] == "file"}
        return {}

    def modified(self, path: str) -> float:
        return float(self._fs.modified(path).timestamp())

    def names(self, path: str) -> list[str]:
        try:
            listed = cast(list[str], self._fs.ls(path, detail=False))
        except (FileNotFoundError, NotADirectoryError):
            return []
        own = split(path)[1]
        return sorted({name for name in (split(entry)[1] for entry in listed) if name and name != own})

    def make_folder(self, path: str) -> None:
        """Nothing: a folder begins with its first object."""

    def rename(self, path: StrPath, new_path: StrPath) -> None:
        self._fs.mv(path, new_path)

    def remove(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(path)

    def remove_folder(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm(path, recursive=True)

    def sync_folder(self, path: str) -> None:
        """Nothing: an object that was stored is stored."""
