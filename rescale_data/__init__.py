"""A training run's data order that reshards like its model.

Names are imported when they are used: torch and pyarrow take their time, and the command line seldom needs them. They are
listed once, in ``__init__.pyi``, which type checkers read, too.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

_MODULE_OF_NAME: dict[str, str] = {
    name: module
    for module, import_list in re.findall(
        r"^from (\S+) import (.+)", Path(__file__).with_suffix(".pyi").read_text(), re.MULTILINE
    )
    for name in re.findall(r"\bas (\w+)", import_list)
}
__all__ = sorted(name for name, module in _MODULE_OF_NAME.items() if module != __name__)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF_NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if _MODULE_OF_NAME[name] == __name__:
        return importlib.import_module(f"{__name__}.{name}")
    return getattr(importlib.import_module(_MODULE_OF_NAME[name]), name)
