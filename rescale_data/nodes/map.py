"""`Map` and `RandomMap`: a function of each sample."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from rescale_data.errors import checks_kinds
from rescale_data.nodes.base import BaseNode, Node
from rescale_data.nodes.below import num_below, shard_of
from rescale_data.nodes.bound import Bound
from rescale_data.nodes.function import identity
from rescale_data.nodes.guard import OnError, guard_of
from rescale_data.nodes.provenance import carried
from rescale_data.order import generator
from rescale_data.shard import Shard
from rescale_data.state import COUNT, Field, Ints


class OfEach(Node[Any]):
    """One sample for each of its source, or none: what `Map` and `RandomMap` share."""

    FIELDS = (Field(("skipped",), counts=True, limits=COUNT),)
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


class RandomMap(OfEach):
    """``fn(sample, rng)`` of each sample: augmentation that is the same at any topology and after any resume.

    The generator is made anew for each sample, from the seed, the logical shard and the position of the source at the sample:
    epoch and row, over a mixture the number of the draw, not what was counted on the way. Nothing random is state. Its raw
    stream is the same in every version of NumPy; what the methods of `numpy.random.Generator` make of it may change with NumPy.

    Args:
        source: A node.
        fn: From a sample and a `numpy.random.Generator` to a sample. It draws from nothing else.
        label: Tells this node from others that see the same positions, as in the branches of a mixture, which else draw
            alike. One RandomMap over another is told apart by itself, but where a mixture is between them.
        shard: Default: that of the `Reader` below.
        on_error: As in `Map`.
        version: As in `Filter`.

    Raises:
        ValueError: No node below reads a logical shard, and none is given.

    Example:
        >>> import rescale_data as rd
        >>> readers = [rd.Reader(range(4), rd.Shard()) for _ in range(2)]
        >>> first, again = (list(rd.RandomMap(reader, lambda row, rng: row + rng.random())) for reader in readers)
        >>> first == again
        True
    """

    @checks_kinds
    def __init__(
        self,
        source: BaseNode[Any],
        fn: Callable[[Any, np.random.Generator], Any],
        *,
        label: str = "",
        shard: Shard | None = None,
        on_error: OnError = "raise",
        version: str | int | None = None,
    ) -> None:
        super().__init__(source, fn, on_error, version)
        self.label = label
        shard = shard_of(self, shard)
        self._key = (shard.seed, shard.index, num_below(self, RandomMap))
        self._slots_of_place = self._source.place()

    def _beside(self) -> np.random.Generator:
        position = self._source.position
        place = [position[slot] for slot in self._slots_of_place]
        return generator(f"random_map/{self.label}", *self._key, *place)

    def parameters(self) -> dict[str, Any]:
        return {"label": self.label, **self._identity}
