"""The half-public parts of DCP that the package uses: its metadata, planners, and readers and writers of files.

No other module imports it (``tests/test_api.py``). A new torch that changes it is seen by ``tests/checkpoint/test_dcp.py``.

    save      plain values ──► DCP's plan and files, through a file system that may be any
    Reader    loads by flattened name, exactly what fits: tensors in place, plain values by an unpickler without code
    Contents  what a checkpoint holds, in torch's own words: tensors on the meta device
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
import warnings
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self, cast

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemBase, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem, TensorWriteData, WriteItem
from torch.distributed.checkpoint.state_dict_saver import save as save_state
from torch.distributed.checkpoint.storage import WriteResult

from rescale_data.checkpoint.ranks import Ranks, error_with_advice
from rescale_data.checkpoint.storage.values import Memory, load_safely
from rescale_data.errors import DamagedCheckpointError

__all__ = ["FileSystemBase", "Metadata", "MetadataIndex", "ReadItem", "WriteItem"]
_ALIGNED = 64
"""Records in a file of torch.save begin at multiples of this."""


@dataclass(frozen=True)
class Contents:
    """Names, shapes, dtypes and paths of the values in a checkpoint.

    Attributes:
        values: A tensor on the meta device, or None for a plain value, by flattened name.
        paths: The path of each value in the nested state, by flattened name.
        pathless: Names whose paths another tool did not save; such a name stands for its path.
    """

    values: dict[str, torch.Tensor | None]
    paths: dict[str, tuple[Any, ...]]
    pathless: frozenset[str]

    @classmethod
    def from_metadata(cls, metadata: Metadata) -> Contents:
        saved, planned = metadata.state_dict_metadata, metadata.planner_data or {}
        paths = {key: tuple(planned.get(key, (key,))) for key in saved}
        return cls(
            {key: _meta_tensor(value) for key, value in saved.items()}, paths, frozenset(saved.keys() - planned.keys())
        )

    def subtree(self, root: tuple[str, ...]) -> Contents:
        """Return the contents below a path in the nested state; their paths are relative to it."""
        root_length = len(root)
        inner_paths = {name: path for name, path in self.paths.items() if (*map(str, path[:root_length]),) == root}
        paths = {name: path[root_length:] for name, path in inner_paths.items() if len(path) > root_length}
        return Contents({name: self.values[name] for name in paths}, paths, self.pathless)


def _meta_tensor(value_metadata: Any) -> torch.Tensor | None:
    is_tensor = isinstance(value_metadata, TensorStorageMetadata)
    return torch.empty(value_metadata.size, dtype=value_metadata.properties.dtype, device="meta") if is_tensor else None


def save_id_of(metadata: Metadata) -> str:
    return (metadata.storage_meta and metadata.storage_meta.save_id) or ""


def min_file_bytes(metadata: Metadata) -> dict[str, int]:
    """Return the minimum size of each file in bytes: the end of its last piece."""
    sizes: dict[str, int] = {}
    for location in cast(dict[Any, Any], metadata.storage_data or {}).values():
        sizes[location.relative_path] = max(sizes.get(location.relative_path, 0), location.offset + location.length)
    return sizes


class TensorPieces(torch.Tensor):
    """The local pieces of a tensor that a device has sharded, with the methods that DCP calls on a DTensor.

    It has the shape and the dtype of the whole, and no memory for it.

    Attributes:
        write_items: The write item of each piece, from the device's own planner; an item names no entry of the state yet.
        find_piece: Returns the piece at an index, on the CPU.
        commit_piece: A function, called after a piece was read, with its read item and its values.
    """

    write_items: list[WriteItem]
    find_piece: Callable[[MetadataIndex], torch.Tensor]
    commit_piece: Callable[[ReadItem, torch.Tensor], None]

    @classmethod
    def from_items(cls, full_tensor: torch.Tensor, write_items: list[WriteItem]) -> Self:
        placeholder = torch.empty((), dtype=full_tensor.dtype, device="cpu").expand(full_tensor.shape).as_subclass(cls)
        placeholder.write_items = write_items
        return placeholder

    @property
    def unique_write_items(self) -> dict[Any, WriteItem]:
        """Write items of non-empty pieces by offset, each once, even if several devices of this host hold the same piece.

        A planner's own removal of duplicates would drop a piece altogether that occurs twice in one plan.
        """
        return {item.index.offset: item for item in self.write_items if _chunk_of(item).sizes.numel()}

    def detached_copy(self) -> Self:
        """Replace the live pieces by copies; return `self`."""
        copies = {offset: self.find_piece(item.index) for offset, item in self.unique_write_items.items()}
        self.find_piece = lambda index: copies[index.offset]
        return self

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        with_name = functools.partial(dataclasses.replace, fqn=fqn)
        return [dataclasses.replace(item, index=with_name(item.index)) for item in self.unique_write_items.values()]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [_chunk_of(item) for item in self.write_items]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return self.find_piece(index)


def _chunk_of(item: WriteItem) -> ChunkStorageMetadata:
    return cast(TensorWriteData, item.tensor_data).chunk


def flatten(tree: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, tuple[Any, ...]]]:
    """Flatten a nested state as DCP does: return values by flattened name, and paths by flattened name."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(dict(tree))
    return dict(planner.state_dict), dict(planner.mappings)


