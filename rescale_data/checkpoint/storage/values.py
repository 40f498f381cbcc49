"""Plain values in a checkpoint: read without running code; which cannot be read so is said when they are saved."""

from __future__ import annotations

import io
import logging
import pickle
import threading
from collections.abc import Mapping
from typing import IO, Any, cast

import numpy as np
import torch

from rescale_data.checkpoint.tree import leaves

_MAKERS: tuple[Any, ...] = (np.zeros(1).__reduce__()[0], np.float32().__reduce__()[0])  # of arrays and of scalars
_NUMPY: list[Any] = [
    *((make, f"numpy.{core}.multiarray.{make.__name__}") for make in _MAKERS for core in ("core", "_core")),
    *(np.ndarray, np.dtype, *{type(np.dtype(code)) for code in np.typecodes["All"]}),
]
_KNOWN = (str, bytes, int, float, complex, bool, type(None))
_alone = threading.Lock()
_told: set[str] = set()
_log = logging.getLogger("rescale_data")


def load_safely(file: str | IO[bytes], **how: Any) -> Any:
    """``torch.load`` that runs no code: it makes what torch takes for safe, and arrays and numbers of NumPy."""
    try:
        return torch.load(file, weights_only=True, **how)
    except pickle.UnpicklingError:  # of NumPy, or code
        if not isinstance(file, str):
            file.seek(0)
    with _alone:  # the list of what is safe is the process's
        missing = [item for item in _NUMPY if item not in torch.serialization.get_safe_globals()]
        with torch.serialization.safe_globals(missing):
            return torch.load(file, weights_only=True, **how)


def warn_of_refused(plain: Mapping[str, Any]) -> None:
    """Warn, once for each name, of values that a load would refuse: a run finds that out when it must go on."""
    for path, value in leaves(plain):
        if (name := ".".join(path)) not in _told and not isinstance(value, torch.Tensor) and not _loads(value):
            _told.add(name)
            _log.warning(
                "%s is a %s, which no load takes without trusted=True: it could run code. Save numbers, strings, tensors and "
                "arrays in its place, or allow its class by torch.serialization.add_safe_globals.", name, type(value).__name__,
            )  # fmt: skip


def _loads(value: Any) -> bool:
    if _is_known(value):
        return True
    content = io.BytesIO()
    try:
        torch.save(value, content)
        content.seek(0)
        load_safely(content)
    except Exception:
        return False
    return True


def _is_known(value: Any) -> bool:
    if type(value) is np.ndarray:
        return value.dtype.kind in "biufc"
    return type(value) in _KNOWN or (type(value) in (tuple, list) and all(map(_is_known, cast("list[Any]", value))))
