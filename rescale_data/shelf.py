"""`Shelf`: samples of a micro batch written side by side, so that to collate them copies nothing.

    open(b) ->  [b, length] of a column:  | sample 0 | sample 1 | ... |  -> stacked(samples) is the whole of it

Each batch has fresh memory. Whatever comes between a node and the collation may replace samples, change them in place
or keep them: tensors that are not the rows of one shelf, all and in order, are stacked as usual.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


class Column:
    """Rows of one tensor, handed out once each."""

    def __init__(self, num_rows: int, length: int, dtype: np.dtype[Any]) -> None:
        self.arrays = np.empty((num_rows, length), dtype=dtype)
        self.whole = torch.from_numpy(self.arrays)
        self.rows = self.whole.unbind()
        self.num_taken = 0


class Shelf(threading.local):
    """The micro batch that this thread is making; closed, and then without effect, unless somebody opens it."""

    def __init__(self) -> None:
        self._num_samples = 0
        self._columns: dict[str, Column] = {}

    def open(self, num_samples: int) -> None:
        """Begin a micro batch of so many samples."""
        self._num_samples = num_samples
        self._columns = {}

    def put(self, column: str, values: npt.NDArray[Any], dtype: np.dtype[Any]) -> Tensor:
        """A 1-D copy of ``values`` in another dtype, on the shelf where there is a place for it."""
        found = self._columns.get(column)
        if found is None:
            if not self._num_samples:
                return torch.from_numpy(values.astype(dtype))
            found = self._columns[column] = Column(self._num_samples, len(values), dtype)
        place, arrays = found.num_taken, found.arrays
        if place == len(arrays) or arrays.shape[1] != len(values) or arrays.dtype != dtype:
            return torch.from_numpy(values.astype(dtype))
        arrays[place] = values
        found.num_taken = place + 1
        return found.rows[place]

    def stacked(self, column: str, samples: Sequence[Any]) -> Tensor | None:
        """``[b, length]`` without a copy, if these are all rows of the column in order; ends the column."""
        found = self._columns.pop(column, None)
        if found is None or len(found.rows) != len(samples):
            return None
        return found.whole if all(a is b for a, b in zip(found.rows, samples, strict=True)) else None


shelf = Shelf()
