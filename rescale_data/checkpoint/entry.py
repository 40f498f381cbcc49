"""One value of a state: what DCP saves of it, what DCP loads into, and how that is taken over."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch.distributed.checkpoint.storage import StorageReader

from rescale_data.checkpoint.storage.dcp import Contents

Path: TypeAlias = tuple[str, ...]


@dataclass(eq=False)
class Entry:
    """One value of a state.

    Args:
        path: Keys from the root of the state down to the value.
        plain: Gives what DCP saves. Its tensors may be the live ones, which are then loaded in place.
        take: Takes what DCP has loaded.
        whole: Whether a part of it may not be loaded without the rest.
        steady: Gives tensors that only an optimizer's step changes.
        loose: Gives tensors that may differ between ranks.
        refused: What of the checkpoint does not fit although the names do, and why, by name; known with the placeholder.
        left_out: Names of the checkpoint that are not loaded for that, with all that is under them.
    """

    path: Path
    plain: Callable[[], Any]
    take: Callable[[Any], object]
    whole: bool = False
    steady: Callable[[], Iterable[torch.Tensor]] = tuple
    loose: Callable[[], Iterable[torch.Tensor]] = tuple
    refused: dict[str, str] = field(default_factory=dict[str, str])
    left_out: set[str] = field(default_factory=set[str])

    @property
    def name(self) -> str:
        return ".".join(self.path)

    def placeholder(self, reader: StorageReader, saved: Contents) -> Any:
        """What DCP loads into, of the checkpoint that is read and holds this."""
        return self.plain()
