"""`WeightedSampler`: a mixture of sources."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np
import torch

from rescale_data.errors import DataStateError
from rescale_data.nodes import quota
from rescale_data.nodes.base import BaseNode, Node, View
from rescale_data.nodes.guard import add_place
from rescale_data.nodes.shard_of import find_shard
from rescale_data.state import Field, Ints

Unit: TypeAlias = Literal["samples", "tokens"]
Stop: TypeAlias = Literal["never", "first", "all"]

_ENDED = -1
_SILENT_EPOCHS = 2
_DRAWN, _LONGEST, _WEIGHT, _TOTAL = "drawn", "longest", "weight", "total"


class WeightedSampler(Node[Any]):
    """The samples of several sources in the proportion of their weights.

    Which source is next follows from how much has been drawn from each, without random numbers. In every prefix of a logical
    shard's stream the samples of a source deviate from its share by less than one; its tokens by at most twice the longest
    sample so far. Logical shards follow different orders of this kind, so that a global batch is a mixture as well.

    Each source keeps its own epoch, ``<name>.<...>.epoch`` in the state. Between the legs of a run the weights may change:
    they count from then on; under a packer, from the end of the document or window that a logical shard is within, which
    goes on with the weights it was begun with. Sources may be removed, and added with `rescale_data.load_changed`. What a
    packer has begun with a source that is gone is begun again without it, with a warning: give such a source weight 0 for a
    while before.

    Args:
        nodes: The sources by name. Names are part of the state's paths.
        weights: Of each, at least 0, in any scale. A source of weight 0 rests.
        unit: What the weights are shares of: "samples", or "tokens", which are ``len(sample[column])``.
        column: Which, with tokens.
        stop: What happens when a source ends. "never": it begins its next epoch at once, so the mixture has no end, even with
            `Shard.repeat` false. "first": the mixture's epoch ends; the other sources go on where they are in the next.
            "all": the source rests until all have ended, and the others keep their proportions: each row once an epoch.

    Raises:
        ValueError: Names or weights that do not fit; tokens without a column.
        DataStateError: A source yielded nothing in two whole epochs (``stop="never"``).
    """

    MAY_CHANGE: ClassVar[frozenset[str]] = frozenset({"weights"})
    CHILDREN_MAY_CHANGE: ClassVar[bool] = True

    def __init__(
        self,
        nodes: Mapping[str, BaseNode[Any]],
        weights: Mapping[str, float],
        *,
        unit: Unit = "samples",
        column: str | None = None,
        stop: Stop = "never",
    ) -> None:
        _check(nodes, weights, unit, column, stop)
        self.names = sorted(nodes)
        self.unit, self.column, self.stop = unit, column, stop
        self.weights = {name: float(weights[name]) for name in self.names}
        self._num_counts = len(self.names) + (unit == "tokens")
        self._weights = slice(self._num_counts, self._num_counts + len(self.names) + 1)
        kept = list(self.weights.values())
        self._target = np.array([*kept, math.fsum(kept)]).view(np.int64).data
        super().__init__(**{name: nodes[name] for name in self.names})
        self._nodes = [self.children[name] for name in self.names]
        shard = find_shard(self)
        self._shard = (shard.seed, shard.index) if shard else None
        self._chosen = 0

    def own_fields(self) -> tuple[Field, ...]:
        drawn = tuple(Field((_DRAWN, name)) for name in self.names)
        longest = (Field((_LONGEST,)),) if self.unit == "tokens" else ()
        weights = tuple(Field((_WEIGHT, name), torch.float64) for name in self.names)
        return (*drawn, *longest, *weights, Field((_TOTAL,), torch.float64))

    def seek(self) -> None:
        self._over = False
        self._plan()

    def next(self) -> Any:
        while (chosen := self._choose()) is not None:
            try:
                sample = next(self._nodes[chosen])
            except StopIteration:
                self._end(chosen)
                continue
            self._count(chosen, sample)
            return sample
        raise StopIteration

    def skip(self, num_samples: int) -> None:
        if self.unit == "tokens":
            return super().skip(num_samples)
        for _ in range(num_samples):
            self._skip_one()
        return None

    def epoch_end(self, rows: Ints, shards: Ints) -> tuple[Ints, Ints] | None:
        """Known where each source is read to its end."""
        if self.stop != "all":
            return None
        left, after = np.zeros(len(rows), dtype=np.int64), rows.copy()
        after[:, : len(self.names)] = 0
        for i, name in enumerate(self.names):
            slots = self._slots(name)
            end = self.children[name].epoch_end(rows[:, slots], shards)
            if end is None:
                return None
            going = (rows[:, i] != _ENDED) & (rows[:, self._weights][:, i] != 0)
            left += np.where(going, end[0], 0)
            after[:, slots] = np.where(going[:, None], end[1], rows[:, slots])
        return left, after

    def initial(self) -> View:
        row = super().initial()
        row[self._weights] = self._target
        return row

    def settle(self, position: View) -> bool:
        """Other weights count from here on. A source that has ended in this epoch stays so."""
        if position[self._weights] != self._target:
            position[self._weights] = self._target
            for i in range(len(self.names)):
                position[i] = min(position[i], 0)
        return super().settle(position)

    def is_stuck(self, position: View) -> bool:
        """Some of the weight is that of a source that is gone."""
        *weights, total = _floats(position[self._weights])
        return math.fsum(weights) != total or super().is_stuck(position)

    def locate(self) -> str:
        return self._nodes[self._chosen].locate()

    def parameters(self) -> dict[str, Any]:
        return {"weights": self.weights, "unit": self.unit, "column": self.column, "stop": self.stop}

    def progress(self, rows: Ints, shards: Ints, samples: Ints) -> dict[str, float]:
        """What has been drawn from each source since the weights changed last."""
        drawn = np.maximum(rows[:, : len(self.names)], 0).sum(axis=0).tolist()
        return {f"drawn_{self.unit}/{name}": float(count) for name, count in zip(self.names, drawn, strict=True)}

    # Choosing

    def _plan(self) -> None:
        """Choose from the sources that have not ended."""
        self._silent = 0
        weights, drawn = _floats(self.position[self._weights]), self.position
        going = [0.0 if drawn[i] == _ENDED else weights[i] for i in range(len(self.names))]
        self._order = None
        if any(going):
            shares = quota.shares(tuple(going))
            self._order = quota.TokenOrder(shares) if self.unit == "tokens" else quota.Order(shares, self._shard)

    def _choose(self) -> int | None:
        """The next source; `None` at the end of the epoch."""
        if self._order is None and not self._over:
            self._finish()
        if self._order is None or self._over:
            return None
        counts = self.position[: self._num_counts].tolist()
        if self.stop == "all":
            counts = [max(count, 0) for count in counts]
        self._chosen = self._order.next(counts)
        return self._chosen

    def _count(self, chosen: int, sample: Any) -> None:
        self._silent = 0
        if self.unit == "samples":
            self.position[chosen] += 1
            return
        length = self._length(sample)
        self.position[chosen] += length
        self.position[self._num_counts - 1] = max(self.position[self._num_counts - 1], length)

    def _length(self, sample: Any) -> int:
        try:
            return len(sample[self.column])
        except (TypeError, LookupError) as cause:
            given = f"the keys {list(sample)}" if isinstance(sample, Mapping) else f"a {type(sample).__name__}"
            error = TypeError(
                f"WeightedSampler(unit='tokens', column={self.column!r}) was given a sample with {given}, and under that key "
                f"nothing that has a length. Yield dicts with the tokens of one document there, or leave such samples out "
                f"with rd.Filter."
            )
            add_place(error, type(self).__name__, self.locate())
            raise error from cause

    def _skip_one(self) -> None:
        while (chosen := self._choose()) is not None:
            try:
                self._nodes[chosen].skip(1)
            except StopIteration:
                self._end(chosen)
                continue
            self._silent = 0
            self.position[chosen] += 1
            return
        raise StopIteration

    # Ends

    def _end(self, chosen: int) -> None:
        """A source has ended, and its position is the beginning of its next epoch."""
        if self.stop == "never":
            self._repeat(chosen)
        elif self.stop == "first":
            self._over = True
        else:
            self._rest(chosen)

    def _repeat(self, chosen: int) -> None:
        self._silent += 1
        if self._silent > _SILENT_EPOCHS:
            raise DataStateError(
                f"The source {self.names[chosen]!r} of a mixture yielded no sample in {_SILENT_EPOCHS} whole epochs of a "
                f"logical shard: all of its rows were filtered out, or it has none. Use fewer logical shards, more data, or "
                f"weight 0."
            )
        self._nodes[chosen].bind(self._nodes[chosen].position)

    def _rest(self, chosen: int) -> None:
        for i in range(len(self.names)):
            self.position[i] = min(self.position[i], 0)
        self.position[chosen] = _ENDED
        self._plan()

    def _finish(self) -> None:
        """All sources have ended: the next epoch begins with all."""
        self._over = True
        for i in range(len(self.names)):
            self.position[i] = 0


def _floats(slots: View) -> list[float]:
    return np.array(slots).view(np.float64).tolist()


def _check(
    nodes: Mapping[str, BaseNode[Any]], weights: Mapping[str, float], unit: str, column: str | None, stop: str
) -> None:
    if not nodes or set(nodes) != set(weights):
        raise ValueError(
            f"WeightedSampler was given the nodes {sorted(nodes)} and the weights {sorted(weights)}: give a weight for each."
        )
    bad = [name for name in nodes if not name or "." in name or name in (_DRAWN, _LONGEST, _WEIGHT, _TOTAL, "self")]
    if bad:
        raise ValueError(f"The names {bad} of sources cannot be part of a state's path: without dots, and others.")
    if not all(math.isfinite(weight) and weight >= 0 for weight in weights.values()) or not any(weights.values()):
        raise ValueError(f"weights={dict(weights)}: give finite numbers, none negative and not all 0.")
    if unit not in ("samples", "tokens") or stop not in ("never", "first", "all"):
        raise ValueError(f"unit={unit!r}, stop={stop!r}: give 'samples' or 'tokens', and 'never', 'first' or 'all'.")
    if (unit == "tokens") != (column is not None):
        raise ValueError(f"unit={unit!r} with column={column!r}: tokens are counted in a column; samples are not.")
