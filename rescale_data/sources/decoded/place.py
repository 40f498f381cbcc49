"""`Place`: the place of a column of lists in the bytes of a fragment, so that it is read again without Arrow."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow.types as kinds

from rescale_data.sources.arrow_types import ArrowArray, ArrowBuffer
from rescale_data.sources.source import Tokens


class Numbers(NamedTuple):
    """Place of ``size`` numbers in a buffer, from byte ``start`` on."""

    start: int
    dtype: np.dtype[Any]
    size: int

    @staticmethod
    def of(array: npt.NDArray[Any], data: ArrowBuffer) -> Numbers | None:
        """Return the place of an array in a buffer; `None` if the array is a copy."""
        start = array.ctypes.data - data.address
        return Numbers(start, array.dtype, len(array)) if 0 <= start <= data.size - array.nbytes else None

    def within(self, data: ArrowBuffer) -> npt.NDArray[Any]:
        return np.frombuffer(data, self.dtype, self.size, self.start)


class Place(NamedTuple):
    """Place of a column of lists without nulls: of its values, and of the offsets at which lists begin among them."""

    values: Numbers
    offsets: Numbers

    @staticmethod
    def of(lists: ArrowArray, data: ArrowBuffer) -> Place | None:
        """Return the place of a column that was read from ``data`` without a copy; `None` for any other column."""
        chunk = lists.chunk(0) if lists.num_chunks == 1 else None
        if chunk is None or kinds.is_fixed_size_list(chunk.type) or chunk.null_count or chunk.values.null_count:
            return None
        values = Numbers.of(chunk.values.to_numpy(zero_copy_only=False), data)
        offsets = Numbers.of(chunk.offsets.to_numpy(), data)
        return None if values is None or offsets is None else Place(values, offsets)

    def tokens(self, data: ArrowBuffer) -> Tokens:
        """Return the tokens in the bytes of a fragment, without a copy of the values; ``ValueError`` if bytes are missing."""
        offsets = self.offsets.within(data).astype(np.int64)
        first, stop = int(offsets[0]), int(offsets[-1])
        offsets -= first
        return Tokens(self.values.within(data)[first:stop], offsets)
