"""DCP where torch keeps it half public: its metadata, its planners, and its reader and writer of files. All of that is here.

No other module imports it (``tests/test_api.py``). A new torch that changes it is seen by ``tests/checkpoint/test_dcp.py``.

    save      plain values ──► DCP's plan and files, through a file system that may be any
    load      by flattened name, exactly what fits: tensors in place, plain values by an unpickler without code
    Contents  what a checkpoint holds, in torch's own words: tensors on the meta device
"""

from __future__ import annotations

import dataclasses
import functools
import io
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self, cast

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemBase, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.state_dict_saver import save as save_state
from torch.distributed.checkpoint.storage import StorageReader, WriteResult
from torch.futures import Future

from rescale_data.checkpoint.ranks import Ranks
from rescale_data.checkpoint.storage.progress import Progress
from rescale_data.checkpoint.storage.values import load_safely

__all__ = ["FileSystemBase", "Metadata", "MetadataIndex", "ReadItem", "WriteItem"]
UNFINISHED = ".tmp"
"""What DCP puts after the name of the metadata's file until it is written."""


@dataclass(frozen=True)
class Contents:
    """What a checkpoint holds.

    Attributes:
        values: By flattened name a tensor on the meta device, or None for a plain value.
        paths: In the nested state, by flattened name.
        unplaced: Names whose paths another tool did not save; such a name stands for its path.
    """

    values: dict[str, torch.Tensor | None]
    paths: dict[str, tuple[Any, ...]]
    unplaced: frozenset[str]

    @classmethod
    def of(cls, metadata: Metadata) -> Contents:
        saved, known = metadata.state_dict_metadata, metadata.planner_data or {}
        paths = {name: tuple(known.get(name, (name,))) for name in saved}
        return cls({name: _meta(value) for name, value in saved.items()}, paths, frozenset(saved.keys() - known.keys()))

    def under(self, root: tuple[str, ...]) -> Contents:
        """What is below a path, with the rest of each value's own."""
        start = len(root)
        inner = {name: path for name, path in self.paths.items() if (*map(str, path[:start]),) == root}
        paths = {name: path[start:] for name, path in inner.items() if len(path) > start}
        return Contents({name: self.values[name] for name in paths}, paths, self.unplaced)


def _meta(saved: Any) -> torch.Tensor | None:
    tensor = isinstance(saved, TensorStorageMetadata)
    return torch.empty(saved.size, dtype=saved.properties.dtype, device="meta") if tensor else None


def save_id_of(metadata: Metadata) -> str:
    return (metadata.storage_meta and metadata.storage_meta.save_id) or ""


def ends_of(metadata: Metadata) -> dict[str, int]:
    """By file how many bytes of it at least hold something."""
    ends: dict[str, int] = {}
    for place in cast(dict[Any, Any], metadata.storage_data or {}).values():
        ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
    return ends


class Pieces(torch.Tensor):
    """What this process has of a tensor that a device has cut, by the protocol through which DCP looks at a DTensor, too.

    It has the shape and the dtype of the whole, and no memory for it.

    Attributes:
        items: One of each piece, by the device; their name is that of no value yet.
        find: Gives the piece at a place, on the CPU.
        commit: Is told what was read into a piece.
    """

    items: list[WriteItem]
    find: Callable[[MetadataIndex], torch.Tensor]
    commit: Callable[[ReadItem, torch.Tensor], None]

    @classmethod
    def of(cls, whole: torch.Tensor, items: list[WriteItem]) -> Self:
        pieces = torch.empty((), dtype=whole.dtype, device="cpu").expand(whole.shape).as_subclass(cls)
        pieces.items = items
        return pieces

    @property
    def distinct(self) -> dict[Any, WriteItem]:
        """Each piece that holds something once, by its place, however many devices of this host have it.

        A planner's own removal of duplicates would drop a piece altogether that occurs twice in one plan.
        """
        return {item.index.offset: item for item in self.items if _chunk(item).sizes.numel()}

    def copied(self) -> Self:
        """With copies in place of the live pieces."""
        copies = {place: self.find(item.index) for place, item in self.distinct.items()}
        self.find = lambda index: copies[index.offset]
        return self

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        named = functools.partial(dataclasses.replace, fqn=fqn)
        return [dataclasses.replace(item, index=named(item.index)) for item in self.distinct.values()]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [_chunk(item) for item in self.items]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return self.find(index)


def _chunk(item: WriteItem) -> ChunkStorageMetadata:
    return cast(TensorWriteData, item.tensor_data).chunk


