"""What a load knows of a checkpoint before it loads anything."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is about to be loaded.

    Args:
        metadata: Names, shapes and dtypes.
        values: Reads plain values by flattened name.
    """

    metadata: Metadata
    values: Callable[[list[str]], dict[str, Any]]
