"""`Place`: where a column of lists is among the bytes of a fragment, so that whoever reads it again need not ask Arrow."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow.types as kinds

from rescale_data.sources.arrow_types import ArrowArray, ArrowBuffer
from rescale_data.sources.source import Tokens


class Numbers(NamedTuple):
    """``size`` numbers from byte ``start`` on."""

    start: int
    dtype: np.dtype[Any]
    size: int

    @staticmethod
    def of(array: npt.NDArray[Any], data: ArrowBuffer) -> Numbers | None:
        """Return the place of an array within bytes; `None` where it is a copy."""
        start = array.ctypes.data - data.address
        return Numbers(start, array.dtype, len(array)) if 0 <= start <= data.size - array.nbytes else None

    def within(self, data: ArrowBuffer) -> npt.NDArray[Any]:
        return np.frombuffer(data, self.dtype, self.size, self.start)


class Place(NamedTuple):
    """The place of lists without nulls: of their values, and of where each begins among these."""

    values: Numbers
    offsets: Numbers

    @staticmethod
    def of(lists: ArrowArray, data: ArrowBuffer) -> Place | None:
        """Return the place of a column that was read from bytes without a copy; `None` for others."""
        chunk = lists.chunk(0) if lists.num_chunks == 1 else None
        if chunk is None or kinds.is_fixed_size_list(chunk.type) or chunk.null_count or chunk.values.null_count:
            return None
        values = Numbers.of(chunk.values.to_numpy(zero_copy_only=False), data)
        offsets = Numbers.of(chunk.offsets.to_numpy(), data)
        return None if values is None or offsets is None else Place(values, offsets)

    def tokens(self, data: ArrowBuffer) -> Tokens:
        """Return the tokens in the bytes of the fragment, without a copy; ``ValueError`` where there are fewer bytes."""
        offsets = self.offsets.within(data).astype(np.int64)
        first, stop = int(offsets[0]), int(offsets[-1])
        offsets -= first
        return Tokens(self.values.within(data)[first:stop], offsets)
