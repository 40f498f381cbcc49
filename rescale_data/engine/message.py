"""Messages that carry micro batches between processes: the data lies in reused shared memory, and a message says where.

To send a tensor between processes costs a file descriptor, a new shared mapping, and page faults on both sides. Here a worker
packs many micro batches into one *slab*, and uses a few slabs in turn:

    slab 0  | arrays of u | pickle of u | arrays of u+K | ...     sent once, then named by its number
    slab 1  | ...

The receiver copies each micro batch out in one piece, before the worker may write into the slab again. A message holds at most
`MAX_MESSAGE_VALUES` places, so it is small enough for a pipe to take at once.
"""

from __future__ import annotations

import io
import math
import pickle
from collections import deque
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

_ALIGNMENT = 64
MAX_MESSAGE_VALUES = 64
"""The maximum number of packed values in one message."""
PackedBytes: TypeAlias = tuple[torch.Tensor, int]
"""A packed value, ``uint8[any]``, and an offset: the bytes of tensors and arrays lie before it, their pickle behind it."""
_ArrayPlace: TypeAlias = tuple[str, Any, tuple[int, ...], int]  # kind, dtype, shape, offset in bytes


class ByteRange(NamedTuple):
    """The byte range ``[start, stop)`` of one packed value in a slab (shared buffer); its pickle begins at ``pickle_start``."""

    start: int
    pickle_start: int
    stop: int


class Message(NamedTuple):
    """Packed values in one slab (shared buffer); ``memory`` is the slab if the receiver does not have it yet, else `None`."""

    slab_index: int
    memory: torch.Tensor | None
    byte_ranges: list[ByteRange]


class Slabs:
    """The shared-memory buffers (slabs) into which a worker packs its messages, for one `BeginCommand`."""

    def __init__(self) -> None:
        self._slabs: dict[int, torch.Tensor] = {}

    def pack(self, slab: int, values: Sequence[PackedValue]) -> Message:
        """Write packed values into a slab (shared buffer), and return the message that says where they lie."""
        start_offsets = np.cumsum([0, *(_round_up_to_alignment(value.num_bytes) for value in values)]).tolist()
        memory, is_new = self._memory(slab, start_offsets[-1])
        byte_ranges: list[ByteRange] = []
        for value, start in zip(values, start_offsets, strict=False):
            value.write(memory.numpy()[start:])
            byte_ranges.append(ByteRange(start, start + value.pickle_offset, start + value.num_bytes))
        return Message(slab, memory if is_new else None, byte_ranges)

    def _memory(self, slab: int, num_bytes: int) -> tuple[torch.Tensor, bool]:
        memory = self._slabs.get(slab)
        if memory is not None and memory.numel() >= num_bytes:
            return memory, False
        self._slabs[slab] = memory = torch.empty(
            num_bytes * 5 // 4 + _ALIGNMENT, dtype=torch.uint8, device="cpu"
        ).share_memory_()
        return memory, True


class Inbox:
    """The messages of one worker for one `BeginCommand`, and the shared-memory buffers (slabs) in which their values lie.

    Args:
        pin_memory: True if values are to arrive in page-locked memory.

    Attributes:
        messages: The messages that have arrived, or an error in place of the next one.
    """

    def __init__(self, pin_memory: bool) -> None:
        self.messages: SimpleQueue[Message | Exception] = SimpleQueue()
        self._slabs: dict[int, npt.NDArray[np.uint8]] = {}
        self._slab, self._byte_ranges = np.empty(0, dtype=np.uint8), deque[ByteRange]()
        self._pin_memory = pin_memory

    def next_value(self, seconds: float) -> tuple[Any, bool]:
        """Return the next value, and True if no value of its slab is left, which may then be written again.

        Tensors and arrays of the value are views of a single copy of the bytes.

        Raises:
            Empty: No message has come within `seconds`.
            Exception: The error that has come in place of a message.
        """
        if not self._byte_ranges:
            message = self.messages.get(timeout=seconds)
            if isinstance(message, Exception):
                raise message
            if message.memory is not None:
                self._slabs[message.slab_index] = message.memory.numpy()
            self._slab, self._byte_ranges = self._slabs[message.slab_index], deque(message.byte_ranges)
        start, pickle_start, stop = self._byte_ranges.popleft()
        copied_bytes = torch.empty(pickle_start - start, dtype=torch.uint8, device="cpu", pin_memory=self._pin_memory)
        copied_bytes.numpy()[:] = self._slab[start:pickle_start]  # faster than torch's `copy_`
        value = _Unpacker(self._slab[pickle_start:stop], copied_bytes).load()
        return value, not self._byte_ranges


