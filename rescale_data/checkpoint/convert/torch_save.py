"""Convert between DCP folders and files of ``torch.save``, a bounded number of bytes at a time.

A file is mapped, not loaded: every rank that loads it copies its own rows out of it. The pages are read from disk once a host,
however many ranks it has; there is no communication, so nothing hangs where ranks ask for different names.

torch writes all of a file but the tensors' bytes (``skip_data``), into a sparse one. Its records go into an uncompressed zip
archive with checksums, tensors as they come, aligned so that a mapped tensor is, too.
"""

from __future__ import annotations

import io
import math
import mmap
import pickle
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Mapping
from typing import Any, BinaryIO, cast

import torch
from torch.serialization import skip_data

from rescale_data.checkpoint.convert.stored import DEFAULT_BUDGET_BYTES, StoredCheckpoint
from rescale_data.checkpoint.saving import save_from_one_process
from rescale_data.checkpoint.storage.open import CheckpointReader, memory_mappable_path, open_store, read_checkpoint
from rescale_data.checkpoint.storage.store import StrPath
from rescale_data.checkpoint.storage.values import Memory, load_safely
from rescale_data.checkpoint.tree import tree_of
from rescale_data.errors import checks_argument_types

_ALIGNMENT_BYTES = 64
_LOCAL_HEADER_BYTES = 30  # bytes of a zip record's header before its name
_ZIP64_EXTRA_BYTES = 20  # bytes that zipfile adds to a local header for sizes over 4 GB


@checks_argument_types
def to_torch_save(
    path: StrPath,
    file: StrPath,
    *,
    name: str | None = None,
    budget: int = DEFAULT_BUDGET_BYTES,
    storage_options: Mapping[str, Any] | None = None,
) -> None:
    """Write a DCP folder as one file that ``torch.load(file, mmap=True, weights_only=True)`` reads.

    Everything travels: tensors, plain values and the loader's state. Memory stays within ``budget`` bytes, or the largest
    tensor and its largest stored piece, whatever the size of the checkpoint. Call it on one rank.

    Args:
        path: The path of the checkpoint.
        file: A local path or a URL; it appears when it is whole, and replaces one that was there.
        name: The name of one top-level entry, whose value is then the file's content; default: all entries.
        storage_options: Passed on to fsspec, for ``path`` and for ``file``.

    Raises:
        FileNotFoundError: no checkpoint at ``path``.
        IsADirectoryError: ``file`` is a folder.
        ValueError: damaged files, nothing named ``name``, or values that only unpickling code could read.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from rescale_data import checkpoint
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     checkpoint.save(f"{folder}/step-1", {"weight": torch.ones(2)})
        ...     checkpoint.to_torch_save(f"{folder}/step-1", f"{folder}/step-1.pt")
        ...     torch.load(f"{folder}/step-1.pt")
        {'weight': tensor([1., 1.])}
    """
    store, final_path = open_store(file, storage_options, to_write=True)

    def write(reader: CheckpointReader) -> None:
        stored = StoredCheckpoint(reader, name)
        writer = TorchFileWriter({key: (tensor.shape, tensor.dtype) for key, tensor in stored.meta_tensors.items()})
        tree = tree_of(stored.paths_by_name, stored.values() | writer.tensors, stored.unflatten_hints)
        store.put(final_path, lambda stream: writer.write(stream, tree, lambda names: stored.stream(names, budget)))

    read_checkpoint(path, write, storage_options=storage_options)


@checks_argument_types
def from_torch_save(
    file: StrPath, path: StrPath, *, name: str | None = None, storage_options: Mapping[str, Any] | None = None
) -> None:
    """Convert a file of ``torch.save`` to a DCP folder; its tensors are mapped, not loaded. Call it on one rank.

    Args:
        file: Local, in the zip format, with tensors and plain values only.
        path: The path of the checkpoint, which must not exist.
        name: Put all of it under this top-level name, as ``load`` will ask for it: ``"model"``.

    Raises:
        FileNotFoundError: no such file.
        ValueError: it is no such file, or holds code; or ``path`` is taken.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from rescale_data import checkpoint
        >>> state = {"weight": torch.zeros(2)}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     torch.save({"weight": torch.ones(2)}, f"{folder}/model.pt")
        ...     checkpoint.from_torch_save(f"{folder}/model.pt", f"{folder}/step-0")
        ...     report = checkpoint.load(f"{folder}/step-0", state)
        >>> state["weight"]
        tensor([1., 1.])
    """
    mapped_state = memory_map_file(memory_mappable_path(file))
    save_from_one_process(path, mapped_state if name is None else {name: mapped_state}, storage_options)


def memory_map_file(file: str) -> dict[str, Any]:
    """Return the dict in a file of ``torch.save``; its tensors are memory-mapped, and read when they are used.

    Raises:
        ValueError: it is no such file, holds code, or is not a dict.
    """
    try:
        file_content = load_safely(Memory.from_file(file))
    except ValueError as error:
        raise ValueError(
            f"{file} cannot be read: {error}. It must be a file of torch.save in its zip format (the default since 1.6) that "
            f"holds tensors and plain values only."
        ) from error
    if not isinstance(file_content, Mapping):
        raise ValueError(
            f"{file} holds a {type(cast(object, file_content)).__name__}; a checkpoint is a dict of names to values."
        )
    return dict(cast(Mapping[str, Any], file_content))


