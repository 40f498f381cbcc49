"""`WeightedSampler`: a mixture of sources."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Set
from contextlib import suppress
from dataclasses import replace
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np
import torch

from rescale_data.errors import DataStateError
from rescale_data.nodes.base import BaseNode, Node, View
from rescale_data.nodes.circle import WHOLE, Arc, Arcs, Circle, arcs, circle_of, stretched, within
from rescale_data.nodes.guard import add_place
from rescale_data.nodes.lengths import TokenArcs
from rescale_data.nodes.shard_of import find_shard
from rescale_data.state import Field, Ints

Unit: TypeAlias = Literal["samples", "tokens"]
Stop: TypeAlias = Literal["never", "first", "all"]

_SILENT_EPOCHS = 2
_ENDLESS = 1 << 62
_NUM, _NOW, _FIRST = 0, 1, 2  # slots: draws, the weights in use, and the first of those of each source
_KINDS = _DRAWS, _MIX, _DRAWN, _WEIGHT, _TOKENS, _SINCE = "draws", "mix", "drawn", "weight", "tokens", "since"


class WeightedSampler(Node[Any]):
    """The samples of several sources in the proportion of their weights.

    Draw n of logical shard i takes the source in whose arc a point of a circle falls, which is a function of i and n alone
    (`rescale_data.nodes.circle`). So *every global batch* is a mixture: by samples each source is within one sample of its
    share where N is a multiple of O and the case is aligned, within a few elsewhere; a shard's own stream is within 8. That
    holds where each sample of the loader is one of this mixture; below filters and packers the sources are spread as by
    independent draws, or better. By tokens an arc follows the mean length of a source's documents, and what it is behind.

    n goes on for ever. A source that is added, removed, that ends or has another weight moves arcs, not points. A mixture in a
    mixture, with nothing but `Map` and the like between them, is the flat mixture of the products.

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
        DataStateError: A source yielded no sample, or by tokens no token, in two whole epochs (``stop="never"``).

    Example:
        >>> import rescale_data as rd
        >>> shard = rd.Shard()
        >>> rows = {"web": rd.Reader(["w"] * 70, shard), "code": rd.Reader(["c"] * 30, shard)}
        >>> "".join(rd.WeightedSampler(rows, {"web": 0.7, "code": 0.3}, stop="first"))[:20]
        'cwcwwcwwwwcwwcwcwwcw'
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
        size = len(self.names)
        kinds = [slice(_FIRST + i * size, _FIRST + (i + 1) * size) for i in range(4)]
        self._drawn, self._weights, self._tokens, self._since = kinds
        self._target = np.array(list(self.weights.values())).view(np.int64).data
        self._mix = _mix_of(self.names, self.weights.values())
        self._given: int | None = None  # the next draw's point, where the mixture above says it
        self._circle = circle_of(0, 1)
        super().__init__(**{name: nodes[name] for name in self.names})
        self._nodes = [self.children[name] for name in self.names]
        self._inner = [_mixture_of(node) for node in self._nodes]
        self._changing = [name for name in self.names if any(n.MAY_CHANGE for _, n in self.children[name].walk())]
        shard = find_shard(self)
        self._shard = (shard.index, shard.num_logical_shards) if shard else (0, 1)
        for path, node in self.walk():
            if isinstance(node, WeightedSampler):
                node._circle = circle_of(*self._shard, ".".join(path))
        self._chosen = 0
        self.seek()

    def own_fields(self) -> tuple[Field, ...]:
        kinds = [Field((_DRAWN,), counts=True), Field((_WEIGHT,), torch.float64)]
        if self.unit == "tokens":
            kinds += [Field((_TOKENS,), counts=True), Field((_SINCE,), counts=True)]
        own = (Field((_DRAWS,), counts=True), Field((_MIX,)))
        return (*own, *(replace(kind, path=(*kind.path, name)) for kind in kinds for name in self.names))

    def seek(self) -> None:
        self._over = False
        self._arcs: Arcs | TokenArcs | None = None
        self._silent: dict[int, int] = {}

    def next(self) -> Any:
        return self.draw(next)

    def skip(self, num_samples: int) -> None:
        """By samples without reading, in time of the logarithm of their number, where sources know how many they have."""
        if self.unit == "tokens":
            return super().skip(num_samples)
        first = self.position[_NUM]
        stop = self.skip_draws(self._circle, first, first + num_samples, WHOLE)
        self._given = None
        if stop < first + num_samples:
            raise StopIteration
        return None

    def skip_draws(self, circle: Circle, first: int, stop: int, arc: Arc) -> int:
        """Leave out those of the draws ``first .. stop - 1`` that fall into an arc, which is the whole circle of this mixture.

        Returns:
            ``stop``, or the draw at which the epoch ended.
        """
        while first < stop and (arcs := self._plan()) is not None:
            lefts = self._lefts()
            if isinstance(arcs, TokenArcs) or lefts is None:
                return self._draw_in(circle, first, stop, arc)
            parts = [within(arcs.arc(source), arc) for source in range(len(self.names))]
            until, ended = self._first_end(circle, first, stop, parts, lefts)
            for source, part in enumerate(parts):
                self._leave_out(source, circle, first, until, part)
            first = until
            if ended >= 0:
                self._pass_end(ended)
        return first

    def epoch_end(self, rows: Ints, shards: Ints) -> tuple[Ints, Ints] | None:
        """Known by samples, where each source is read to its end."""
        if self.stop != "all" or self.unit == "tokens":
            return None
        left, after = np.zeros(len(rows), dtype=np.int64), rows.copy()
        drawn, weights = after[:, self._drawn], rows[:, self._weights]
        going = (drawn >= 0) & (weights != 0)
        drawn[:] = np.maximum(drawn, ~drawn)
        for i, name in enumerate(self.names):
            slots = self._slots(name)
            end = self.children[name].epoch_end(rows[:, slots], shards)
            if end is None:
                return None
            taken = np.where(going[:, i], end[0], 0)
            left += taken
            drawn[:, i] += taken
            after[:, slots] = np.where(going[:, i, None], end[1], rows[:, slots])
        after[:, _NUM] += left
        return left, after

    def initial(self) -> View:
        row = super().initial()
        row[_NOW], row[self._weights] = self._mix, self._target
        return row

    def check_saved(self, keys: Set[str]) -> None:
        if _DRAWS not in keys and any(key.startswith(f"{_DRAWN}.") for key in keys):
            raise DataStateError(
                "The state is that of a mixture of an older rescale_data, which drew from its sources by another rule: its "
                "positions cannot be gone on from. Finish that run with the release that saved it, or begin a new one."
            )

    def settle(self, position: View) -> bool:
        """Other weights count from here on. A source that has ended in this epoch stays so."""
        if position[_NOW] != self._mix:
            position[_NOW], position[self._weights] = self._mix, self._target
            if self.unit == "tokens":
                position[self._since] = position[self._tokens]
        return sum(self.children[name].settle(position[self._slots(name)]) for name in self._changing) > 0

    def is_stuck(self, position: View) -> bool:
        """Some of the weight is that of a source that is gone."""
        gone = position[_NOW] != _mix_of(self.names, _floats(position[self._weights]))
        return gone or super().is_stuck(position)

    def is_pending(self, position: View) -> bool:
        return position[_NOW] != self._mix or super().is_pending(position)

    def locate(self) -> str:
        return self._nodes[self._chosen].locate()

    def parameters(self) -> dict[str, Any]:
        return {"weights": self.weights, "unit": self.unit, "column": self.column, "stop": self.stop}

    def progress(self, rows: Ints, shards: Ints, samples: Ints) -> dict[str, float]:
        """What has been drawn from each source since the run began, and its share of that in the mixture's unit."""
        drawn = rows[:, self._drawn]
        counts = {"samples": np.maximum(drawn, ~drawn).sum(axis=0)}
        if self.unit == "tokens":
            counts["tokens"] = rows[:, self._tokens].sum(axis=0)
        shown = {f"drawn_{unit}": count for unit, count in counts.items()}
        shown["share"] = counts[self.unit] / max(1, counts[self.unit].sum())
        return {f"{key}/{name}": float(value[i]) for key, value in shown.items() for i, name in enumerate(self.names)}

    # Drawing

    def draw(self, how: Callable[[Node[Any]], Any]) -> Any:
        """The next sample, or what ``how`` makes of the node that would yield it."""
        while (chosen := self._choose()) is not None:
            try:
                sample = how(self._nodes[chosen])
            except StopIteration:
                self._end(chosen)
                continue
            self._count(chosen, self._length(sample))
            return sample
        raise StopIteration

    def _plan(self) -> Arcs | TokenArcs | None:
        """The arcs of the sources that have not ended; `None` at the end of the epoch."""
        if self._arcs is None and not self._over:
            weights = _floats(self.position[self._weights])
            drawn = self.position[self._drawn].tolist()
            going = tuple(weight if count >= 0 else 0.0 for weight, count in zip(weights, drawn, strict=True))
            if not any(going):
                self._finish()
            elif self.unit == "tokens":
                counts = [max(count, ~count) for count in drawn]
                self._arcs = TokenArcs(going, counts, *(self.position[k].tolist() for k in (self._tokens, self._since)))
            else:
                self._arcs = arcs(going)
        return self._arcs

    def _choose(self) -> int | None:
        """The next source; `None` at the end of the epoch."""
        arcs = self._arcs or self._plan()
        if arcs is None:
            return None
        point = self._circle.point(self.position[_NUM]) if self._given is None else self._given
        self._chosen = chosen = arcs.choose(point)
        inner = self._inner[chosen]
        if inner is not None:
            inner._given = arcs.stretch(point, chosen)
        return chosen

    def _count(self, chosen: int, length: int) -> None:
        self.position[_NUM] += 1
        self.position[self._drawn.start + chosen] += 1
        if length and self._silent:
            self._silent.pop(chosen, None)
        if isinstance(self._arcs, TokenArcs):
            self.position[self._tokens.start + chosen] += length
            self._arcs.drew(chosen, length)

    def _length(self, sample: Any) -> int:
        if self.unit == "samples":
            return 1
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

    # Leaving out

    def _draw_in(self, circle: Circle, first: int, stop: int, arc: Arc) -> int:
        """`skip_draws` a draw at a time, where only reading tells what there is."""
        how: Callable[[Node[Any]], Any] = next if self.unit == "tokens" else _pass_over
        for number in range(first, stop):
            point = circle.point(number)
            if arc[0] <= point < arc[1]:
                self._given = stretched(point, arc)
                try:
                    self.draw(how)
                except StopIteration:
                    return number
        return stop

    def _lefts(self) -> list[int] | None:
        """How many samples each source has before it ends what this mixture reads of it; `None` where that is not known."""
        row, shards = np.array(self.position)[None], np.array([self._shard[0]])
        if self.stop == "never":
            return [_ENDLESS] * len(self.names)
        ends = [node.epoch_end(row[:, self._slots(name)], shards) for name, node in self.children.items()]
        return [int(end[0][0]) for end in ends if end is not None] if None not in ends else None

    def _first_end(self, circle: Circle, first: int, stop: int, parts: list[Arc], lefts: list[int]) -> tuple[int, int]:
        """The first of the draws at which a source has nothing left, and which; ``stop`` and -1 where there is none."""
        ended = -1
        for source, (part, left) in enumerate(zip(parts, lefts, strict=True)):
            if circle.count(first, stop, part) > left:
                stop, ended = circle.find(first, part, left), source
        return stop, ended

    def _leave_out(self, source: int, circle: Circle, first: int, stop: int, part: Arc) -> None:
        """Leave out the draws that are a source's, over as many of its epochs as they take."""
        inner = self._inner[source]
        left = count = circle.count(first, stop, part)
        while left:
            before = left
            if inner is not None:
                first = inner.skip_draws(circle, first, stop, part)
                left = circle.count(first, stop, part)
            else:
                left -= self._leave_out_of_epoch(source, left)
            if left < before:
                self._silent.pop(source, None)
            if left:
                self._pass_end(source)
        self.position[_NUM] += count
        self.position[self._drawn.start + source] += count

    def _leave_out_of_epoch(self, source: int, most: int) -> int:
        """Leave out so many samples of a source; fewer where its epoch ends."""
        node, num = self._nodes[source], 0
        end = node.epoch_end(np.array(node.position)[None], np.array([self._shard[0]]))
        if end is not None:
            num = min(most, int(end[0][0]))
            node.skip(num)
        else:
            with suppress(StopIteration):
                while num < most:
                    node.skip(1)
                    num += 1
        return num

    def _pass_end(self, source: int) -> None:
        try:
            self._nodes[source].skip(1)
        except StopIteration:
            self._end(source)

    # Ends

    def _end(self, chosen: int) -> None:
        """A source has ended, and its position is the beginning of its next epoch."""
        self._arcs = None
        if self.stop == "never":
            self._repeat(chosen)
        elif self.stop == "first":
            self._over = True
        else:
            self.position[self._drawn.start + chosen] ^= -1

    def _repeat(self, chosen: int) -> None:
        silent = self._silent[chosen] = self._silent.get(chosen, 0) + 1
        if silent > _SILENT_EPOCHS:
            raise DataStateError(
                f"The source {self.names[chosen]!r} of a mixture yielded no {self.unit[:-1]} in {_SILENT_EPOCHS} whole epochs "
                f"of logical shard {self._shard[0]} of {self._shard[1]}: all of its rows were filtered out or are empty, or it "
                f"has none. Use fewer logical shards, more data, or weight 0."
            )
        self._nodes[chosen].bind(self._nodes[chosen].position)

    def _finish(self) -> None:
        """All sources have ended: the next epoch begins with all."""
        self._over = True
        for i in range(self._drawn.start, self._drawn.stop):
            self.position[i] = max(self.position[i], ~self.position[i])