class StateReader(ABC):
    """Base of readers: loads values of a checkpoint on this process alone.

    Args:
        name: The name of the checkpoint, for errors.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    def read_metadata(self) -> Metadata:
        """Return DCP's metadata of the checkpoint."""

    @abstractmethod
    def read(self, items: list[ReadItem]) -> Iterator[tuple[ReadItem, Any]]:
        """Yield each item with its plain value, or the stored tensor (or piece) that contains it, in any order."""

    @functools.cached_property
    def metadata(self) -> Metadata:
        """DCP's metadata of the checkpoint, read once."""
        return self.read_metadata()

    @functools.cached_property
    def contents(self) -> Contents:
        """Names, shapes, dtypes and paths of the values in the checkpoint."""
        return Contents.from_metadata(self.metadata)

    def load(self, values: dict[str, Any]) -> dict[str, Any]:
        """Load values by flattened name, tensors in place, and return `values`.

        The plan is DCP's own. A tensor of a device with an adapter is `TensorPieces`.
        """
        # Flat already: DCP's own way to flatten a state keeps its tensors alive until a garbage collection (torch 2.9).
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        # Of plain values their names alone: the planner puts None for arrays and sets within those of the caller.
        targets = {name: value if isinstance(value, torch.Tensor) else None for name, value in values.items()}
        planner.set_up_planner(targets, self.metadata)
        try:
            for item, value in self.read(planner.create_local_plan().items):
                target = values[item.dest_index.fqn]
                if item.type is LoadItemType.BYTE_IO:
                    values[item.dest_index.fqn] = value
                    continue
                destination = planner.resolve_tensor(item).detach()
                _copy(item, value, destination)
                if isinstance(target, TensorPieces):
                    target.commit_piece(item, destination)
        except OSError as error:
            raise error_with_advice(error, f"Loading {self.name}") from error
        return values

    def values(self, names: Iterable[str]) -> dict[str, Any]:
        """Return plain values and whole tensors on the CPU, by flattened name."""
        saved = {name: self.contents.values[name] for name in names}
        return self.load({key: None if t is None else torch.empty_like(t, device="cpu") for key, t in saved.items()})


def _copy(item: ReadItem, stored_tensor: torch.Tensor, target: torch.Tensor) -> None:
    """Copy the part that a read item requests from a stored tensor (or piece) into a tensor."""
    requested_part = stored_tensor[
        tuple(slice(start, start + length) for start, length in zip(item.storage_offsets, item.lengths, strict=True))
    ]
    if (requested_part.shape, requested_part.dtype) != (target.shape, target.dtype):
        saved_text, expected = (f"{tensor.dtype} {list(tensor.shape)}" for tensor in (requested_part, target))
        raise DamagedCheckpointError(
            f"{item.storage_index.fqn} is {saved_text} in its file, and {expected} in the metadata"
        )
    target.copy_(requested_part)


class FilesReader(StateReader):
    """Reads DCP's files in a folder, each piece once and with its checksum; a subclass reads the metadata.

    Attributes:
        path: The path of the folder.
        before_each_file: A function, called before each file that is read.
    """

    def __init__(self, file_system: FileSystemBase, path: str) -> None:
        super().__init__(path)
        self._file_system, self.path = file_system, path
        self.before_each_file: Callable[[], object] = lambda: None

    @abstractmethod
    def crc32s(self, name: str) -> str:
        """Return the checksums of a file's pieces, in hexadecimal as in `FileRecord`; empty if there are none."""

    @functools.cached_property
    def piece_checksums(self) -> dict[str, dict[tuple[int, int], int | None]]:
        """Checksum of each piece, by file name and then by (offset, size), in the order of offsets."""
        file_ranges: dict[str, list[tuple[int, int]]] = {}
        for location in cast(dict[Any, Any], self.metadata.storage_data).values():
            file_ranges.setdefault(location.relative_path, []).append((location.offset, location.length))
        return {name: _with_checksums(name, sorted(ranges), self.crc32s(name)) for name, ranges in file_ranges.items()}

    def read(self, items: list[ReadItem]) -> Iterator[tuple[ReadItem, Any]]:
        locations = [cast(dict[Any, Any], self.metadata.storage_data)[item.storage_index] for item in items]
        if any(location.transform_descriptors for location in locations):
            raise ValueError(
                f"{self.name} was compressed when it was saved. Load it with DCP's own load, and save it anew."
            )
        sorted_reads = sorted((piece.relative_path, piece.offset, piece.length, i) for i, piece in enumerate(locations))
        buffer = Memory.empty(0)  # tensors are copied out of it; fresh pages for each would take longer than all else
        for name, pieces_in_file in itertools.groupby(sorted_reads, operator.itemgetter(0)):
            self.before_each_file()
            with self._file_system.create_stream(self._file_system.concat_path(self.path, name), "rb") as stream:
                for (start, size), same_piece in itertools.groupby(pieces_in_file, operator.itemgetter(1, 2)):
                    piece_items = [items[index] for *_, index in same_piece]
                    is_bytes = piece_items[0].type is LoadItemType.BYTE_IO
                    memory = Memory.empty(size) if is_bytes else _buffer_for(buffer, size)
                    buffer = buffer if is_bytes else memory
                    read_piece(stream, name, start, size, self.piece_checksums[name][start, size], memory)
                    value = _value_in(memory, piece_items[0].storage_index.fqn)
                    yield from ((item, value) for item in piece_items)


