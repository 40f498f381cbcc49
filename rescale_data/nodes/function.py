"""Identity of a user's function in a saved state: the user's version, or the name and a digest of the source code."""

from __future__ import annotations

import functools
import hashlib
import inspect
from typing import Any

import numpy as np

CODE_KEY, VERSION = "fn.code", "version"
"""Parameter names. When a state is loaded, changed code only logs a warning; versions are compared if both sides have one."""


def require_function(fn: object, argument: str) -> None:
    if not callable(fn):
        raise TypeError(f"{fn!r} is a {type(fn).__name__}: give a function of {argument}.")


def function_identity(fn: Any, version: str | int | None) -> dict[str, Any]:
    """Return the parameters that identify ``fn`` in a state: its version, or its name and a digest of its source code."""
    require_function(fn, "a sample")
    if version is not None:
        if not isinstance(version, str | int | np.integer):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"version={version!r}: give a string or an integer, another one when the function changes.")
        return {VERSION: version if isinstance(version, str) else int(version)}
    while isinstance(fn, functools.partial):
        fn = fn.func
    definition: Any = fn if hasattr(fn, "__qualname__") else type(fn)
    return {CODE_KEY: {"name": definition.__qualname__, "source": _digest(definition)}}


def _digest(definition: Any) -> str:
    """Return a digest of an object's source code that ignores whitespace; an empty string if there is no source code."""
    try:
        source_words = inspect.getsource(definition).split()
    except (OSError, TypeError):
        return ""
    return hashlib.blake2b(" ".join(source_words).encode(), digest_size=6).hexdigest()
