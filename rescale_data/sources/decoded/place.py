"""`Place`: the place of a column of lists in the bytes of a fragment; with it the column is read again without Arrow."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow.types as kinds

from rescale_data.sources.arrow_types import ArrowArray, ArrowBuffer
from rescale_data.sources.source import Tokens

ArrayPlace: TypeAlias = tuple[np.dtype[Any], int, int]
"""The dtype, the length and the first byte of an array of numbers in a buffer, as ``np.frombuffer`` takes them."""


class Place(NamedTuple):
    """The places, in a buffer, of the values and of the offsets of a column of lists without nulls."""

    values: ArrayPlace
    offsets: ArrayPlace

    @staticmethod
    def find(lists: ArrowArray, data: ArrowBuffer) -> Place | None:
        """Return the place of a column of lists that Arrow read from ``data`` without a copy; `None` if Arrow copied it."""
        chunk = lists.chunk(0) if lists.num_chunks == 1 else None
        if chunk is None or kinds.is_fixed_size_list(chunk.type) or chunk.null_count or chunk.values.null_count:
            return None
        values = _array_place(chunk.values.to_numpy(zero_copy_only=False), data)
        offsets = _array_place(chunk.offsets.to_numpy(), data)
        return None if values is None or offsets is None else Place(values, offsets)

    def tokens(self, data: ArrowBuffer) -> Tokens:
        """Return the column's tokens from the bytes of a fragment, values not copied; ``ValueError`` if bytes are missing."""
        offsets = np.frombuffer(data, *self.offsets).astype(np.int64)
        start, stop = int(offsets[0]), int(offsets[-1])
        offsets -= start
        return Tokens(np.frombuffer(data, *self.values)[start:stop], offsets)


def _array_place(array: npt.NDArray[Any], data: ArrowBuffer) -> ArrayPlace | None:
    """Return the place of an array in a buffer; `None` if the array is a copy outside of the buffer."""
    first_byte = array.ctypes.data - data.address
    return (array.dtype, len(array), first_byte) if 0 <= first_byte <= data.size - array.nbytes else None
