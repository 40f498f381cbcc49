"""`BatchBuffer`: arrays for one micro batch. Nodes write samples into their rows, so samples need not be stacked later.

columns of a node      {"tokens": (4096, int64)}
buffer of b samples    {"tokens": int64[b, 4096]}     node.write(buffer, place) fills row ``place``
batch                  {"tokens": Tensor[b, 4096]}    the same memory
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

ColumnFormats: TypeAlias = Mapping[str, tuple[int, np.dtype[Any]]]
"""Length and dtype of each column's value, which is a 1-D array."""


class BatchBuffer:
    """Newly allocated arrays for the samples of one micro batch.

    Args:
        columns: The columns of each sample.
        num_samples: Number of samples, b.
    """

    __slots__ = ("arrays", "list_columns")

    def __init__(self, columns: ColumnFormats, num_samples: int) -> None:
        self.arrays: dict[str, npt.NDArray[Any]] = {}
        for name, (length, dtype) in columns.items():  # a comprehension costs a call
            self.arrays[name] = np.empty((num_samples, length), dtype)
        self.list_columns: dict[str, list[Any]] = {}
        """Values that are no arrays, by name, one for each sample written so far: provenance, payload of its documents."""

    def row(self, column: str, index: int) -> npt.NDArray[Any]:
        """Return row ``index`` of a column as a view of shape ``[1, length]``."""
        return self.arrays[column][index : index + 1]

    def write_row(self, column: str, index: int, values: npt.NDArray[Any], fill: int) -> None:
        """Write a 1-D array into row ``index`` of a column, padded with ``fill`` to the length of the column."""
        array, length = self.arrays[column], len(values)
        if length == array.shape[1]:
            array[index] = values
        else:
            array[index, :length] = values
            array[index, length:] = fill

    def add(self, column: str, value: Any) -> None:
        """Append the next sample's value to a list, for values that are not arrays; call it in the order of the rows."""
        self.list_columns.setdefault(column, []).append(value)

    def batch(self) -> dict[str, Any]:
        """Return the batch: ``{column: Tensor[b, length]}`` without a copy, and lists of the values that are not arrays."""
        batch: dict[str, Any] = {}
        for name, array in self.arrays.items():
            batch[name] = torch.from_numpy(array)
        if self.list_columns:
            batch.update(self.list_columns)
        return batch

    def sample(self) -> dict[str, Any]:
        """Return the only sample of a buffer with one row: ``{column: Tensor[length]}`` and values that are not arrays."""
        columns: dict[str, Any] = {name: torch.from_numpy(array[0]) for name, array in self.arrays.items()}
        return {**columns, **{name: value for name, [value] in self.list_columns.items()}}


def written_sample(node: Any) -> dict[str, Any]:
    """Return the next sample of a node that `Writes`: it writes the sample into a buffer with one row."""
    buffer = BatchBuffer(node.written_columns, 1)
    node.write(buffer, 0)
    return buffer.sample()
