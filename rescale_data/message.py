"""One contiguous buffer for everything that a worker hands over at a time.

A tensor that is sent between processes costs a file descriptor and a shared mapping. A message costs one of each, however many
tensors and arrays it holds: their bytes lie in one buffer, and the pickled rest refers to them by offset.
"""

from __future__ import annotations

import io
import pickle
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

_ALIGNMENT = 64
_Place: TypeAlias = tuple[str, Any, tuple[int, ...], int]  # kind, dtype, shape, offset in bytes


class Message(NamedTuple):
    """``uint8[bytes]`` of all tensors and arrays, and the pickled rest."""

    buffer: torch.Tensor
    rest: bytes


def pack(value: Any) -> Message:
    """Any picklable value as a message; dense CPU tensors and numeric arrays go into its buffer."""
    file = io.BytesIO()
    packer = _Packer(file, protocol=pickle.HIGHEST_PROTOCOL)
    packer.dump(value)
    buffer = torch.empty(packer.size, dtype=torch.uint8)
    into = buffer.numpy()
    for offset, part in packer.parts:
        into[offset : offset + part.size] = part
    return Message(buffer, file.getvalue())


def unpack(message: Message) -> Any:
    """The value that was packed; its tensors and arrays are views of the buffer."""
    return _Unpacker(io.BytesIO(message.rest), message.buffer).load()


class _Packer(pickle.Pickler):
    def __init__(self, file: io.BytesIO, protocol: int) -> None:
        super().__init__(file, protocol)
        self.size = 0
        self.parts: list[tuple[int, Any]] = []

    def persistent_id(self, obj: Any) -> _Place | None:
        if type(obj) is torch.Tensor:
            if obj.device.type != "cpu" or obj.layout is not torch.strided or obj.requires_grad or obj.is_quantized:
                return None
            dense = obj.contiguous().reshape(-1)
            return "tensor", obj.dtype, tuple(obj.shape), self._place(dense.view(torch.uint8).numpy())
        if type(obj) is np.ndarray and obj.dtype.kind in "biufc":
            return "array", obj.dtype.str, obj.shape, self._place(np.ascontiguousarray(obj).reshape(-1).view(np.uint8))
        return None

    def _place(self, part: Any) -> int:
        offset = -(-self.size // _ALIGNMENT) * _ALIGNMENT
        self.parts.append((offset, part))
        self.size = offset + part.size
        return offset


class _Unpacker(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, buffer: torch.Tensor) -> None:
        super().__init__(file)
        self._buffer = buffer

    def persistent_load(self, pid: _Place) -> Any:
        kind, dtype, shape, offset = pid
        if kind == "array":
            size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
            return self._buffer.numpy()[offset : offset + size].view(dtype).reshape(shape)
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        return self._buffer[offset : offset + size].view(dtype).reshape(shape)
