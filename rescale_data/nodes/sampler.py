"""`WeightedSampler`: a mixture of sources."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import replace
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np
import torch

from rescale_data.errors import DataStateError, require_int
from rescale_data.nodes.base import BaseNode, Node, View, copy_of
from rescale_data.nodes.caps import Cap, check_caps, part_of
from rescale_data.nodes.circle import WHOLE, Arc, Arcs, Circle, arcs, circle_of, grouped_circle_of, stretched, within
from rescale_data.nodes.column import ColumnDocuments
from rescale_data.nodes.guard import add_place
from rescale_data.nodes.lengths import TokenArcs
from rescale_data.nodes.mixed import SILENT_EPOCHS, MixedDocuments
from rescale_data.nodes.reader import Reader
from rescale_data.nodes.reading.documents import Documents
from rescale_data.nodes.shard_of import find_shard
from rescale_data.nodes.sizes import Size, Sizes
from rescale_data.nodes.weights import Schedule, as_json, from_json, mix_of, pieces_of, require_weights, shares_until
from rescale_data.sources.source import TokenSource
from rescale_data.state import Field, Ints

Unit: TypeAlias = Literal["samples", "tokens"]
Stop: TypeAlias = Literal["never", "first", "all"]

_ENDLESS = 1 << 62
_NUM, _NOW, _FIRST = 0, 1, 2  # slots: draws, the weights in use, and the first of those of each source
_KINDS = _DRAWS, _MIX, _DRAWN, _WEIGHT, _TOKENS, _SINCE = "draws", "mix", "drawn", "weight", "tokens", "since"
_log = logging.getLogger("rescale_data")


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
        weights: Of each, at least 0, in any scale. A source of weight 0 rests. Or a `Schedule` of them; or "rows" or
            "tokens": as many as each source has, where it knows. Files that are added count from the epoch at which they join.
        unit: What the weights are shares of: "samples", or "tokens", which are ``len(sample[column])``.
        column: Which, with tokens.
        stop: What happens when a source ends. "never": it begins its next epoch at once, so the mixture has no end, even with
            `Shard.repeat` false. "first": the mixture's epoch ends; the other sources go on where they are in the next.
            "all": the source rests until all have ended, and the others keep their proportions: each row once an epoch.
        temperature: With "rows" and "tokens": weights are ``size ** (1 / temperature)``.
        caps: At most so much of a source in the whole run, ``{"books": {"epochs": 4}}``, or "samples" or "tokens", of which
            each logical shard gets its part; tokens overshoot by at most one document a shard. Then its arc goes to the
            others, which is logged. When all of them have reached theirs, the stream ends.
        group: As many neighbouring rows of a global batch come from one source, in every micro batch of a multiple of them;
            O makes whole batches of one source. By samples, ``stop="never"``, without caps, the mixture at the root,
            N a multiple of O and the case aligned: anything else is refused. Another O only when all logical shards have
            delivered as many samples.

    Raises:
        ValueError: Names, weights or caps that do not fit; tokens without a column; a source that does not know its size.
        DataStateError: A source yielded no sample, or by tokens no token, in two whole epochs (``stop="never"``). An endless
            stream (`Shard.repeat`) of which all sources have reached their caps.

    Example:
        >>> import rescale_data as rd
        >>> shard = rd.Shard()
        >>> rows = {"web": rd.Reader(["w"] * 70, shard), "code": rd.Reader(["c"] * 30, shard)}
        >>> "".join(rd.WeightedSampler(rows, {"web": 0.7, "code": 0.3}, stop="first"))[:20]
        'cwcwwcwwwwcwwcwcwwcw'
    """

    MAY_CHANGE: ClassVar[frozenset[str]] = frozenset({"weights", "by", "temperature", "caps"})
    CHILDREN_MAY_CHANGE: ClassVar[bool] = True

    def __init__(
        self,
        nodes: Mapping[str, BaseNode[Any]],
        weights: Mapping[str, float] | Schedule | Size,
        *,
        unit: Unit = "samples",
        column: str | None = None,
        stop: Stop = "never",
        temperature: float = 1.0,
        caps: Mapping[str, Mapping[str, int]] | None = None,
        group: int = 1,
    ) -> None:
        _check(nodes, weights, unit, column, stop)
        self.names = sorted(nodes)
        self.unit, self.column, self.stop = unit, column, stop
        check_caps(caps or {}, self.names, unit)
        _check_group(group, unit, stop, caps)
        self.group = group
        size = len(self.names)
        kinds = [slice(_FIRST + i * size, _FIRST + (i + 1) * size) for i in range(4)]
        self._drawn, self._weights, self._tokens, self._since = kinds
        self._turn_at: int | None = None  # what has been drawn in this shard when the next weights begin
        self._said: set[str] = set()
        self._given: int | None = None  # the next draw's point, where the mixture above says it
        self.circle = circle_of(0, 1)
        self._sizes: Sizes | None = None
        self._pieces = pieces_of(self.names, dict.fromkeys(self.names, 1.0) if isinstance(weights, str) else weights)
        super().__init__(**{name: nodes[name] for name in self.names})
        self._nodes = [self.children[name] for name in self.names]
        self._inner = [_mixture_of(node) for node in self._nodes]
        self._changing = [name for name in self.names if any(n.MAY_CHANGE for _, n in self.children[name].walk())]
        shard = find_shard(self)
        self._shard = (shard.index, shard.num_logical_shards) if shard else (0, 1)
        if isinstance(weights, str):
            starts = {name: self._slots(name).start for name in self.names}
            self._sizes, self._by = Sizes(self.children, starts, weights, column, temperature), (weights, temperature)
            weights = self._sizes.weights(self.position)
        self.weights = weights if isinstance(weights, Schedule) else {name: float(weights[name]) for name in self.names}
        self._pieces = pieces_of(self.names, self.weights)
        self.caps = {name: dict(cap) for name, cap in sorted((caps or {}).items())}
        self._caps = {
            self.names.index(name): self._cap(name, *next(iter(cap.items()))) for name, cap in self.caps.items()
        }
        self.position = self.initial()
        for path, node in self.walk():
            if isinstance(node, WeightedSampler):
                node.circle = circle_of(*self._shard, ".".join(path))
        if shard and not (shard.num_logical_shards % shard.global_batch_size or shard.global_batch_size % group):
            self.circle = grouped_circle_of(
                *self._shard, shard.global_batch_size, group
            )  # else refused by who serves it
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
        self._holds, self._turn_at = True, None

    def next(self) -> Any:
        return self.draw(next)

    def skip(self, num_samples: int) -> None:
        """By samples without reading, in time of the logarithm of their number, where sources know how many they have."""
        if self.unit == "tokens":
            return super().skip(num_samples)
        first = self.position[_NUM]
        stop = self.skip_draws(self.circle, first, first + num_samples, WHOLE)
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
            until, ended = self._first_end(
                circle, first, self._first_change(circle, first, stop, arc, parts), parts, lefts
            )
            for source, part in enumerate(parts):
                self._leave_out(source, circle, first, until, part)
            first = until
            self._cross(self._caps)
            if ended >= 0:
                self._pass_end(ended)
        return first

    def epoch_end(self, rows: Ints, shards: Ints) -> tuple[Ints, Ints] | None:
        """Known by samples, where each source is read to its end."""
        if self.stop != "all" or self.unit == "tokens" or self._caps or len(self._pieces.begins) > 1 or self._grows():
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
        row[_NOW], row[self._weights] = (
            self._pieces.slots[0] if self._sizes is None else self._sizes.pieces(row).slots[0]
        )
        return row

    def adopt(self, history: Sequence[tuple[int, Mapping[str, Any]]]) -> None:
        if self._sizes is not None:
            self._sizes.forget()

    def check_change(self, saved: Mapping[str, Any], rows: Ints) -> None:
        before, progress = from_json(saved["weights"]), int(self._progress_of(rows).max())
        if isinstance(self.weights, Schedule) and isinstance(before, Schedule | dict):
            was = shares_until(pieces_of(self.names, before), progress)
            now = shares_until(self._pieces, progress)
            if was != now:
                raise DataStateError(
                    f"The weights of the Schedule up to {progress}, which is what the logical shard that is farthest has drawn "
                    f"times their number, differ from those of the checkpoint: they were {_shown(was, now)}, and are "
                    f"{_shown(now, was)}. What has been drawn cannot change: give the saved keys up to there, and change "
                    f"those behind. With interpolate='linear' both keys around it count."
                )
        for source, cap in self._caps.items():
            name, drawn = self.names[source], rows[:, cap.slot]
            drawn = np.maximum(drawn, ~drawn)
            limits = np.array([part_of(cap.unit, cap.total, shard, self._shard[1]) for shard in range(len(rows))])
            if saved.get("caps", {}).get(name) != self.caps[name] and (drawn > limits).any():
                total = drawn.max() if cap.unit == "epochs" else drawn.sum()
                raise DataStateError(
                    f"caps[{name!r}]={self.caps[name]} is below what has been drawn already: {int(total)} {cap.unit}, in "
                    f"{int((drawn > limits).sum())} of {len(rows)} logical shards more than their part. Give a larger cap; for "
                    f"a source that is to rest, weight 0."
                )

    def check_saved(self, keys: Set[str]) -> None:
        if _DRAWS not in keys and any(key.startswith(f"{_DRAWN}.") for key in keys):
            raise DataStateError(
                "The state is that of a mixture of an older rescale_data, which drew from its sources by another rule: its "
                "positions cannot be gone on from. Finish that run with the release that saved it, or begin a new one."
            )

    def settle(self, position: View) -> bool:
        """Other weights count from here on. A source that has ended in this epoch stays so."""
        self._put(position, *self._target(position))
        return sum(self.children[name].settle(position[self._slots(name)]) for name in self._changing) > 0

    def is_stuck(self, position: View) -> bool:
        """Some of the weight is that of a source that is gone."""
        gone = position[_NOW] != mix_of(self.names, _floats(position[self._weights]))
        return gone or super().is_stuck(position)

    def is_blocked(self, position: View) -> bool:
        if not self.is_relisted(position):
            return False
        self.bind(copy_of(position))
        chosen = self._choose()
        return chosen is not None and self._nodes[chosen].is_blocked(position[self._slots(self.names[chosen])])

    def is_pending(self, position: View) -> bool:
        return position[_NOW] != self._target(position)[0] or super().is_pending(position)

    def locate(self) -> str:
        return self._nodes[self._chosen].locate()

    def parameters(self) -> dict[str, Any]:
        given = {"weights": as_json(self.weights), "unit": self.unit, "column": self.column, "stop": self.stop}
        sized = {} if self._sizes is None else dict(zip(("by", "temperature"), self._by, strict=True))
        used = {"caps": self.caps} if self.caps else {}
        return {**given, **sized, **used, **({"group": self.group} if self.group > 1 else {})}

    def progress(self, rows: Ints, shards: Ints, samples: Ints) -> dict[str, float]:
        """Of each source: what was drawn since the run began, its share of that in the mixture's unit, epochs, and caps.

        ``epochs/...`` is the mean over the readers below a source and over logical shards, and ``capped_shards/...`` how many
        of these have reached its cap.
        """
        drawn = rows[:, self._drawn]
        counts = {"samples": np.maximum(drawn, ~drawn).sum(axis=0)}
        if self.unit == "tokens":
            counts["tokens"] = rows[:, self._tokens].sum(axis=0)
        shown = {f"drawn_{unit}": count for unit, count in counts.items()}
        shown["share"] = counts[self.unit] / max(1, counts[self.unit].sum())
        found = {f"{key}/{name}": float(value[i]) for key, value in shown.items() for i, name in enumerate(self.names)}
        for name in self.names:
            if readers := self._readers(name):
                epochs = [reader.epochs_at(rows[:, slot:], shards) for reader, slot in readers]
                found[f"epochs/{name}"] = float(np.mean(epochs))
        for source, cap in self._caps.items():
            limits = np.array([part_of(cap.unit, cap.total, shard, self._shard[1]) for shard in shards.tolist()])
            count = rows[:, cap.slot]
            found[f"capped_shards/{self.names[source]}"] = float((np.maximum(count, ~count) >= limits).sum())
        return found

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
            self._watch()
            self._arcs = self.arcs_at(self.position)
            self._over = self._arcs is None
        return self._arcs

    def arcs_at(self, position: View) -> Arcs | TokenArcs | None:
        """The same at any position, into which the beginning of the next epoch is written where this one has ended."""
        weights, drawn = _floats(position[self._weights]), position[self._drawn].tolist()
        counts = [max(count, ~count) for count in drawn]
        going = tuple(weight if count >= 0 else 0.0 for weight, count in zip(weights, drawn, strict=True))
        if not any(going):
            self._require_more(position)
            position[self._drawn] = np.array(counts, dtype=np.int64).data
            return None
        if self.unit == "samples":
            return arcs(going)
        return TokenArcs(going, counts, *(position[kind].tolist() for kind in (self._tokens, self._since)))

    def _choose(self) -> int | None:
        """The next source; `None` at the end of the epoch."""
        arcs = self._arcs or self._plan()
        if arcs is None:
            return None
        point = self.circle.point(self.position[_NUM]) if self._given is None else self._given
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
        if self._turn_at is not None or chosen in self._caps:
            self._cross([chosen])

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

    # Weights that change

    def _cap(self, name: str, unit: str, total: int) -> Cap:
        source = self.names.index(name)
        slot = {"samples": self._drawn, "tokens": self._tokens}.get(unit, self._drawn).start + source
        if unit == "epochs":
            readers = self._readers(name)
            if len(readers) != 1:
                raise ValueError(
                    f"caps[{name!r}]={{'epochs': {total}}}: the source reads {len(readers)} rd.Reader, so its epochs are not "
                    f"those of one. Cap its samples, or the readers in a mixture of their own."
                )
            slot = readers[0][1]
        return Cap(unit, total, part_of(unit, total, *self._shard), slot)

    def _readers(self, name: str) -> list[tuple[Reader, int]]:
        """The readers of a source, and the first slot of each, which is its epoch."""
        child, start = self.children[name], self._slots(name).start
        found = [(node, child.slot_of(path)) for path, node in child.walk() if isinstance(node, Reader)]
        return [(reader, start + slot) for reader, slot in found if slot is not None]

    def _grows(self) -> bool:
        return self._sizes is not None and self._sizes.grow

    def _is_small(self, node: Node[Any]) -> bool:
        """Whether a source goes on from epoch to epoch by itself, as one of fewer rows than logical shards does."""
        return any(isinstance(n, Reader) and n.source.num_rows < self._shard[1] for _, n in node.walk())

    def _progress_of(self, rows: Ints) -> Ints:
        """What the mixture has drawn in each logical shard in its unit, times the number of these."""
        drawn = rows[:, self._tokens].sum(axis=1) if self.unit == "tokens" else rows[:, _NUM]
        return drawn * self._shard[1]

    def _target(self, position: View) -> tuple[int, View]:
        """The weights that are to count at a position, and a number that stands for them."""
        if not (self._caps or self._sizes or len(self._pieces.begins) > 1):
            return self._pieces.slots[0]
        pieces = self._pieces if self._sizes is None else self._sizes.pieces(position)
        number = 0 if len(pieces.begins) == 1 else pieces.number(int(self._progress_of(np.array(position)[None])[0]))
        reached = [source for source, cap in self._caps.items() if cap.reached(position)]
        if not reached:
            return pieces.slots[number]
        weights = [0.0 if source in reached else weight for source, weight in enumerate(pieces.weights[number])]
        return mix_of(self.names, weights), np.array(weights).view(np.int64).data

    def _put(self, position: View, mix: int, weights: View) -> None:
        if position[_NOW] != mix:
            position[_NOW], position[self._weights] = mix, weights
            if self.unit == "tokens":
                position[self._since] = position[self._tokens]

    def _watch(self) -> None:
        """Whether the weights are those of now, and how far they hold; else they stay until the position is settled."""
        if self._caps and not self.position[_NUM]:  # of a cap of less than one in each logical shard
            self._put(self.position, *self._target(self.position))
        self._holds = self.position[_NOW] == self._target(self.position)[0]
        self._turn_at = None
        if self._holds and len(self._pieces.begins) > 1:
            end = self._pieces.end(int(self._progress_of(np.array(self.position)[None])[0]))
            self._turn_at = None if end is None else -(-end // self._shard[1])

    def _cross(self, sources: Iterable[int]) -> None:
        """After a draw: a schedule's next piece begins, or a source has reached its cap."""
        capped = [s for s in sources if self._holds and s in self._caps and self._caps[s].reached(self.position)]
        drawn = self._arcs.num_tokens if isinstance(self._arcs, TokenArcs) else self.position[_NUM]
        if capped or (self._turn_at is not None and drawn >= self._turn_at):
            self._change(capped)

    def _change(self, sources: Iterable[int]) -> None:
        """Let the weights of now take effect, in the middle of an epoch."""
        self._put(self.position, *self._target(self.position))
        self._arcs = None
        for name in [self.names[s] for s in sources if s in self._caps and self._caps[s].reached(self.position)]:
            if self._shard[0] or name in self._said:
                continue
            self._said.add(name)
            _log.warning(
                "The source %r of a mixture has reached its cap of %s in the first of %d logical shards, as it will in the "
                "others: its part goes to the other sources.", name, self.caps[name], self._shard[1],
            )  # fmt: skip

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
        by_epochs = {source for source, cap in self._caps.items() if cap.unit == "epochs"}
        lefts: list[int] = []
        for source, (name, node) in enumerate(self.children.items()):
            if self.stop == "never" and not (self._grows() or source in by_epochs):
                lefts.append(_ENDLESS)
                continue
            end = node.epoch_end(row[:, self._slots(name)], shards)
            if end is None or (source in by_epochs and self._is_small(node)):
                return None
            lefts.append(int(end[0][0]))
        return lefts

    def _first_end(self, circle: Circle, first: int, stop: int, parts: list[Arc], lefts: list[int]) -> tuple[int, int]:
        """The first of the draws at which a source has nothing left, and which; ``stop`` and -1 where there is none."""
        ended = -1
        for source, (part, left) in enumerate(zip(parts, lefts, strict=True)):
            if circle.count(first, stop, part) > left:
                stop, ended = circle.find(first, part, left), source
        return stop, ended

    def _first_change(self, circle: Circle, first: int, stop: int, arc: Arc, parts: list[Arc]) -> int:
        """The first of the draws that is drawn with other weights; ``stop`` where there is none."""
        if self._turn_at is not None and circle.count(first, stop, arc) > (room := self._turn_at - self.position[_NUM]):
            stop = circle.find(first, arc, room)
        for source, cap in self._caps.items():
            room = cap.limit - cap.drawn(self.position)
            if self._holds and cap.unit == "samples" and 0 < room <= circle.count(first, stop, parts[source]):
                stop = circle.find(first, parts[source], room - 1) + 1
        return stop

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
        if self._holds and (self._sizes or chosen in self._caps):
            self._change([chosen])
        if self.stop == "never":
            silent = self._silent[chosen] = self._silent.get(chosen, 0) + 1
            if silent > SILENT_EPOCHS:
                self.refuse_silent(chosen)
            self._nodes[chosen].bind(self._nodes[chosen].position)
        else:
            self._over = self._note_end(self.position, chosen)

    def _note_end(self, position: View, chosen: int) -> bool:
        """Note that a source has ended; whether the epoch has."""
        if self.stop == "all":
            position[self._drawn.start + chosen] ^= -1
        return self.stop == "first"

    def refuse_silent(self, source: int) -> None:
        """``DataStateError`` where a source has begun again too often without yielding anything."""
        raise DataStateError(
            f"The source {self.names[source]!r} of a mixture yielded no {self.unit[:-1]} in {SILENT_EPOCHS} whole epochs "
            f"of logical shard {self._shard[0]} of {self._shard[1]}: all of its rows were filtered out or are empty, or "
            f"it has none. Use fewer logical shards, more data, or weight 0."
        )

    def _require_more(self, position: View) -> None:
        """``DataStateError`` where an endless stream ends, since all sources have reached their caps."""
        if self._caps and not any(position[self._weights]) and any(node.repeat for _, node in self.walk()):
            raise DataStateError(
                f"All sources of a mixture have reached their caps, {self.caps}, in logical shard {self._shard[0]} of "
                f"{self._shard[1]}, and the stream is to be endless (repeat=True). Give larger caps, a source without one, or "
                f"repeat=False, where the stream ends."
            )

    # In blocks

    def documents(self, column: str) -> Documents | None:
        changes = len(self._pieces.begins) > 1 or self._sizes or self._caps  # of weights, at any document
        if changes or any(self._inner) or (self.unit == "tokens" and column != self.column):
            return None
        name = type(self).__name__
        self._below = [node.documents(column) or ColumnDocuments(node, column, name) for node in self._nodes]
        room = min([s.cache_bytes for _, n in self.walk() if isinstance(s := n.reads, TokenSource)], default=2**30)
        return MixedDocuments(
            self,
            self._below,
            repeats=self.stop == "never",
            by_tokens=self.unit == "tokens",
            num_bytes=room // 8 // self._shard[1],
        )

    def yields_only(self, column: str) -> bool:
        return all(node.yields_only(column) for node in self._nodes)

    def slots_of(self, source: int) -> slice:
        return self._slots(self.names[source])

    def drawn_at(self, position: View) -> list[tuple[int, list[int]]]:
        kinds = [self._drawn, self._tokens] if self.unit == "tokens" else [self._drawn]
        return [(kind.start, position[kind].tolist()) for kind in kinds]

    def end_at(self, position: View, source: int) -> bool:
        self._below[source].turn(position[self.slots_of(source)])
        return self._note_end(position, source)


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


def _floats(slots: View) -> list[float]:
    return np.array(slots).view(np.float64).tolist()


def _check_group(group: int, unit: str, stop: str, caps: object) -> None:
    require_int(group=group)
    if group < 1 or (group > 1 and (unit != "samples" or stop != "never" or caps)):
        raise ValueError(
            f"group={group} with unit={unit!r}, stop={stop!r}, caps={caps}: give at least 1, and more than 1 only by samples, "
            f"with stop='never' and without caps, since all logical shards that serve a group end and change together."
        )


def _shown(one: list[Any], other: list[Any]) -> str:
    """What is in one list of (progress, weights) and not in the other, in a few words."""
    found = [f"{dict(shares)} from {begin} on" for begin, shares in one if (begin, shares) not in other]
    return ", ".join(found[:3]) or "nothing there"


def _check(
    nodes: Mapping[str, BaseNode[Any]],
    given: Mapping[str, float] | Schedule | str,
    unit: str,
    column: str | None,
    stop: str,
) -> None:
    if isinstance(given, str) and given not in ("rows", "tokens"):
        raise ValueError(f"weights={given!r}: give numbers by name, a rd.Schedule, 'rows' or 'tokens'.")
    weights = dict.fromkeys(nodes, 1.0) if isinstance(given, str) else given
    weights = weights.keys[0][1] if isinstance(weights, Schedule) else weights
    if not nodes or set(nodes) != set(weights):
        raise ValueError(
            f"WeightedSampler was given the nodes {sorted(nodes)} and the weights {sorted(weights)}: give a weight for each."
        )
    bad = [name for name in nodes if not name or "." in name or name in (*_KINDS, "self")]
    if bad:
        raise ValueError(f"The names {bad} of sources cannot be part of a state's path: without dots, and others.")
    require_weights(weights)
    if unit not in ("samples", "tokens") or stop not in ("never", "first", "all"):
        raise ValueError(f"unit={unit!r}, stop={stop!r}: give 'samples' or 'tokens', and 'never', 'first' or 'all'.")
    if (unit == "tokens") != (column is not None):
        raise ValueError(f"unit={unit!r} with column={column!r}: tokens are counted in a column; samples are not.")
