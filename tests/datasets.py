"""Map-style datasets that do something where a row is read."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any


class Hooked(list[Any]):
    """Rows that call a function with the index of each row before it is read."""

    def __init__(self, rows: Iterable[Any], hook: Callable[[int], object]) -> None:
        super().__init__(rows)
        self.hook = hook

    def __getitem__(self, index: Any) -> Any:
        self.hook(index)
        return super().__getitem__(index)


def unreadable(rows: Iterable[Any], bad: Iterable[int]) -> Hooked:
    """Return rows of which those numbered in `bad` cannot be read."""
    return Hooked(rows, partial(_fail_at, frozenset(bad)))


def _fail_at(bad: frozenset[int], index: int) -> None:
    if index in bad:
        raise ValueError(f"row {index} cannot be read")
