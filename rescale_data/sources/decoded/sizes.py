"""Estimates the bytes of memory that a sample of any type takes."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def memory_bytes_of(value: Any) -> int:
    """Return the approximate number of bytes that a sample takes in memory.

    Arrays and tensors count with their bytes, containers with their items. Other objects are a guess, of text an exact one.
    """
    if isinstance(value, np.ndarray | torch.Tensor):
        return value.nbytes
    if isinstance(value, Mapping):
        return sum(memory_bytes_of(item) for item in value.values())
    if isinstance(value, list | tuple):
        return sum(memory_bytes_of(item) for item in value) + 8 * len(value)
    return sys.getsizeof(value) + _pixel_bytes(value)


def _pixel_bytes(value: Any) -> int:
    """Return the bytes of a PIL image's pixels, which ``sys.getsizeof`` does not count; 0 for any other object."""
    get_bands = getattr(value, "getbands", None)
    return value.width * value.height * len(get_bands()) if get_bands is not None else 0
