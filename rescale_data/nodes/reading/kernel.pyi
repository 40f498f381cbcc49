"""What `kernel.c` has; `gather.py` says what it means."""

from collections.abc import Sequence
from typing import Any, Self

class Stretch:
    def __new__(cls, position: memoryview, reach: memoryview, bos: int, eos: int, /) -> Self: ...
    def append(
        self,
        arrays: tuple[Any, ...],
        array: Any,
        start: Any,
        length: Any,
        ends: Any,
        slot: Any,
        value: Any,
        owner: object,
        /,
    ) -> None: ...
    def was_used(self) -> bool: ...
    @property
    def parts(self) -> list[Any]: ...
    @property
    def document(self) -> int: ...
    @property
    def left(self) -> int: ...

def fill(stretches: Sequence[Any], first: int, tokens: Any, labels: Any, doc_ids: Any, /) -> int: ...
def join(array: Any, start: Any, length: Any, destination: Any, /) -> None: ...
