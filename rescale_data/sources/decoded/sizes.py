"""Estimates of the memory that a sample takes, whatever it is made of."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def size_of(value: Any) -> int:
    """Return about how many bytes a sample takes.

    Arrays and tensors count with their bytes, containers with their items. Other objects are a guess, of text an exact one.
    """
    if isinstance(value, np.ndarray | torch.Tensor):
        return value.nbytes
    if isinstance(value, Mapping):
        return sum(size_of(item) for item in value.values())
    if isinstance(value, list | tuple):
        return sum(size_of(item) for item in value) + 8 * len(value)
    return sys.getsizeof(value) + _pixels(value)


def _pixels(value: Any) -> int:
    """Return the bytes of a PIL image's pixels, which Python does not count."""
    bands = getattr(value, "getbands", None)
    return value.width * value.height * len(bands()) if bands is not None else 0
