"""`Map` and `RandomMap`: apply a function to each sample."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from rescale_data.errors import checks_argument_types
from rescale_data.nodes.base import BaseNode, Node
from rescale_data.nodes.below import num_nodes_below, sample_id_slots, shard_of
from rescale_data.nodes.empty_draws import EmptyDrawLimit
from rescale_data.nodes.error_handler import OnError, error_handler
from rescale_data.nodes.function import function_identity
from rescale_data.nodes.provenance import copy_provenance
from rescale_data.order import generator
from rescale_data.shard import Shard
from rescale_data.state import Ints, counter


class PerSample(Node[Any]):
    """Base class of `Map` and `RandomMap`: yields at most one sample for each sample of its source."""

    FIELDS = (counter("skipped"),)
    one_for_one = True
    _extra_argument: Any = None
    """Makes the second argument of ``fn``, in a class whose ``fn`` has one; called before the sample is drawn."""

    def __init__(
        self,
        source: BaseNode[Any],
        fn: Callable[..., Any],
        *,
        on_error: OnError = "raise",
        version: str | int | None = None,
    ) -> None:
        super().__init__(source=source)
        self._fn_identity = function_identity(fn, version)
        self.fn = fn
        self._source = self.children["source"]
        self._error_handler, self._draw_limit = error_handler(self, on_error), EmptyDrawLimit(self)
        self.one_for_one = self.one_for_one and not self._error_handler.skips

    def next(self) -> Any:
        num_empty = 0
        while True:
            extra = None if self._extra_argument is None else self._extra_argument()
            sample = next(self._source)
            try:
                return copy_provenance(sample, self.fn(sample) if extra is None else self.fn(sample, extra))
            except Exception as error:
                replacement = self._error_handler.handle_error(error, self.locate(), self.position[0])
                if replacement is not None:
                    return copy_provenance(sample, replacement)
                self.position[0] += 1
                num_empty = self._draw_limit.count_empty_draws(num_empty)

    def parameters(self) -> dict[str, Any]:
        return self._fn_identity

    def progress(self, rows: Ints, shards: Ints, samples: Ints) -> dict[str, float]:
        return {"skipped_rows": float(rows[:, 0].sum())}


class Map(PerSample):
    """Applies ``fn`` to each sample.

    Args:
        source: A node.
        fn: Function from a sample to a sample. It keeps no memory of earlier samples. An error in it names the row.
        version: As in `Filter`.
        on_error: "raise" raises the error. "skip" leaves out samples for which ``fn`` raises, logs them and counts them
            (``skipped_rows``); errors of the program, such as `NameError`, are still raised. A function receives the error
            and the place of its row: it raises, returns a value to use in place of the result of ``fn``, or returns `None` to
            leave the sample out. Unless ``on_error`` is "raise", the number of samples in an epoch is unknown.

    Example:
        >>> import rescale_data as rd
        >>> list(rd.Map(rd.Reader(range(3), rd.Shard(), shuffle=False), lambda row: row * 10))
        [0, 10, 20]
    """


class RandomMap(PerSample):
    """Applies ``fn(sample, rng)`` to each sample; the random numbers depend neither on the topology nor on resumes.

    Each sample gets a new generator. It is keyed by the seed, the logical shard and the position of the source at the sample:
    epoch and row, or over a mixture the number of the draw. Counts, such as skipped rows, do not change it. Nothing random is
    state. The raw stream is the same in every version of NumPy; results of `numpy.random.Generator` methods may change.

    Args:
        source: A node.
        fn: Function from a sample and a `numpy.random.Generator` to a sample. It draws random numbers from nothing else.
        label: Distinguishes this node from others at the same positions, as in the branches of a mixture, which would draw the
            same numbers otherwise. A RandomMap over another one needs no label, unless a mixture is between them.
        shard: The logical shard. Default: the shard of the `Reader` below.
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

    @checks_argument_types
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
        super().__init__(source, fn, on_error=on_error, version=version)
        self.label = label
        shard = shard_of(self, shard)
        self._random_key = (shard.seed, shard.index, num_nodes_below(self, RandomMap))
        self._sample_id_slots = sample_id_slots(self._source)

    def _extra_argument(self) -> np.random.Generator:
        position = self._source.position
        return generator(
            f"random_map/{self.label}", *self._random_key, *(position[slot] for slot in self._sample_id_slots)
        )

    def parameters(self) -> dict[str, Any]:
        return {"label": self.label, **self._fn_identity}
