"""What `kernel.c` has; `gather.py` says what it means."""

from collections.abc import Sequence
from typing import Any, Self

class Stretch:
    def __new__(
        cls,
        address: Any,
        kind: Any,
        length: Any,
        ends: Any,
        slot: Any,
        value: Any,
        position: memoryview,
        bos: int,
        eos: int,
        owner: object,
        /,
    ) -> Self: ...
    @property
    def owner(self) -> Any: ...
    @property
    def document(self) -> int: ...
    @property
    def left(self) -> int: ...

def fill(stretches: Sequence[Any], first: int, tokens: Any, labels: Any, doc_ids: Any, /) -> int: ...
def join(addresses: Any, num_bytes: Any, destination: Any, /) -> None: ...
