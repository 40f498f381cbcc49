"""`Tray`: the columns of a micro batch, into which nodes write their samples side by side, so that nothing has to be stacked.

columns of a node    {"tokens": (4096, int64)}
tray of b samples    {"tokens": int64[b, 4096]}     node.write(tray, place) fills row ``place``
batch                {"tokens": Tensor[b, 4096]}    the same memory
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

Columns: TypeAlias = Mapping[str, tuple[int, np.dtype[Any]]]
"""Length and dtype of the value of each column, a 1-D array."""


class Tray:
    """Room for the samples of one micro batch, fresh memory.

    Args:
        columns: What each sample consists of.
        num_samples: b.
    """

    __slots__ = ("arrays", "lists")

    def __init__(self, columns: Columns, num_samples: int) -> None:
        self.arrays: dict[str, npt.NDArray[Any]] = {}
        for name, (length, dtype) in columns.items():  # a comprehension costs a call
            self.arrays[name] = np.empty((num_samples, length), dtype)
        self.lists: dict[str, list[Any]] = {}
        """What is no array, by name, a value for each sample written so far: where it comes from, what its documents carry."""

    def row(self, column: str, place: int) -> npt.NDArray[Any]:
        """``[1, length]``, a view."""
        return self.arrays[column][place : place + 1]

    def put(self, column: str, place: int, values: npt.NDArray[Any], fill: int) -> None:
        """Write a value into row ``place``, filled up to the column's length."""
        array, length = self.arrays[column], len(values)
        if length == array.shape[1]:
            array[place] = values
        else:
            array[place, :length] = values
            array[place, length:] = fill

    def add(self, column: str, value: Any) -> None:
        """A value of the next sample that is no array; samples come in the order of their rows."""
        self.lists.setdefault(column, []).append(value)

    def batch(self) -> dict[str, Any]:
        """``{column: Tensor[b, length]}``, which is the memory of the tray, and lists of what is no array."""
        batch: dict[str, Any] = {}
        for name, array in self.arrays.items():
            batch[name] = torch.from_numpy(array)
        if self.lists:
            batch.update(self.lists)
        return batch

    def sample(self) -> dict[str, Any]:
        """``{column: Tensor[length]}``, the only sample of a tray of one."""
        columns: dict[str, Any] = {name: torch.from_numpy(array[0]) for name, array in self.arrays.items()}
        return {**columns, **{name: value for name, [value] in self.lists.items()}}


def written(node: Any) -> dict[str, Any]:
    """Return the next sample of a node that writes its samples into trays."""
    tray = Tray(node.writes, 1)
    node.write(tray, 0)
    return tray.sample()
