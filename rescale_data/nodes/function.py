"""Identity of a user's function in a state: a version that the user gives, or a name and a digest of the source code."""

from __future__ import annotations

import functools
import hashlib
import inspect
from typing import Any

import numpy as np

CODE, VERSION = "fn.code", "version"
"""Parameter names. When a state is loaded, changed code only logs a warning; versions are compared if both sides have one."""


def require_function(fn: object, of: str) -> None:
    if not callable(fn):
        raise TypeError(f"{fn!r} is a {type(fn).__name__}: give a function of {of}.")


def identity(fn: Any, version: str | int | None) -> dict[str, Any]:
    """Return the parameters of a node that calls ``fn``: its version, or its name and a digest of its source code."""
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
    """Return a digest of the source code of an object, whatever its place and indentation; empty if there is no source code."""
    try:
        lines = inspect.getsource(made_of).split()
    except (OSError, TypeError):
        return ""
    return hashlib.blake2b(" ".join(lines).encode(), digest_size=6).hexdigest()
