"""`Entry`: one value of a training state, with the functions that give it to DCP and take back what DCP has loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

import torch

from rescale_data.checkpoint.storage.dcp import StateReader

T = TypeVar("T")
R = TypeVar("R")
Path: TypeAlias = tuple[str, ...]


@dataclass(eq=False)
class Entry:
    """One value of a training state (a module, an optimizer, a tensor, ...), with the functions that save it and load it.

    Args:
        path: Keys from the root of the state down to the value.
        get_value: Returns the value that DCP saves. Its tensors may be the live ones, which are then loaded in place.
        assign: Called with the value that DCP has loaded.
        must_load_whole: True if no part of it may be loaded without the other parts.
        get_optimizer_tensors: Returns the tensors that only an optimizer's step changes.
        refusal_texts: The reasons why saved values do not fit although their names do, by name; `placeholder` sets them.
        names_left_out: The names in the checkpoint that are not loaded for these reasons, with all names below them.
    """

    path: Path
    get_value: Callable[[], Any]
    assign: Callable[[Any], object]
    must_load_whole: bool = False
    get_optimizer_tensors: Callable[[], Iterable[torch.Tensor]] = tuple
    refusal_texts: dict[str, str] = field(default_factory=dict[str, str])
    names_left_out: set[str] = field(default_factory=set[str])

    @property
    def name(self) -> str:
        return ".".join(self.path)

    def placeholder(self, reader: StateReader) -> Any:
        """Return the value whose tensors DCP loads into, for the checkpoint of ``reader``."""
        return self.get_value()


def for_each(entries: Iterable[T], work: Callable[[T], R]) -> list[R]:
    """Return ``work(entry)`` of each entry; raise an error only at the end, as later entries may have collectives."""
    results: list[R] = []
    errors: list[Exception] = []
    for entry in entries:
        try:
            results.append(work(entry))
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return results
