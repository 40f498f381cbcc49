"""`WeightedSampler`: a node that mixes the samples of several sources."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from rescale_data.errors import checks_argument_types
from rescale_data.nodes.base import BaseNode, Node, View, bind_once, changing_children, draw_and_drop
from rescale_data.nodes.below import dtype_of, epoch_end, find_shard, is_endless, readers_of
from rescale_data.nodes.changing import is_old_position, is_on_blocklist, is_sample_untraceable
from rescale_data.nodes.mixture.arguments import check_max_epochs, check_mixture, epoch_slot
from rescale_data.nodes.mixture.circle import weight_circle_of
from rescale_data.nodes.mixture.draws import MixtureDraws, StopRule
from rescale_data.nodes.mixture.mixed_documents import MixedDocuments
from rescale_data.nodes.mixture.row import DRAWS_SLOT, RULE_SLOT, MixtureRow, Unit
from rescale_data.nodes.mixture.rules import Schedule, WeightRule, as_json, from_json, make_rule
from rescale_data.nodes.mixture.sources import MixtureSources
from rescale_data.nodes.mixture.weights import MixtureWeights
from rescale_data.nodes.reading.documents import DocumentReader
from rescale_data.nodes.sample_format import ParameterHistory
from rescale_data.state import Ints, copy_of, slot_offsets


class WeightedSampler(Node[Any]):
    """Mixes the samples of several sources in proportion to their weights.

    Draw n of logical shard i takes the source in whose arc a point of a circle falls. The point is a function of i and n alone
    (`rescale_data.nodes.mixture.circle`). So *every global batch* is a mixture. By samples, each source is within one sample
    of its share if N is a multiple of O and the case is aligned, and within a few samples otherwise. In a shard's own stream it
    is within 8. This holds if each sample of the loader is a sample of this mixture. Below filters and packers, the sources are
    spread as by independent draws, or better. By tokens, an arc follows the mean length of a source's documents, and the tokens
    by which the source is behind.

    n goes on for ever. A source that is added or removed, that ends or gets another weight, moves arcs, not points. A mixture
    in a mixture, with only `Map` and the like between them, is the flat mixture with the products of the weights.

    Each source keeps its own epoch, ``<name>.<...>.epoch`` in the state. The weights may change between the segments of a run,
    and count from then on. Under a packer they count from the end of the document or window that a logical shard is within;
    the document or window goes on with the weights it was begun with. Sources may come and go with
    `rescale_data.checkpoint.load_changed`. If a packer is within a document or window of a source that is gone, the packer
    begins again there without that source, with a warning. So give such a source weight 0 for a while before.

    Args:
        nodes: The sources by name. Names are part of the state's paths.
        weights: Weight of each source, at least 0, in any scale (`weights_by_size` makes weights from sizes). A source of
            weight 0 rests. Or a `Schedule` of weights.
        unit: Unit of the shares: "samples", or "tokens", which are ``len(sample[column])``.
        column: The column of the tokens, if the unit is tokens.
        stop: The rule for the end of a source. "never": the source begins its next epoch at once, so the mixture has no end,
            even with `Shard.repeat` false. "first": the mixture's epoch ends; in the next one the other sources go on where
            they are. "all": the source rests until all have ended, and the others keep their proportions: each row comes once
            an epoch.
        max_epochs: The most epochs of some sources in the whole run, as in ``{"books": 4}``. After them the arc of the source
            goes to the other sources, which is logged. When no source is left, the stream ends. For a limit in samples or
            tokens use a `Schedule`.

    Raises:
        ValueError: Names, weights or epochs do not fit; the unit is tokens and there is no column; a source with `max_epochs`
            reads several readers, has a mixture in it, or, in an endless stream, has fewer rows than there are logical shards.
        TypeError: Nodes, weights or epochs are not given by name; a weight is no number.
        DataStateError: A source yielded no sample, or by tokens no token, in two whole epochs (``stop="never"``). In an endless
            stream (`Shard.repeat`), all sources have reached their `max_epochs`.

    Example:
        >>> import rescale_data as rd
        >>> shard = rd.Shard()
        >>> rows = {"web": rd.Reader(["w"] * 70, shard), "code": rd.Reader(["c"] * 30, shard)}
        >>> "".join(rd.WeightedSampler(rows, {"web": 0.7, "code": 0.3}, stop="first"))[:20]
        'cwcwwcwwwwcwwcwcwwcw'
    """

    changeable = frozenset({"weights", "max_epochs"})
    epochs_are_equal = True

    @checks_argument_types
    def __init__(
        self,
        nodes: Mapping[str, BaseNode[Any]],
        weights: Mapping[str, float] | Schedule,
        *,
        unit: Unit = "samples",
        column: str | None = None,
        stop: StopRule = "never",
        max_epochs: Mapping[str, int] | None = None,
    ) -> None:
        check_mixture(nodes, weights, unit, column, stop)
        self.names = sorted(nodes)
        self.unit, self.column, self.stop = unit, column, stop
        check_max_epochs(max_epochs or {}, self.names)
        self._mixture_row = MixtureRow(self.names, unit)
        self.FIELDS = self._mixture_row.fields()
        rule = make_rule(weights, {name: int(num) for name, num in (max_epochs or {}).items()})
        super().__init__(**{name: nodes[name] for name in self.names})
        shard = find_shard(self)
        self._shard = (shard.index, shard.num_logical_shards) if shard else (0, 1)
        self._weights = MixtureWeights(self._mixture_row, rule, self._shard, self._epoch_slots([rule]))
        children = [*self.children.values()]
        sources = MixtureSources(children, [*map(self._slots, self.names)], shard)
        inner = {i: mixture._draws for i, node in enumerate(children) if (mixture := _mixture_of(node)) is not None}
        self._draws = MixtureDraws(sources, inner, self._weights, column, stop)
        for path, node in self.walk():
            if isinstance(node, WeightedSampler):
                node._draws.circle = weight_circle_of(*self._shard, ".".join(path))

    @property
    def _sources(self) -> dict[str, tuple[Node[Any], slice]]:
        return {name: (node, self._slots(name)) for name, node in self.children.items()}

    def _epoch_slots(self, rules: Iterable[WeightRule]) -> dict[str, int]:
        """Return, by source name, the index in a position of each epoch counter that the rules use."""
        sources, counted_names = self._sources, {name for rule in rules for name, _ in rule.max_epochs}
        return {name: epoch_slot(name, *sources[name]) for name in sorted(counted_names) if name in sources}

    def _bind_children(self) -> None:
        self._draws.sources.seek(self.position)

    def seek(self) -> None:
        self._draws.seek(self.position)

    def verify(self) -> None:
        for source in range(len(self.names)):
            self._draws.sources.bound_node(source, self.position)

    def next(self) -> Any:
        return self._draws.draw(next)

    def skip(self, num_samples: int) -> int:
        """Skip the next samples without yielding them (`rescale_data.nodes.below.skip`).

        By samples this reads nothing if the sources know how many samples they have. It then takes time in proportion to the
        logarithm of their number.
        """
        if self.unit == "tokens":
            return draw_and_drop(self, num_samples)
        bind_once(self)
        return self._draws.skip(num_samples)

    def skip_ahead(self, num_samples: int) -> int:
        return 0 if self.unit == "tokens" else self._draws.skip(num_samples, across_epochs=is_endless(self))

    def epoch_end(self, rows: Ints, shards: Ints) -> tuple[Ints, Ints] | None:
        """Return the end of an epoch, by samples, if each source is read to its end with constant weights; else `None`."""
        rule = self._weights.rule
        if self.stop != "all" or self.unit == "tokens" or rule.max_epochs or len(rule.weight_intervals[0]) > 1:
            return None
        if (rows[:, RULE_SLOT] != rule.digest).any():
            return None
        num_left, end_positions = np.zeros(len(rows), dtype=np.int64), rows.copy()
        drawn_counts = end_positions[:, self._mixture_row.drawn_slots]
        is_active = (drawn_counts >= 0) & (np.array(rule.weight_keyframes[0][1]) != 0)
        self._mixture_row.begin_epoch(end_positions)
        for i, (node, slots) in enumerate(self._sources.values()):
            source_end = epoch_end(node, rows[:, slots], shards)
            if source_end is None:
                return None
            num_drawn = np.where(is_active[:, i], source_end[0], 0)
            num_left += num_drawn
            drawn_counts[:, i] += num_drawn
            end_positions[:, slots] = np.where(is_active[:, i, None], source_end[1], rows[:, slots])
        end_positions[:, DRAWS_SLOT] += num_left
        return num_left, end_positions

    def begin(self, row: View) -> None:
        row[RULE_SLOT] = self._weights.rule.digest

    def use_history(self, history: Sequence[tuple[int, Mapping[str, Any]]]) -> None:
        earlier_rules = [from_json(rule) for _, rule in history]
        self._weights.use_history(earlier_rules, self._epoch_slots(earlier_rules))

    def sample_id_slots(self) -> list[int]:
        """Return the index of the number of draws: it alone identifies the next sample, since sources come and go."""
        return [DRAWS_SLOT]

    def earlier_parameters(self, saved: Mapping[str, Any], rows: Ints) -> ParameterHistory:
        return self._weights.earlier_parameters(saved, rows)

    def check_change(self, saved: Mapping[str, Any], rows: Ints) -> None:
        self._weights.check_change(saved, rows)

    def apply_changes_at(self, position: View) -> None:
        """Apply weights that were changed between segments of the run, from this position on.

        A source that has ended in this epoch stays ended.
        """
        self._weights.apply_changes_at(position)

    def skip_blocked_rows(self, position: View) -> None:
        """Do nothing: a mixture has no rows of its own that a blocklist could exclude."""

    def next_epoch(self, position: View, *, is_drawn: bool = False) -> None:
        """Begin the next epoch of all sources. Counts since the run began stay: schedule and `max_epochs` continue."""
        own_slots = slice(0, slot_offsets(self.FIELDS)[-1])
        own_values = copy_of(position[own_slots])
        super().next_epoch(position, is_drawn=is_drawn)
        position[own_slots] = own_values
        self._mixture_row.begin_epoch(np.asarray(position)[None])
        self._weights.apply_changes_at(position)

    def is_old_position(self, position: View) -> bool:
        return self._weights.needs_missing_source(position)

    def is_on_blocklist(self, position: View) -> bool:
        if not is_old_position(self, position):
            return False
        own_position, draw_position, draws, is_source_blocked = self.position, copy_of(position), self._draws, False
        self.bind(draw_position)
        while (source := draws.choose_source()) is not None:  # also past the ends of sources, as a draw does
            node, source_position = draws.sources.nodes[source], draw_position[draws.sources.slots[source]]
            stale, is_source_blocked = is_old_position(node, source_position), is_on_blocklist(node, source_position)
            if is_source_blocked or not draws.skip_or_end(source):
                break
            if is_source_blocked := stale and self.stop == "never":  # only the old list shows how its next epoch begins
                break
        self.bind(own_position)  # the nodes above are bound to this row
        return is_source_blocked

    def is_sample_untraceable(self, position: View) -> bool:
        is_lost = (is_sample_untraceable(child, position[slots]) for child, slots in changing_children(self))
        return self._weights.needs_missing_source(position) or any(is_lost)

    def is_node_change_due(self, position: View) -> bool:
        return self._weights.is_node_change_due(position)

    def locate(self) -> str:
        return self._draws.sources.last_node.locate()

    def parameters(self) -> dict[str, Any]:
        return {**as_json(self._weights.rule), "unit": self.unit, "column": self.column, "stop": self.stop}

    def progress(self, rows: Ints, shards: Ints, samples: Ints) -> dict[str, float]:
        """Return the samples or tokens drawn from each source since the run began, its share of them, and its epochs.

        ``share/...`` is in the mixture's unit. ``epochs/...`` is the mean over the readers below a source and over logical
        shards. ``ended_shards/...`` is the number of logical shards in which the source has reached its `max_epochs`.
        """
        drawn_counts = rows[:, self._mixture_row.drawn_slots]
        counts = {"samples": np.maximum(drawn_counts, ~drawn_counts).sum(axis=0)}
        if self.unit == "tokens":
            counts["tokens"] = rows[:, self._mixture_row.token_slots].sum(axis=0)
        metrics = {f"drawn_{unit}": count for unit, count in counts.items()}
        metrics["share"] = counts[self.unit] / max(1, counts[self.unit].sum())
        numbered = [*enumerate(self.names)]
        counters = {f"{key}/{name}": float(value[i]) for key, value in metrics.items() for i, name in numbered}
        for name, (node, slots) in self._sources.items():
            if readers := readers_of(node, slots.start):
                epochs = [reader.epochs_at(rows[:, slot:], shards) for reader, slot in readers]
                counters[f"epochs/{name}"] = float(np.mean(epochs))
        num_ended = self._weights.num_ended_shards(rows)
        return {**counters, **{f"ended_shards/{name}": float(num) for name, num in num_ended.items()}}

    # In blocks

    def open_documents(self, column: str) -> DocumentReader | None:
        if self.unit == "tokens" and column != self.column:
            return None
        source_documents = [self._draws.sources.documents(source, column) for source in range(len(self.names))]
        is_mixture = [_mixture_of(node) is not None for node in self.children.values()]
        reads_mixture = [isinstance(documents, MixedDocuments) for documents in source_documents]
        # each draw of an inner mixture has its own point
        if any(is_mixture) and (self.unit == "tokens" or is_mixture != reads_mixture):
            return None
        return MixedDocuments(self._draws, column, source_documents)

    def dtype_of(self, column: str) -> np.dtype[Any] | None:
        dtypes = {dtype_of(node, column) for node in self.children.values()}
        return dtypes.pop() if len(dtypes) == 1 else None


def _mixture_of(node: Node[Any]) -> WeightedSampler | None:
    """Return the mixture below a node, if the node yields one sample for each sample of the mixture; else `None`."""
    while node.one_for_one:
        node = node.children["source"]
    return node if isinstance(node, WeightedSampler) else None
