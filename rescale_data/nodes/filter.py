"""`Filter`: the samples that a predicate keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from rescale_data.nodes.base import BaseNode, Node
from rescale_data.nodes.guard import Guard, OnError
from rescale_data.state import Field, Ints


class Filter(Node[Any]):
    """The samples for which ``predicate`` is true. The others count as drawn, and are counted (``filtered_rows``).

    Args:
        source: A node.
        predicate: From a sample to whether it stays, without a memory of its own. An error in it names the row.
        on_error: "raise", or "skip": leave out samples for which it raises, log and count them (``skipped_rows``).
    """

    FIELDS: ClassVar[tuple[Field, ...]] = (Field(("filtered",), counts=True), Field(("skipped",), counts=True))

    def __init__(self, source: BaseNode[Any], predicate: Callable[[Any], bool], *, on_error: OnError = "raise") -> None:
        super().__init__(source=source)
        self.predicate = predicate
        self._source = self.children["source"]
        self._guard = Guard(self, on_error)

    def next(self) -> Any:
        while True:
            sample = next(self._source)
            try:
                if self.predicate(sample):
                    return sample
            except Exception as error:
                self._guard.caught(error, self.locate(), self.position[1])
                self.position[1] += 1
                continue
            self.position[0] += 1

    def progress(self, rows: Ints, shards: Ints, samples: Ints) -> dict[str, float]:
        filtered, skipped = rows[:, :2].sum(axis=0).tolist()
        return {"filtered_rows": float(filtered), "skipped_rows": float(skipped)}