class TorchFileWriter:
    """Writer of a ``torch.save`` file that receives its tensors one by one.

    Args:
        shapes_dtypes: Shape and dtype of the tensors that come later, by name.

    Attributes:
        tensors: Placeholders for these tensors in the value that is written; they take no memory.
    """

    def __init__(self, shapes_dtypes: Mapping[str, tuple[torch.Size, torch.dtype]]) -> None:
        max_bytes: dict[torch.dtype, int] = {}
        for size, dtype in shapes_dtypes.values():
            max_bytes[dtype] = max(max_bytes.get(dtype, 0), math.prod(size) * dtype.itemsize)
        mmaps = {dtype: mmap.mmap(-1, num_bytes or 1) for dtype, num_bytes in max_bytes.items()}  # never touched
        self.tensors = {name: _placeholder(size, dtype, mmaps[dtype]) for name, (size, dtype) in shapes_dtypes.items()}

    def write(self, stream: BinaryIO, tree: Any, read_tensors: Callable[[list[str]], Iterable[torch.Tensor]]) -> None:
        """Write ``tree`` as a ``torch.save`` file, with real tensors in place of the placeholders ``tensors``.

        Args:
            read_tensors: Returns the tensors with the given names, in their order.
        """
        names_by_id = {id(tensor): name for name, tensor in self.tensors.items()}
        tensors = _TensorCollector.collect(tree, set(names_by_id))
        new_tensors = iter(read_tensors([names_by_id[id(tensor)] for tensor in tensors if id(tensor) in names_by_id]))
        record_contents = (next(new_tensors) if id(tensor) in names_by_id else _storage(tensor) for tensor in tensors)
        with tempfile.TemporaryFile() as skeleton:
            with skip_data():
                torch.save(tree, skeleton)
            with zipfile.ZipFile(skeleton) as skeleton_zip, zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
                for record_info in skeleton_zip.infolist():
                    is_data = "/data/" in record_info.filename
                    record_bytes = as_buffer(next(record_contents)) if is_data else skeleton_zip.read(record_info)
                    _write_record(archive, stream, record_info, record_bytes)


def as_buffer(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor on the CPU, without a copy if it is contiguous."""
    flat_tensor = tensor.detach().contiguous().reshape(-1)
    return flat_tensor.view(torch.uint8).numpy().data if flat_tensor.numel() else memoryview(b"")


class _TensorCollector(pickle.Pickler):
    """Pickler that collects the tensors of a value, one for each storage, in the order of ``torch.save``."""

    def __init__(self, placeholder_ids: set[int]) -> None:
        super().__init__(io.BytesIO(), protocol=2)
        self.placeholder_ids = placeholder_ids
        self.tensors: dict[tuple[str, int], torch.Tensor] = {}

    @classmethod
    def collect(cls, tree: Any, placeholder_ids: set[int]) -> list[torch.Tensor]:
        pickler = cls(placeholder_ids)
        pickler.dump(tree)
        return list(pickler.tensors.values())

    def persistent_id(self, obj: Any, /) -> Any:
        if not isinstance(obj, torch.Tensor):
            return None
        address = 0 if id(obj) in self.placeholder_ids else obj.untyped_storage().data_ptr()
        self.tensors.setdefault(("memory", address) if address else ("object", id(obj)), obj)
        return "tensor"


def _placeholder(size: torch.Size, dtype: torch.dtype, mapped_pages: mmap.mmap) -> torch.Tensor:
    """Return a placeholder tensor with its own storage, over mapped pages that are never touched."""
    num_bytes = math.prod(size) * dtype.itemsize
    if num_bytes == 0:
        return torch.empty(size, dtype=dtype, device="cpu")
    return torch.frombuffer(mapped_pages, dtype=torch.uint8, count=num_bytes).view(dtype).reshape(size)


def _storage(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(tensor.untyped_storage())  # type: ignore[call-overload]


def _write_record(archive: zipfile.ZipFile, stream: BinaryIO, torch_info: zipfile.ZipInfo, content: Any) -> None:
    if len(content) != torch_info.file_size:
        raise ValueError(f"{len(content)} bytes for the record {torch_info.filename}, which has {torch_info.file_size}")
    zip_info = zipfile.ZipInfo(torch_info.filename, date_time=(1980, 1, 1, 0, 0, 0))
    data_start = stream.tell() + _LOCAL_HEADER_BYTES + len(zip_info.filename) + _ZIP64_EXTRA_BYTES + 4
    padding = -data_start % _ALIGNMENT_BYTES
    zip_info.extra = b"FB" + padding.to_bytes(2, "little") + b"Z" * padding
    with archive.open(zip_info, "w", force_zip64=True) as record:
        record.write(content)
