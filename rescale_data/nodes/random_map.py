"""`RandomMap`: a function of each sample and a random generator that belongs to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from rescale_data.nodes.base import BaseNode, Node
from rescale_data.nodes.bound import Bound
from rescale_data.nodes.counted import epoch_end_of_source
from rescale_data.nodes.function import identity
from rescale_data.nodes.guard import OnError, guard_of
from rescale_data.nodes.provenance import carried
from rescale_data.nodes.shard_of import shard_of
from rescale_data.order import generator
from rescale_data.shard import Shard
from rescale_data.state import Field, Ints, place_slots


class RandomMap(Node[Any]):
    """``fn(sample, rng)`` of each sample: augmentation that is the same at any topology and after any resume.

    The generator is made anew for each sample, from the seed, the logical shard and the position of the source (epoch and
    row, not what was counted on the way) at the sample: nothing random is state. Its raw stream is the same in every
    version of NumPy; what the methods of `numpy.random.Generator` make of it may change with NumPy.

    Args:
        source: A node.
        fn: From a sample and a `numpy.random.Generator` to a sample. It draws from nothing else.
        label: Tells this node from others that see the same positions, as in the branches of a mixture, which else draw
            alike. One RandomMap over another is told apart by itself.
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

    FIELDS: ClassVar[tuple[Field, ...]] = (Field(("skipped",), counts=True),)

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
        super().__init__(source=source)
        self._identity = identity(fn, version)
        self.fn, self.label = fn, label
        self._source = self.children["source"]
        shard = shard_of(self._source, shard)
        depth = sum(isinstance(node, RandomMap) for _, node in self._source.walk())
        self._key = (shard.seed, shard.index, depth)
        self._slots_of_place = place_slots(self._source.fields)
        self._guard, self._bound = guard_of(self, on_error), Bound(self)
        self.one_for_one = not self._guard.skips

    def next(self) -> Any:
        misses = 0
        while True:
            rng = generator(f"random_map/{self.label}", *self._key, *self._place())
            sample = next(self._source)
            try:
                return carried(sample, self.fn(sample, rng))
            except Exception as error:
                instead = self._guard.caught(error, self.locate(), self.position[0])
                if instead is not None:
                    return carried(sample, instead)
                self.position[0] += 1
                misses = self._bound.missed(misses)

    def _place(self) -> list[int]:
        position = self._source.position
        return [position[slot] for slot in self._slots_of_place]

    def skip(self, num_samples: int) -> None:
        if self._guard.skips:
            super().skip(num_samples)
        else:
            self._source.skip(num_samples)

    def epoch_end(self, rows: Ints, shards: Ints) -> tuple[Ints, Ints] | None:
        return None if self._guard.skips else epoch_end_of_source(self, rows, shards)

    def parameters(self) -> dict[str, Any]:
        return {"label": self.label, **self._identity}

    def progress(self, rows: Ints, shards: Ints, samples: Ints) -> dict[str, float]:
        return {"skipped_rows": float(rows[:, 0].sum())}
