"""One value of a state: what DCP saves of it, what DCP loads into, and how that is taken over."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, TypeAlias

from torch.distributed.checkpoint.storage import StorageReader

Path: TypeAlias = tuple[str, ...]


class Entry(ABC):
    """One value of a state.

    Args:
        path: Keys from the root of the state down to the value.

    Attributes:
        whole: Whether a part of it may not be loaded without the rest.
        refused: What of the checkpoint does not fit although the names do, and why, by name; known with the placeholder.
        left_out: Names of the checkpoint that are not loaded for that, with all that is under them.
        loose: Names of values that may differ between ranks; known with ``plain``.
    """

    whole = False

    def __init__(self, path: Path) -> None:
        self.path = path
        self.refused: dict[str, str] = {}
        self.left_out: set[str] = set()
        self.loose: set[str] = set()

    @property
    def name(self) -> str:
        return ".".join(self.path)

    @abstractmethod
    def plain(self) -> Any:
        """What DCP saves. Its tensors may be the live ones."""

    def placeholder(self, reader: StorageReader) -> Any:
        """What DCP loads into, of the checkpoint that is read."""
        return self.plain()

    @abstractmethod
    def apply(self, loaded: Any) -> None:
        """Take what DCP has loaded into the placeholder."""
