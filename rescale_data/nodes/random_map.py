"""`RandomMap`: a function of each sample and a random generator that belongs to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from rescale_data.errors import checks_kinds
from rescale_data.nodes.base import BaseNode
from rescale_data.nodes.guard import OnError
from rescale_data.nodes.map import OfEach
from rescale_data.nodes.shard_of import shard_of
from rescale_data.order import generator
from rescale_data.shard import Shard
from rescale_data.state import place_slots


class RandomMap(OfEach):
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
        depth = sum(isinstance(node, RandomMap) for _, node in self._source.walk())
        self._key = (shard.seed, shard.index, depth)
        self._slots_of_place = place_slots(self._source.fields)

    def _beside(self) -> np.random.Generator:
        position = self._source.position
        place = [position[slot] for slot in self._slots_of_place]
        return generator(f"random_map/{self.label}", *self._key, *place)

    def parameters(self) -> dict[str, Any]:
        return {"label": self.label, **self._identity}
