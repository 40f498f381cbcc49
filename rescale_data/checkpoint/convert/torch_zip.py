"""Write a file that ``torch.load`` reads without having its tensors at once.

The format is that of ``torch.save`` since 1.6: an uncompressed zip archive with one pickle, in which each storage is a
persistent id, and one record a storage. The records are aligned, so that a memory-mapped tensor is, too.
"""

from __future__ import annotations

import collections
import io
import math
import pickle
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

import torch

_ALIGNMENT = 64
_ROOT = "archive"
_LOCAL_HEADER = 30  # bytes of a zip record's header before its name
_ZIP64 = 20  # bytes that zipfile adds to a local header for sizes over 4 GB


@dataclass(frozen=True, eq=False)
class Pending:
    """A contiguous tensor that is written later, by the order in which it stands in the pickle."""

    size: torch.Size
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.size) * self.dtype.itemsize


@dataclass(frozen=True)
class _Storage:
    key: str
    kind: Any
    numel: int


class _Pickler(pickle.Pickler):
    """Pickles ``Pending`` as the tensor it will be, and tensors (in a tuple, which is one value) as ``torch.save`` does."""

    def __init__(self, stream: BinaryIO) -> None:
        super().__init__(stream, protocol=2)
        self.records: list[Pending | torch.Tensor] = []

    def reducer_override(self, obj: Any, /) -> Any:
        if isinstance(obj, Pending):
            return self._reduced(obj, obj)
        if isinstance(obj, torch.Tensor) and obj.layout is torch.strided and not obj.is_quantized:
            return self._reduced(Pending(obj.size(), obj.dtype), obj)
        return NotImplemented

    def _reduced(self, obj: Pending, record: Pending | torch.Tensor) -> Any:
        # How torch rebuilds a tensor of this dtype is asked of torch.
        rebuild, template, *_ = cast("tuple[Any, tuple[Any, ...]]", torch.empty(0, dtype=obj.dtype).__reduce_ex__(2))
        storage = self._storage(obj, template[0])
        hooks: collections.OrderedDict[str, Any] = collections.OrderedDict()
        self.records.append(record)
        stride = torch.empty(obj.size, device="meta").stride()
        return rebuild, (storage, 0, tuple(obj.size), stride, False, hooks, *template[6:])

    def persistent_id(self, obj: Any, /) -> Any:
        return ("storage", obj.kind, obj.key, "cpu", obj.numel) if isinstance(obj, _Storage) else None

    def _storage(self, pending: Pending, template: Any) -> _Storage:
        key = str(len(self.records))
        if isinstance(template, torch.UntypedStorage):
            return _Storage(key, torch.UntypedStorage, pending.num_bytes)
        return _Storage(key, getattr(torch, _legacy_name(pending.dtype)), math.prod(pending.size))


def _legacy_name(dtype: torch.dtype) -> str:
    """``"FloatStorage"``: the class that stands for a dtype in the format."""
    return torch.empty(0, dtype=dtype).type().removeprefix("torch.").replace("Tensor", "Storage")


def write_torch_file(stream: BinaryIO, tree: Any, tensors: Iterable[torch.Tensor]) -> None:
    """Write ``tree`` to a seekable stream.

    Args:
        tree: Plain values, tensors, and ``Pending``, each of which occurs once.
        tensors: The tensors for them, in the order of a walk through ``tree``.
    """
    pickled = io.BytesIO()
    pickler = _Pickler(pickled)
    pickler.dump(tree)
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
        _record(archive, stream, "data.pkl", pickled.getbuffer())
        _record(archive, stream, "byteorder", b"little")
        following = iter(tensors)
        for key, record in enumerate(pickler.records):
            tensor = _checked(next(following), record) if isinstance(record, Pending) else record
            _record(archive, stream, f"data/{key}", as_buffer(tensor))
        _record(archive, stream, "version", b"3\n")


def _checked(tensor: torch.Tensor, pending: Pending) -> torch.Tensor:
    if (tensor.size(), tensor.dtype) != (pending.size, pending.dtype):
        raise ValueError(f"{tensor.dtype} {list(tensor.size())} is not {pending}")
    return tensor


def as_buffer(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor on the CPU, without a copy if it is contiguous."""
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def _record(archive: zipfile.ZipFile, stream: BinaryIO, name: str, content: Any) -> None:
    info = zipfile.ZipInfo(f"{_ROOT}/{name}", date_time=(1980, 1, 1, 0, 0, 0))
    header = stream.tell() + _LOCAL_HEADER + len(info.filename) + _ZIP64 + 4
    padding = -header % _ALIGNMENT
    info.extra = b"FB" + padding.to_bytes(2, "little") + b"Z" * padding
    with archive.open(info, "w", force_zip64=True) as record:
        record.write(content)
