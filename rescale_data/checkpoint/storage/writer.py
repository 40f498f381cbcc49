"""DCP's writer, into a workspace, with every file's size and checksum recorded and one commit at the end."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from rescale_data.checkpoint.storage.commit import Workspace, commit
from rescale_data.checkpoint.storage.manifest import Manifest
from rescale_data.checkpoint.storage.ownership import SAVE_ID_PREFIX
from rescale_data.checkpoint.storage.store import Store, split
from rescale_data.checkpoint.storage.streams import FileRecord, StoreFileSystem
from rescale_data.checkpoint.tree import Lost


@dataclass(frozen=True, kw_only=True)
class SaveInfo:
    """What the manifest says beside the files."""

    world_size: int = 1
    step: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])


class CheckpointWriter(FileSystemWriter):
    """Writes DCP's own format. ``finish``, on rank 0 after all ranks have written, commits.

    The records of a rank's files travel to rank 0 as further ``WriteResult`` s of DCP's own gather.
    """

    def __init__(self, store: Store, workspace: Workspace, info: SaveInfo) -> None:
        super().__init__(workspace.working, sync_files=store.renames, overwrite=True)
        self.fs: StoreFileSystem = StoreFileSystem(store)
        self.path: str = workspace.working
        self.workspace = workspace
        self.info = info
        self.lost: Lost = ()  # of the state's form, once it is known

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing: a writer is for one save, whose path was settled with all ranks."""

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=self.workspace.final, save_id=SAVE_ID_PREFIX + self.workspace.save_id)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results = self.write_files(plan, planner)
        done: Future[list[WriteResult]] = Future()
        done.set_result([*results, *(_as_result(path, record) for path, record in self.fs.written.items())])
        return done

    def write_files(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        """This rank's data files; afterwards ``fs.written`` has their records."""
        return super().write_data(plan, planner).wait()

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        prefix = self.workspace.prefix
        files = {
            prefix + cast(_FileIndex, r.index).fqn: r.storage_data for rank in results for r in rank if _is_file(r)
        }
        self.fs.written.clear()
        super().finish(metadata, [[_under(prefix, r) for r in rank if not _is_file(r)] for rank in results])
        files.update({split(path)[1]: record for path, record in self.fs.written.items()})
        manifest = Manifest(
            save_id=self.workspace.save_id,
            files=files,
            world_size=self.info.world_size,
            step=self.info.step,
            metrics=self.info.metrics,
            created=time.time(),
            torch=str(torch.__version__),
            lost=self.lost,
        )
        commit(self.fs.store, self.workspace, manifest)


class _FileIndex(MetadataIndex):
    """Marks a ``WriteResult`` that is a file's record and not a value's place."""


def _as_result(path: str, record: FileRecord) -> WriteResult:
    return WriteResult(_FileIndex(split(path)[1]), record.size, cast(Any, record))


def _under(prefix: str, result: WriteResult) -> WriteResult:
    """A value's place, in a file whose name begins with ``prefix`` when the checkpoint is committed."""
    place = result.storage_data
    return dataclasses.replace(
        result, storage_data=dataclasses.replace(place, relative_path=prefix + place.relative_path)
    )


def _is_file(result: WriteResult) -> bool:
    return isinstance(result.index, _FileIndex)
