"""A file of ``torch.save`` as something that DCP loads from, on any ranks.

Every rank maps the file and copies its own rows out of it. The pages are read from disk once a host, however many ranks it has;
there is no communication, so nothing hangs where ranks ask for different names.
"""

from __future__ import annotations

import errno
import pickle
from collections.abc import Mapping
from typing import Any, cast

import torch

from rescale_data.checkpoint.convert.values import ValuesReader


class TorchFileReader(ValuesReader):
    """Reads a file of ``torch.save``, memory-mapped and without running code from it."""

    def __init__(self, file: str) -> None:
        super().__init__({})
        self.file = file

    def tree(self) -> Mapping[str, Any]:
        return map_file(self.file)


def map_file(file: str) -> dict[str, Any]:
    """What ``torch.save`` wrote, with tensors that are read when they are used.

    Raises:
        ValueError: it is no such file, holds code, or is not a dict.
    """
    try:
        content = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, OSError) as error:
        if (
            isinstance(error, OSError) and error.errno != errno.EINVAL
        ):  # torch seeks before the start of a file cut short
            raise
        raise ValueError(
            f"{file} cannot be read: {error}. It must be a file of torch.save in its zip format (the default since 1.6) that "
            f"holds tensors and plain values only."
        ) from error
    if not isinstance(content, Mapping):
        raise ValueError(
            f"{file} holds a {type(cast(object, content)).__name__}; a checkpoint is a dict of names to values."
        )
    return dict(cast(Mapping[str, Any], content))
