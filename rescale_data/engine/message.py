"""Micro batches between processes: their bytes lie in shared memory that is used again, a small pickle says where.

A tensor that is sent between processes costs a file descriptor, a new shared mapping and the page faults of both sides. Here a
worker packs many micro batches into one *slab*, and uses a few slabs in turn:

    slab 0  | micro batch u | micro batch u+K | ...          sent once, then named by its number
    slab 1  | ...

Whoever receives them copies each micro batch out, in one piece, before the worker may write into the slab again.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

_ALIGNMENT = 64
Bytes: TypeAlias = tuple[torch.Tensor, int]
"""A value as ``uint8[any]``: its tensors and arrays, and, from the byte that is told on, the pickle that refers to them."""
_Place: TypeAlias = tuple[str, Any, tuple[int, ...], int]  # kind, dtype, shape, offset in bytes


class Part(NamedTuple):
    """One packed value: bytes ``[start, stop)`` of the slab, and the pickle that refers to them."""

    start: int
    stop: int
    rest: bytes


class Message(NamedTuple):
    """Packed values in one slab; ``memory`` is the slab where the receiver does not have it yet."""

    slab: int
    memory: torch.Tensor | None
    parts: list[Part]


class Slabs:
    """The slabs that a worker writes into."""

    def __init__(self) -> None:
        self._slabs: dict[int, torch.Tensor] = {}

    def pack(self, slab: int, values: Sequence[Any]) -> Message:
        """Any picklable values as a message; dense CPU tensors and numeric arrays go into the slab."""
        packers = [_Packer(value) for value in values]
        starts = np.cumsum([0, *(_aligned(packer.size) for packer in packers)]).tolist()
        memory, is_new = self._memory(slab, starts[-1])
        parts: list[Part] = []
        for packer, start in zip(packers, starts, strict=False):
            packer.write(memory.numpy()[start:])
            parts.append(Part(start, start + packer.size, packer.rest))
        return Message(slab, memory if is_new else None, parts)

    def _memory(self, slab: int, size: int) -> tuple[torch.Tensor, bool]:
        memory = self._slabs.get(slab)
        if memory is not None and memory.numel() >= size:
            return memory, False
        self._slabs[slab] = memory = torch.empty(
            size * 5 // 4 + _ALIGNMENT, dtype=torch.uint8, device="cpu"
        ).share_memory_()
        return memory, True


class Inbox:
    """The slabs of one worker, as the receiver sees them.

    Args:
        pin_memory: Whether values arrive in page-locked memory.
    """

    def __init__(self, pin_memory: bool) -> None:
        self._slabs: dict[int, torch.Tensor] = {}
        self._pin = pin_memory

    def open(self, message: Message) -> list[tuple[torch.Tensor, Part]]:
        """The values of a message, still packed; they must be unpacked before the slab is used again."""
        if message.memory is not None:
            self._slabs[message.slab] = message.memory
        return [(self._slabs[message.slab], part) for part in message.parts]

    def unpack(self, memory: torch.Tensor, part: Part) -> Any:
        """One value; its tensors and arrays are views of one copy of their bytes."""
        copy = torch.empty(part.stop - part.start, dtype=torch.uint8, device="cpu", pin_memory=self._pin)
        copy.copy_(memory[part.start : part.stop])
        return _Unpacker(part.rest, copy).load()


def to_bytes(value: Any) -> Bytes:
    """Any picklable value."""
    packer = _Packer(value)
    whole = torch.empty(packer.size + len(packer.rest), dtype=torch.uint8, device="cpu")
    packer.write(whole.numpy())
    whole.numpy()[packer.size :] = np.frombuffer(packer.rest, dtype=np.uint8)
    return whole, packer.size


def from_bytes(whole: torch.Tensor, start: int) -> Any:
    """What `to_bytes` was given; its tensors and arrays are views of ``whole``."""
    return _Unpacker(whole.numpy()[start:].tobytes(), whole).load()


class _Packer(pickle.Pickler):
    def __init__(self, value: Any) -> None:
        self._file = io.BytesIO()
        super().__init__(self._file, pickle.HIGHEST_PROTOCOL)
        self.size = 0
        self._arrays: list[tuple[int, Any]] = []
        self.dump(value)

    @property
    def rest(self) -> bytes:
        return self._file.getvalue()

    def write(self, into: Any) -> None:
        for offset, array in self._arrays:
            into[offset : offset + array.size] = array

    def persistent_id(self, obj: Any) -> _Place | None:
        if type(obj) is torch.Tensor:
            if obj.device.type != "cpu" or obj.layout is not torch.strided or obj.requires_grad or obj.is_quantized:
                return None
            dense = obj.contiguous().reshape(-1)
            return "tensor", obj.dtype, tuple(obj.shape), self._place(dense.view(torch.uint8).numpy())
        if type(obj) is np.ndarray and obj.dtype.kind in "biufc":
            return "array", obj.dtype.str, obj.shape, self._place(np.ascontiguousarray(obj).reshape(-1).view(np.uint8))
        return None

    def _place(self, array: Any) -> int:
        offset = _aligned(self.size)
        self._arrays.append((offset, array))
        self.size = offset + array.size
        return offset


class _Unpacker(pickle.Unpickler):
    def __init__(self, rest: bytes, memory: torch.Tensor) -> None:
        super().__init__(io.BytesIO(rest))
        self._memory = memory

    def persistent_load(self, pid: _Place) -> Any:
        kind, dtype, shape, offset = pid
        count = int(np.prod(shape, dtype=np.int64))
        if kind == "array":
            stop = offset + count * np.dtype(dtype).itemsize
            return self._memory.numpy()[offset:stop].view(dtype).reshape(shape)
        return self._memory[offset : offset + count * dtype.itemsize].view(dtype).reshape(shape)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
