"""Which values of a checkpoint are the state of a data loader. The engine is told their names, and reads no file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

from rescale_data.errors import DataStateError

Path: TypeAlias = tuple[str, ...]
ROWS = "rows"
"""The tensor, under "shards", of all that the nodes of a mixture keep."""


def data_states(paths: Iterable[Sequence[Any]]) -> list[Path]:
    """Where in a checkpoint with values at these paths data states are."""
    found = [tuple(map(str, path)) for path in paths]
    with_shards = {path[: path.index("shards")] for path in found if "shards" in path}
    return sorted(path[:-1] for path in found if path[-1] == "num_logical_shards" and path[:-1] in with_shards)


def find(paths: Iterable[Sequence[Any]], name: str | None, where: object) -> Path:
    """The path of the data state with this name, or of the only one.

    Raises:
        DataStateError: none, or several and no name.
    """
    found = {".".join(root): root for root in data_states(paths)}
    if name is None and len(found) == 1:
        return next(iter(found.values()))
    if name is not None and name in found:
        return found[name]
    if not found:
        raise DataStateError(
            f"The checkpoint {where} holds no data state of a rescale_data loader. Save the loader in the state, under a key."
        )
    asked = "" if name is None else f", and none is named {name!r}"
    raise DataStateError(f"The checkpoint {where} holds the data states {sorted(found)}{asked}. Name one of them.")