def _value_in(memory: Memory, name: str) -> Any:
    try:
        return load_safely(memory)
    except Exception as error:
        raise ValueError(
            f"{name} is refused: {error}. Save plain numbers, strings, tensors and arrays in its place."
        ) from error


def read_piece(stream: Any, name: str, start: int, num_bytes: int, crc32: int | None, buffer: Memory) -> None:
    """Read a piece of a file; raise ``DamagedCheckpointError`` if it is too short or its checksum is wrong.

    Args:
        buffer: Memory that it is read into, at its end: there an archive is found, whatever lies before it.
    """
    piece = memoryview(buffer)[len(buffer) - num_bytes :]
    stream.seek(start)
    if (bytes_read := stream.readinto(piece)) != num_bytes:
        raise DamagedCheckpointError(f"{name} ends {num_bytes - bytes_read} bytes too early, at {start + bytes_read}")
    if crc32 not in (None, zlib.crc32(piece)):
        raise DamagedCheckpointError(
            f"{name} is not what was saved: its bytes {start} to {start + num_bytes} have another checksum"
        )


def _buffer_for(used_buffer: Memory, size: int) -> Memory:
    """Return a buffer that can hold ``size`` aligned bytes at its end, the used buffer if possible."""
    return used_buffer if len(used_buffer) >= size and (len(used_buffer) - size) % _ALIGNED == 0 else Memory.empty(size)


def _with_checksums(name: str, ranges: list[tuple[int, int]], crc32s: str) -> dict[tuple[int, int], int | None]:
    if not crc32s:
        return dict.fromkeys(ranges)
    checksums = [int(crc32s[offset : offset + 8], 16) for offset in range(0, len(crc32s), 8)]
    if len(checksums) != len(ranges):
        raise DamagedCheckpointError(
            f"{name} has {len(ranges)} pieces in the metadata and {len(checksums)} in the manifest"
        )
    return dict(zip(ranges, checksums, strict=True))


class ValuesReader(StateReader):
    """Reader of a nested state in memory instead of files, by flattened name.

    Tensors may be views of anything, and are copied row by row where they are asked for.
    """

    def __init__(self, name: str, tree: Mapping[str, Any]) -> None:
        super().__init__(name)
        self._values, self._paths_by_name = flatten(tree)

    def read_metadata(self) -> Metadata:
        metadata = {key: _unsharded_metadata(value) for key, value in self._values.items()}
        return Metadata(metadata, planner_data=self._paths_by_name, storage_data={})

    def read(self, items: list[ReadItem]) -> Iterator[tuple[ReadItem, Any]]:
        return ((item, self._values[item.storage_index.fqn]) for item in items)


def _unsharded_metadata(value: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if not isinstance(value, torch.Tensor):
        return BytesStorageMetadata()
    chunk = ChunkStorageMetadata(torch.Size([0] * value.dim()), value.size())
    return TensorStorageMetadata(TensorProperties(dtype=value.dtype), value.size(), [chunk])


def save(
    state_dict: dict[str, Any],
    file_system: FileSystemBase,
    path: str,
    ranks: Ranks,
    *,
    name: str,
    save_id: str,
    file_prefix: str,
) -> None:
    """Write DCP's files into the folder at ``path``, and its metadata last.

    Args:
        name: The name of the checkpoint, for its metadata.
        file_prefix: The prefix that the metadata puts before the names of its files.
    """
    if not ranks.is_distributed:  # no news to who started one process
        warnings.filterwarnings("ignore", message="torch.distributed is (disabled|unavailable)", category=UserWarning)
    writer = _Writer(file_system, path, StorageMeta(checkpoint_id=name, save_id=save_id), file_prefix)
    save_state(state_dict, storage_writer=writer, process_group=ranks.group, no_dist=not ranks.is_distributed)


class _Writer(FileSystemWriter):
    def __init__(self, file_system: FileSystemBase, path: str, storage_metadata: StorageMeta, file_prefix: str) -> None:
        super().__init__(path, sync_files=False, overwrite=True)  # the file system does
        self.fs: FileSystemBase = file_system
        self.path: str = path
        self._storage_metadata, self._file_prefix = storage_metadata, file_prefix

    def storage_meta(self) -> StorageMeta:
        return self._storage_metadata

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        for result in itertools.chain(*results):
            result.storage_data.relative_path = self._file_prefix + result.storage_data.relative_path
        super().finish(metadata, results)