def _pass_over(node: Node[Any]) -> None:
    """Leave out a sample, at the point that has been given to a mixture that yields it."""
    inner = _mixture_of(node)
    if inner is None or inner.unit == "tokens":
        node.skip(1)
    else:
        inner.draw(_pass_over)


def _mixture_of(node: Node[Any]) -> WeightedSampler | None:
    """The mixture whose samples a node yields, one for one."""
    while node.one_for_one:
        node = node.children["source"]
    return node if isinstance(node, WeightedSampler) else None


def _mix_of(names: Iterable[str], weights: Iterable[float]) -> int:
    """A number that stands for the sources that are drawn from, and their weights."""
    text = repr([(name, weight) for name, weight in zip(names, weights, strict=True) if weight])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def _floats(slots: View) -> list[float]:
    return np.array(slots).view(np.float64).tolist()


def _check(
    nodes: Mapping[str, BaseNode[Any]], weights: Mapping[str, float], unit: str, column: str | None, stop: str
) -> None:
    if not nodes or set(nodes) != set(weights):
        raise ValueError(
            f"WeightedSampler was given the nodes {sorted(nodes)} and the weights {sorted(weights)}: give a weight for each."
        )
    bad = [name for name in nodes if not name or "." in name or name in (*_KINDS, "self")]
    if bad:
        raise ValueError(f"The names {bad} of sources cannot be part of a state's path: without dots, and others.")
    if not all(math.isfinite(weight) and weight >= 0 for weight in weights.values()) or not any(weights.values()):
        raise ValueError(f"weights={dict(weights)}: give finite numbers, none negative and not all 0.")
    if unit not in ("samples", "tokens") or stop not in ("never", "first", "all"):
        raise ValueError(f"unit={unit!r}, stop={stop!r}: give 'samples' or 'tokens', and 'never', 'first' or 'all'.")
    if (unit == "tokens") != (column is not None):
        raise ValueError(f"unit={unit!r} with column={column!r}: tokens are counted in a column; samples are not.")