def flatten(tree: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, tuple[Any, ...]]]:
    """Values by flattened name, and each name's path, by DCP's own rule."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(dict(tree))
    return dict(planner.state_dict), dict(planner.mappings)


class Planner(DefaultLoadPlanner):
    """Reads exactly these values.

    They are flat already: DCP's own way to flatten a state keeps its tensors alive until a garbage collection (torch 2.9).
    """

    def __init__(self, values: dict[str, Any], *, trusted: bool, progress: Progress) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.values, self.trusted, self.progress = values, trusted, progress

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner(self.values, metadata, is_coordinator)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        self.progress.add(math.prod(read_item.lengths) * tensor.element_size())
        target = self.values[read_item.dest_index.fqn]
        if isinstance(target, Pieces):
            target.commit(read_item, tensor)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        try:
            self.values[name] = torch.load(value, weights_only=False) if self.trusted else load_safely(value)
        except Exception as error:
            if self.trusted:
                raise
            raise ValueError(
                f"{name} is refused with trusted=False: {error}. Save plain numbers, strings, tensors and arrays, "
                f"or give load trusted=True if you would run code from whoever wrote it."
            ) from error


def load(values: dict[str, Any], reader: StorageReader, ranks: Ranks, *, trusted: bool, progress: Progress) -> None:
    """Load into tensors, and replace plain values; by flattened name. All ranks call it, each with its own names."""
    _no_news(ranks)
    planner = Planner(values, trusted=trusted, progress=progress)
    load_state({}, storage_reader=reader, planner=planner, process_group=ranks.group, no_dist=not ranks.distributed)


class FilesReader(FileSystemReader):
    """Reads DCP's files from a folder of a file system; a subclass reads the metadata."""

    def __init__(self, files: FileSystemBase, path: str) -> None:
        super().__init__(path)
        self.fs: FileSystemBase = files
        self.path: str = path


class ValuesReader(FileSystemReader):
    """Reads from values in memory, by flattened name, in place of files. It knows which rows each rank needs.

    Tensors may be views of anything, and are copied row by row where they are asked for.
    """

    trusted = True  # they are here already

    def __init__(self, values: Mapping[str, Any], paths: Mapping[str, tuple[Any, ...]]) -> None:
        super().__init__("")
        self._values = values
        whole = {name: _whole(value) for name, value in values.items()}
        self._metadata = Metadata(whole, planner_data=dict(paths), storage_data={})

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            self._read(item, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, item: ReadItem, planner: LoadPlanner) -> None:
        value = self._values[item.storage_index.fqn]
        if item.type is LoadItemType.BYTE_IO:
            buffer = io.BytesIO()
            torch.save(value, buffer)
            buffer.seek(0)
            planner.load_bytes(item, buffer)
            return
        rows = tuple(slice(start, start + n) for start, n in zip(item.storage_offsets, item.lengths, strict=True))
        target = planner.resolve_tensor(item).detach()
        target.copy_(value[rows])
        planner.commit_tensor(item, target)


def _whole(value: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if not isinstance(value, torch.Tensor):
        return BytesStorageMetadata()
    chunk = ChunkStorageMetadata(torch.Size([0] * value.dim()), value.size())
    return TensorStorageMetadata(TensorProperties(dtype=value.dtype), value.size(), [chunk])


def save(
    plain: dict[str, Any],
    files: FileSystemBase,
    path: str,
    ranks: Ranks,
    *,
    name: str,
    save_id: str,
    prefix: str,
    progress: Progress,
) -> None:
    """Write DCP's files into the folder at ``path``, and its metadata last.

    Args:
        name: Of the checkpoint, for its metadata.
        prefix: What the metadata puts before the names of its files.
    """
    _no_news(ranks)
    writer = _Writer(files, path, StorageMeta(checkpoint_id=name, save_id=save_id), prefix, progress)
    save_state(plain, storage_writer=writer, process_group=ranks.group, no_dist=not ranks.distributed)


class _Writer(FileSystemWriter):
    def __init__(self, files: FileSystemBase, path: str, meta: StorageMeta, prefix: str, progress: Progress) -> None:
        super().__init__(path, sync_files=False, overwrite=True)  # the file system does
        self.fs: FileSystemBase = files
        self.path: str = path
        self._meta, self._prefix, self._progress = meta, prefix, progress

    def storage_meta(self) -> StorageMeta:
        return self._meta

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        self._progress.total = _num_bytes(plan)
        try:
            return super().write_data(plan, planner)
        except OSError as error:
            error.add_note(f"{self._progress.total:,} bytes were to be written by this rank.")
            raise

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, [[_under(self._prefix, result) for result in of] for of in results])


def _under(prefix: str, result: WriteResult) -> WriteResult:
    place = result.storage_data
    return dataclasses.replace(
        result, storage_data=dataclasses.replace(place, relative_path=prefix + place.relative_path)
    )


def _num_bytes(plan: SavePlan) -> int:
    """Of the tensors of a plan; what is pickled is not known before."""
    pieces = [item.tensor_data for item in plan.items if item.tensor_data is not None]
    return sum(math.prod(piece.chunk.sizes) * piece.properties.dtype.itemsize for piece in pieces)


def _no_news(ranks: Ranks) -> None:
    """Without DCP's warning that there is no process group, which is no news to who started one process."""
    if not ranks.distributed:
        warnings.filterwarnings("ignore", message="torch.distributed is (disabled|unavailable)", category=UserWarning)
