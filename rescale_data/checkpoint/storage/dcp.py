"""DCP's reader and writer of files, on a ``Store``: what is half public in torch is used here and nowhere else.

The reader reads metadata without trusting it. The writer records every file's size and checksum, and commits once, at the end.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import os
import time
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from rescale_data.checkpoint.storage.commit import SAVE_ID_PREFIX, Workspace, commit
from rescale_data.checkpoint.storage.manifest import METADATA, Manifest, read_manifest
from rescale_data.checkpoint.storage.metadata import read_metadata
from rescale_data.checkpoint.storage.progress import Progress
from rescale_data.checkpoint.storage.store import FileRecord, Store, join, split
from rescale_data.errors import DamagedCheckpointError


class ReplacedError(ValueError):
    """While it was read the checkpoint at a path was replaced or deleted."""

    def __str__(self) -> str:
        return f"{super().__str__()} was replaced or deleted while it was read. Start again."


class CheckpointReader(FileSystemReader):
    """Reads a DCP folder.

    Args:
        trusted: True runs what its metadata names, where that is not known.

    Attributes:
        manifest: Of the checkpoint that is read, so that it is seen when another takes its place.
    """

    def __init__(self, store: Store, path: str, *, trusted: bool = False) -> None:
        super().__init__(path)
        self.fs: Store = store
        self.path: str = path
        self.trusted = trusted
        self.manifest: Manifest | None = None
        self._metadata: Metadata | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing: a reader is for one checkpoint."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._metadata is None:
            name = self.manifest.metadata if self.manifest else METADATA
            try:
                self._metadata = read_metadata(self.fs.read(join(self.path, name)), trusted=self.trusted)
            except ValueError as error:
                raise type(error)(f"{self.path} cannot be read: {error}") from error
        self._metadata.storage_meta = self._metadata.storage_meta or StorageMeta()
        self._metadata.storage_meta.load_id = self.load_id
        return self._metadata

    def is_replaced(self) -> bool:
        """Whether another checkpoint was saved here, or this one was taken away, since the reader was made."""
        try:
            manifest = read_manifest(self.fs, self.path)
        except (OSError, ValueError):
            return False
        return self.manifest is not None and (manifest is None or manifest.save_id != self.manifest.save_id)


class CheckpointWriter(FileSystemWriter):
    """Writes DCP's own format. ``finish``, on rank 0 after all ranks have written, commits.

    The records of a rank's files travel to rank 0 as further ``WriteResult`` s of DCP's own gather.

    Args:
        manifest: What it says beside the files.
    """

    def __init__(self, store: Store, workspace: Workspace, manifest: Manifest) -> None:
        super().__init__(workspace.working, sync_files=False, overwrite=True)  # the store does
        self.progress = Progress(f"Saving {workspace.final}")
        self.fs: Store = copy.copy(store)
        self.fs.written, self.fs.progress = {}, self.progress
        self.path: str = workspace.working
        self.workspace = workspace
        self.manifest = manifest

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing: a writer is for one save, whose path was settled with all ranks."""

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=self.workspace.final, save_id=SAVE_ID_PREFIX + self.workspace.save_id)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        self.progress.total = _num_bytes(plan)
        try:
            results = super().write_data(plan, planner).wait()
        except OSError as error:
            written = sum(record.size for record in self.fs.written.values())
            error.add_note(
                f"{_num_bytes(plan):,} bytes were to be written by this rank; {written:,} are in files that it has ended."
            )
            raise
        done: Future[list[WriteResult]] = Future()
        written = self.fs.written.items()
        files = [WriteResult(MetadataIndex(split(path)[1]), of.size, cast(Any, of)) for path, of in written]
        done.set_result([*results, *files])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        prefix = self.workspace.prefix
        files = {prefix + r.index.fqn: r.storage_data for of in results for r in of if _is_file(r)}
        self.fs.written.clear()
        super().finish(metadata, [[_under(prefix, r) for r in of if not _is_file(r)] for of in results])
        # DCP writes the metadata under another name, and renames it.
        files[prefix + METADATA] = next(iter(self.fs.written.values()))
        manifest = dataclasses.replace(self.manifest, files=files, created=time.time(), torch=str(torch.__version__))
        commit(self.fs, self.workspace, manifest)
        missing = changed_sizes(self.fs, self.workspace.final, files)
        if missing:
            listed = "\n  ".join(missing)
            raise DamagedCheckpointError(
                f"{self.workspace.final} was committed, and something else has changed its files:\n  {listed}\n"
                f"Does another job write to the same folder?"
            )


def changed_sizes(store: Store, path: str, files: Mapping[str, FileRecord]) -> list[str]:
    """What is wrong by size alone, and from listings: few requests, whatever the number of files."""
    folders = {split(join(path, name))[0] for name in files}
    found = {join(folder, name): size for folder in folders for name, size in store.sizes(folder).items()}
    sizes = {name: (found.get(join(path, name)), record.size) for name, record in files.items()}
    return [
        f"{join(path, name)} is missing" if size is None else f"{join(path, name)} has {size} bytes; {saved} were saved"
        for name, (size, saved) in sizes.items()
        if size != saved
    ]


def _is_file(result: WriteResult) -> bool:
    """Whether it is a file's record, and not a value's place."""
    return isinstance(cast(object, result.storage_data), FileRecord)


def _under(prefix: str, result: WriteResult) -> WriteResult:
    """A value's place, in a file whose name begins with ``prefix`` when the checkpoint is committed."""
    place = result.storage_data
    return dataclasses.replace(
        result, storage_data=dataclasses.replace(place, relative_path=prefix + place.relative_path)
    )


def _num_bytes(plan: SavePlan) -> int:
    """Of the tensors of a plan; what is pickled is not known before."""
    pieces = [item.tensor_data for item in plan.items if item.tensor_data is not None]
    return sum(math.prod(piece.chunk.sizes) * piece.properties.dtype.itemsize for piece in pieces)
