"""Write a file that ``torch.load`` reads without having its tensors at once.

torch writes all of it but the tensors' bytes (``skip_data``) into a sparse file. Its records go into an uncompressed zip
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
from typing import Any, BinaryIO

import torch
from torch.serialization import skip_data

_ALIGNMENT = 64
_LOCAL_HEADER = 30  # bytes of a zip record's header before its name
_ZIP64 = 20  # bytes that zipfile adds to a local header for sizes over 4 GB


class TorchFile:
    """A file of ``torch.save`` whose tensors are written one by one.

    Args:
        sizes: Shape and dtype of those that come later, by name.

    Attributes:
        tensors: Stand for them in what is written, and have no memory.
    """

    def __init__(self, sizes: Mapping[str, tuple[torch.Size, torch.dtype]]) -> None:
        largest: dict[torch.dtype, int] = {}
        for size, dtype in sizes.values():
            largest[dtype] = max(largest.get(dtype, 0), math.prod(size) * dtype.itemsize)
        pages = {dtype: mmap.mmap(-1, num_bytes or 1) for dtype, num_bytes in largest.items()}  # never touched
        self.tensors = {name: _without_memory(size, dtype, pages[dtype]) for name, (size, dtype) in sizes.items()}

    def write(self, stream: BinaryIO, tree: Any, read: Callable[[list[str]], Iterable[torch.Tensor]]) -> None:
        """Write ``tree``, which has ``tensors`` in it, others, and plain values.

        Args:
            read: Gives the tensors for these names, in their order.
        """
        names = {id(tensor): name for name, tensor in self.tensors.items()}
        found = _Tensors.of(tree, set(names))
        following = iter(read([names[id(tensor)] for tensor in found if id(tensor) in names]))
        contents = (next(following) if id(tensor) in names else _storage(tensor) for tensor in found)
        with tempfile.TemporaryFile() as skeleton:
            with skip_data():
                torch.save(tree, skeleton)
            with zipfile.ZipFile(skeleton) as records, zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
                for info in records.infolist():
                    is_data = "/data/" in info.filename
                    content = as_buffer(next(contents)) if is_data else records.read(info)
                    _write_record(archive, stream, info, content)


def as_buffer(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor on the CPU, without a copy if it is contiguous."""
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


class _Tensors(pickle.Pickler):
    """Finds tensors, one a storage, in the order in which ``torch.save`` meets them."""

    def __init__(self, pending: set[int]) -> None:
        super().__init__(io.BytesIO(), protocol=2)
        self.pending = pending
        self.found: dict[tuple[str, int], torch.Tensor] = {}

    @classmethod
    def of(cls, tree: Any, pending: set[int]) -> list[torch.Tensor]:
        pickler = cls(pending)
        pickler.dump(tree)
        return list(pickler.found.values())

    def persistent_id(self, obj: Any, /) -> Any:
        if not isinstance(obj, torch.Tensor):
            return None
        address = 0 if id(obj) in self.pending else obj.untyped_storage().data_ptr()
        self.found.setdefault(("memory", address) if address else ("object", id(obj)), obj)
        return "tensor"


def _without_memory(size: torch.Size, dtype: torch.dtype, page: mmap.mmap) -> torch.Tensor:
    """A tensor with a storage of its own over pages that nobody reads or writes."""
    num_bytes = math.prod(size) * dtype.itemsize
    if num_bytes == 0:
        return torch.empty(size, dtype=dtype)
    return torch.frombuffer(page, dtype=torch.uint8, count=num_bytes).view(dtype).reshape(size)


def _storage(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())  # type: ignore[call-overload]


def _write_record(archive: zipfile.ZipFile, stream: BinaryIO, torchs: zipfile.ZipInfo, content: Any) -> None:
    if len(content) != torchs.file_size:
        raise ValueError(f"{len(content)} bytes for the record {torchs.filename}, which has {torchs.file_size}")
    info = zipfile.ZipInfo(torchs.filename, date_time=(1980, 1, 1, 0, 0, 0))
    header = stream.tell() + _LOCAL_HEADER + len(info.filename) + _ZIP64 + 4
    padding = -header % _ALIGNMENT
    info.extra = b"FB" + padding.to_bytes(2, "little") + b"Z" * padding
    with archive.open(info, "w", force_zip64=True) as record:
        record.write(content)
