"""Identity of a user's function in a state: the version that the user gives, or its name and a digest of its source."""

from __future__ import annotations

import functools
import hashlib
import inspect
from typing import Any

import numpy as np

CODE, VERSION = "fn.code", "version"
"""Parameters: the first is only warned about when a state is loaded, the second compared where both sides have it."""


def require_function(fn: object, of: str) -> None:
    if not callable(fn):
        raise TypeError(f"{fn!r} is a {type(fn).__name__}: give a function of {of}.")


def identity(fn: Any, version: str | int | None) -> dict[str, Any]:
    """Parameters of a node that calls ``fn``."""
    require_function(fn, "a sample")
    if version is not None:
        if not isinstance(version, str | int | np.integer):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"version={version!r}: give a string or an integer, another one when the function changes.")
        return {VERSION: version if isinstance(version, str) else int(version)}
    while isinstance(fn, functools.partial):
        fn = fn.func
    made_of: Any = fn if hasattr(fn, "__qualname__") else type(fn)
    return {CODE: {"name": made_of.__qualname__, "source": _digest(made_of)}}


def _digest(made_of: Any) -> str:
    """Return a digest of the lines that define an object, wherever they stand; empty if there are none."""
    try:
        lines = inspect.getsource(made_of).split()
    except (OSError, TypeError):
        return ""
    return hashlib.blake2b(" ".join(lines).encode(), digest_size=6).hexdigest()
