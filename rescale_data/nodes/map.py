"""`Map`: a function of each sample, and what any such node does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from rescale_data.nodes.base import BaseNode, Node
from rescale_data.nodes.bound import Bound
from rescale_data.nodes.counted import epoch_end_of_source
from rescale_data.nodes.function import identity
from rescale_data.nodes.guard import OnError, guard_of
from rescale_data.nodes.provenance import carried
from rescale_data.state import Field, Ints


class OfEach(Node[Any]):
    """One sample for each of its source, or none: what `Map` and `RandomMap` share."""

    FIELDS: ClassVar[tuple[Field, ...]] = (Field(("skipped",), counts=True),)
    _beside: Any = None
    """Of a class whose ``fn`` is given something beside the sample: makes it, before that is drawn."""

    def __init__(
        self, source: BaseNode[Any], fn: Callable[..., Any], on_error: OnError, version: str | int | None
    ) -> None:
        super().__init__(source=source)
        self._identity = identity(fn, version)
        self.fn = fn
        self._source = self.children["source"]
        self._guard, self._bound = guard_of(self, on_error), Bound(self)
        self.one_for_one = not self._guard.skips

    def next(self) -> Any:
        misses = 0
        while True:
            beside = None if self._beside is None else self._beside()
            sample = next(self._source)
            try:
                return carried(sample, self.fn(sample) if beside is None else self.fn(sample, beside))
            except Exception as error:
                instead = self._guard.caught(error, self.locate(), self.position[0])
                if instead is not None:
                    return carried(sample, instead)
                self.position[0] += 1
                misses = self._bound.missed(misses)

    def skip(self, num_samples: int) -> None:
        if self._guard.skips:
            super().skip(num_samples)
        else:
            self._source.skip(num_samples)

    def epoch_end(self, rows: Ints, shards: Ints) -> tuple[Ints, Ints] | None:
        return None if self._guard.skips else epoch_end_of_source(self, rows, shards)

    def parameters(self) -> dict[str, Any]:
        return self._identity

    def progress(self, rows: Ints, shards: Ints, samples: Ints) -> dict[str, float]:
        return {"skipped_rows": float(rows[:, 0].sum())}


class Map(OfEach):
    """``fn`` of each sample.

    Args:
        source: A node.
        fn: From a sample to a sample, without a memory of its own. An error in it names the row.
        version: As in `Filter`.
        on_error: "raise", or "skip": leave out samples for which ``fn`` raises, log and count them (``skipped_rows``); not for
            errors of the program, as `NameError`. Or a function of the error and the place of its row, which raises, returns
            what is used in place of what ``fn`` would have returned, or `None` to leave the sample out. Unless it is "raise"
            the number of samples of an epoch is unknown.

    Example:
        >>> import rescale_data as rd
        >>> list(rd.Map(rd.Reader(range(3), rd.Shard(), shuffle=False), lambda row: row * 10))
        [0, 10, 20]
    """

    def __init__(
        self,
        source: BaseNode[Any],
        fn: Callable[[Any], Any],
        *,
        on_error: OnError = "raise",
        version: str | int | None = None,
    ) -> None:
        super().__init__(source, fn, on_error, version)