def to_bytes(value: Any) -> PackedBytes:
    """Return a picklable value packed as bytes, and the offset of its pickle."""
    packed_value = PackedValue(value)
    packed_bytes = torch.empty(packed_value.num_bytes, dtype=torch.uint8, device="cpu")
    packed_value.write(packed_bytes.numpy())
    return packed_bytes, packed_value.pickle_offset


def from_bytes(packed_bytes: torch.Tensor, pickle_start: int) -> Any:
    """Return the value that `to_bytes` packed; its tensors and arrays are views of ``packed_bytes``."""
    return _Unpacker(packed_bytes[pickle_start:].numpy(), packed_bytes).load()


class PackedValue(pickle.Pickler):
    """A value packed for transport: the bytes of dense CPU tensors and numeric arrays, then a pickle that refers to them.

    Attributes:
        pickle_offset: The number of bytes of the tensors and arrays, which the pickle follows.
        num_bytes: The number of bytes of both.
    """

    def __init__(self, value: Any) -> None:
        pickle_file = io.BytesIO()
        super().__init__(pickle_file, pickle.HIGHEST_PROTOCOL)
        self.pickle_offset = 0
        self._arrays: list[tuple[int, Any]] = []
        self.dump(value)
        self._pickle_bytes = np.frombuffer(pickle_file.getbuffer(), dtype=np.uint8)
        self.num_bytes = self.pickle_offset + self._pickle_bytes.size

    def write(self, buffer: Any) -> None:
        for offset, array in [*self._arrays, (self.pickle_offset, self._pickle_bytes)]:
            buffer[offset : offset + array.size] = array

    def persistent_id(self, obj: Any) -> _ArrayPlace | None:
        if type(obj) is torch.Tensor:
            if obj.device.type != "cpu" or obj.layout is not torch.strided or obj.requires_grad or obj.is_quantized:
                return None
            dense_tensor = obj.contiguous().reshape(-1)
            return "tensor", obj.dtype, tuple(obj.shape), self._add(dense_tensor.view(torch.uint8).numpy())
        if type(obj) is np.ndarray and obj.dtype.kind in "biufc":
            return ("array", obj.dtype.str, obj.shape, self._add(np.ascontiguousarray(obj).reshape(-1).view(np.uint8)))
        return None

    def _add(self, array: Any) -> int:
        offset = _round_up_to_alignment(self.pickle_offset)
        self._arrays.append((offset, array))
        self.pickle_offset = offset + array.size
        return offset


class _Unpacker(pickle.Unpickler):
    def __init__(self, pickle_bytes: Any, memory: torch.Tensor) -> None:
        super().__init__(io.BytesIO(pickle_bytes))
        self._memory = memory

    def persistent_load(self, pid: _ArrayPlace) -> Any:
        value_kind, dtype, shape, offset = pid
        num_elements = math.prod(shape)
        if value_kind == "array":
            stop = offset + num_elements * np.dtype(dtype).itemsize
            return self._memory.numpy()[offset:stop].view(dtype).reshape(shape)
        return self._memory[offset : offset + num_elements * dtype.itemsize].view(dtype).reshape(shape)


def _round_up_to_alignment(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
