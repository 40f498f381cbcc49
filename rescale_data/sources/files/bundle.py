"""An index on disk: one memory-mapped file of named arrays and a JSON header, whose pages all processes share.

"RDINDEX2" | int64 length of the header | header, JSON | array | array | ... | int64 checksum      each at a multiple of 8

The checksum (CRC-32) covers the first 16 MiB. It is checked when the index is opened, to find a number that the disk has
changed.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt

_MAGIC = b"RDINDEX2"
_CHECKSUMMED_BYTES = 1 << 24


class Bundle:
    """An open index file, which pickles as its path; raises ``ValueError`` if the file is incomplete or damaged."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._data = np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
        if self._data[:8].tobytes() != _MAGIC or _checksum(self._data[:-8]) != self._data[-8:].tobytes():
            raise ValueError(f"{path} is no index, or not whole")
        header_length = int(self._data[8:16].view(np.int64)[0])
        self._header: dict[str, Any] = json.loads(self._data[16 : 16 + header_length].tobytes())
        self.names = list(self._header["arrays"])
        """Names of the arrays in the index file."""
        self.json_metadata: dict[str, Any] = self._header["facts"]
        """The JSON values that the index file stores together with its arrays."""
        self._arrays_begin = _aligned(16 + header_length)
        if self._arrays_begin + self._header["bytes"] + 8 != len(self._data):
            raise ValueError(f"{path} is not whole")

    def __reduce__(self) -> tuple[type[Bundle], tuple[str]]:
        return Bundle, (self.path,)

    def array(self, name: str) -> npt.NDArray[Any]:
        """Return the array called ``name`` as a view of the memory-mapped index file."""
        dtype, offset, num_values = self._header["arrays"][name]
        start = self._arrays_begin + offset
        return self._data[start : start + num_values * np.dtype(dtype).itemsize].view(dtype)


class Strings(Sequence[str]):
    """Sequence of strings in an index file, each decoded when it is read."""

    def __init__(self, bundle: Bundle, name: str) -> None:
        self._text, self._end_offsets = bundle.array(f"{name}.text"), bundle.array(f"{name}.ends")

    def __len__(self) -> int:
        return len(self._end_offsets) - 1

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(index)
        start, stop = self._end_offsets[index : index + 2].tolist()
        return self._text[start:stop].tobytes().decode()


def string_arrays(name: str, string_list: Sequence[str]) -> dict[str, npt.NDArray[Any]]:
    """Return, by name, the arrays in which an index file stores a list of strings (see `Strings`)."""
    encoded_strings = [value.encode() for value in string_list]
    string_ends = np.cumsum([0, *map(len, encoded_strings)], dtype=np.int64)
    return {f"{name}.text": np.frombuffer(b"".join(encoded_strings), dtype=np.uint8), f"{name}.ends": string_ends}


def write_bundle(path: str, json_metadata: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Write an index file from arrays and JSON values. A process that reads it at the same time may see half of it."""
    array_specs: dict[str, tuple[str, int, int]] = {}
    arrays_bytes = 0
    for name, array in arrays.items():
        array_specs[name] = (array.dtype.str, arrays_bytes, len(array))
        arrays_bytes += _aligned(array.nbytes)
    header = json.dumps({"facts": dict(json_metadata), "arrays": array_specs, "bytes": arrays_bytes}).encode()
    with open(path, "wb") as file:
        file.write(_MAGIC + struct.pack("<q", len(header)) + header)
        file.write(bytes(_aligned(16 + len(header)) - 16 - len(header)))
        for array in arrays.values():
            file.write(cast(Any, np.ascontiguousarray(array)).data)
            file.write(bytes(_aligned(array.nbytes) - array.nbytes))
    content = np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
    with open(path, "ab") as file:
        file.write(_checksum(content))


def _checksum(data: npt.NDArray[np.uint8]) -> bytes:
    return struct.pack("<q", zlib.crc32(data[:_CHECKSUMMED_BYTES].data))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // 8) * 8
