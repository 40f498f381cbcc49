"""DCP's reader, from a store, with the metadata read once and, on request, without trusting it."""

from __future__ import annotations

import os
from typing import Any, cast

from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from rescale_data.checkpoint.storage.manifest import METADATA
from rescale_data.checkpoint.storage.store import Store, join
from rescale_data.checkpoint.storage.streams import StoreFileSystem
from rescale_data.checkpoint.storage.unpickle import read_metadata


class CheckpointReader(FileSystemReader):
    """Reads a DCP folder.

    Args:
        trusted: False reads the metadata with a restricted unpickler.
    """

    def __init__(self, store: Store, path: str, *, trusted: bool = True) -> None:
        super().__init__(path)
        self.fs: StoreFileSystem = StoreFileSystem(store)
        self.path: str = path
        self.trusted = trusted
        self._metadata: Metadata | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing: a reader is for one checkpoint."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._metadata is None:
            self._metadata = _with_plain_paths(self.path, self.fs.store, self.trusted)
        self._metadata.storage_meta = self._metadata.storage_meta or StorageMeta()
        self._metadata.storage_meta.load_id = self.load_id
        return self._metadata


def _with_plain_paths(path: str, store: Store, trusted: bool) -> Metadata:
    try:
        metadata = read_metadata(store.read(join(path, METADATA)), trusted=trusted)
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    for place in cast(dict[Any, Any], metadata.storage_data or {}).values():
        _refuse_to_leave(path, place.relative_path)
    return metadata


def _refuse_to_leave(path: str, name: str) -> None:
    if name.startswith("/") or ".." in name.split("/"):
        raise ValueError(f"{path} cannot be read: its metadata points at the file {name!r}, outside of the folder.")
