"""`MixtureDraws`: chooses the source of each sample of a mixture, and handles sources that end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NoReturn, TypeAlias

import numpy as np

from rescale_data.errors import DataStateError
from rescale_data.nodes.base import Node, View
from rescale_data.nodes.below import epoch_end, is_endless, readers_of, skip, skip_epochs
from rescale_data.nodes.column import num_tokens_of
from rescale_data.nodes.empty_draws import MAX_EMPTY_EPOCHS
from rescale_data.nodes.mixture.circle import (
    WHOLE_CIRCLE,
    Arc,
    WeightArcs,
    WeightCircle,
    arcs,
    scale_arc_to_circle,
    scale_circle_to_arc,
)
from rescale_data.nodes.mixture.lengths import TokenWeightArcs
from rescale_data.nodes.mixture.row import DRAWS_SLOT
from rescale_data.nodes.mixture.rules import CurrentWeights
from rescale_data.nodes.mixture.sources import MixtureSources
from rescale_data.nodes.mixture.weights import MixtureWeights

StopRule: TypeAlias = Literal["never", "first", "all"]
_UNLIMITED_SAMPLES = 1 << 62  # left in a source that begins its next epoch at once
_NO_WEIGHTS = CurrentWeights((), None, {})


class MixtureDraws:
    """Chooses the sources of one logical shard's draws, and counts the draws in its position.

    It draws from the position that it was given last by `seek`.

    Args:
        sources: The sources; each is bound when it is first drawn from.
        inner_mixtures: By number, the draws of each source that yields the samples of another mixture one for one.
        weights: The weights at any position.
        column: The column of the tokens, if the unit is tokens.
        stop_rule: As in `WeightedSampler`.

    Attributes:
        row: The slots of the mixture's own values.
        circle: The points of the draws; set when it is known below which mixtures this one is.
        last_source: The source of the last draw.
    """

    circle: WeightCircle

    def __init__(
        self,
        sources: MixtureSources,
        inner_mixtures: Mapping[int, MixtureDraws],
        weights: MixtureWeights,
        column: str | None,
        stop_rule: StopRule,
    ) -> None:
        self.sources, self._inner_mixtures, self.weights, self._column = sources, inner_mixtures, weights, column
        self.row, self._shard, self._stop_rule = weights.row, weights.shard, stop_rule
        self._outer_point: int | None = None  # the next draw's point, if the mixture above gives it
        self.last_source = 0

    def seek(self, position: View) -> None:
        """Continue at another position of the mixture, and clear all values that were derived from the previous one."""
        self._position = position
        self._is_epoch_over = False
        self._weight_arcs: WeightArcs | TokenWeightArcs | None = None
        self._current_weights = _NO_WEIGHTS  # the weights of the arcs
        self._empty_epochs: dict[int, int] = {}

    @property
    def by_tokens(self) -> bool:
        return self.row.unit == "tokens"

    @property
    def repeats_sources(self) -> bool:
        """True if a source begins its next epoch at once when it ends."""
        return self._stop_rule == "never"

    def draw(self, draw_from: Callable[[Node[Any]], Any]) -> Any:
        """Call ``draw_from`` with the node of the next draw, and return the result: for ``next``, the next sample."""
        while (source := self.choose_source()) is not None:
            try:
                sample = draw_from(node := self._bound_node(source))
            except StopIteration:
                self._handle_source_end(source)
                continue
            self._count_draw(source, 1 if self._column is None else num_tokens_of(sample, self._column, node))
            return sample
        raise StopIteration

    def _bound_node(self, source: int) -> Node[Any]:
        return self.sources.bound_node(source, self._position)

    def choose_source(self) -> int | None:
        """Return the number of the source of the next draw; `None` at the end of the epoch."""
        arcs = self._weight_arcs or self._get_weight_arcs()
        if arcs is None:
            return None
        point = self.circle.point(self._position[DRAWS_SLOT]) if self._outer_point is None else self._outer_point
        self.last_source = source = arcs.choose_source(point)
        inner = self._inner_mixtures.get(source)
        if inner is not None:
            inner._outer_point = arcs.point_within_arc(point, source)
        return source

    def _get_weight_arcs(self) -> WeightArcs | TokenWeightArcs | None:
        """Return the arcs on the circle of the sources that have not ended, computed once; `None` at the end of the epoch."""
        if self._weight_arcs is None and not self._is_epoch_over:
            self._current_weights = self.weights.current(self._position)
            self._weight_arcs = self.weight_arcs_at(self._position, self._current_weights)
            self._is_epoch_over = self._weight_arcs is None
        return self._weight_arcs

    def weight_arcs_at(self, position: View, current_weights: CurrentWeights) -> WeightArcs | TokenWeightArcs | None:
        """Return the arcs on the circle of the sources that have not ended, at a given position with given weights.

        If the epoch has ended, return `None` and write the beginning of the next epoch into the position.
        """
        drawn_counts = position[self.row.drawn_slots].tolist()
        counts = [max(count, ~count) for count in drawn_counts]
        weights_and_counts = zip(current_weights.source_weights, drawn_counts, strict=True)
        active_weights = tuple([weight if count >= 0 else 0.0 for weight, count in weights_and_counts])
        if not any(active_weights):
            self._require_endless(current_weights)
            position[self.row.drawn_slots] = np.array(counts, dtype=np.int64).data
            return None
        if not self.by_tokens:
            return arcs(active_weights)
        tokens, old_tokens = position[self.row.token_slots].tolist(), position[self.row.old_token_slots].tolist()
        return TokenWeightArcs(active_weights, counts, tokens, old_tokens)

    def _count_draw(self, chosen_source: int, length: int) -> None:
        self._position[DRAWS_SLOT] += 1
        self._position[self.row.drawn_slots.start + chosen_source] += 1
        if length and self._empty_epochs:
            self._empty_epochs.pop(chosen_source, None)
        if isinstance(self._weight_arcs, TokenWeightArcs):
            self._position[self.row.token_slots.start + chosen_source] += length
            self._weight_arcs.add_document(chosen_source, length)
        self._change_weights()

    def _change_weights(self) -> None:
        """Change to the next weights of a schedule, if they are due after a draw."""
        current_weights = self._current_weights
        if current_weights.weights_until is None:
            return
        amount_drawn = (
            self._weight_arcs.num_tokens
            if isinstance(self._weight_arcs, TokenWeightArcs)
            else self._position[DRAWS_SLOT]
        )
        if amount_drawn >= current_weights.weights_until:
            self.weights.record_change(self._position, current_weights)
            self._weight_arcs = None

    # Leaving out

    def skip(self, num_samples: int, *, across_epochs: bool = False) -> int:
        """Skip samples without yielding them (`rescale_data.nodes.below.skip`); only for the unit "samples".

        Args:
            num_samples: Number of samples.
            across_epochs: True in an endless stream: go on over ends of epochs that make no difference there.

        Returns:
            The number of samples that were skipped; less if the epoch ended before.
        """
        first_draw = self._position[DRAWS_SLOT]
        stop = first_draw + num_samples
        stop = self.skip_draws(self.circle, first_draw, stop, WHOLE_CIRCLE, across_epochs=across_epochs)
        self._outer_point = None
        return stop - first_draw

    def skip_draws(self, circle: WeightCircle, first_draw: int, stop: int, arc: Arc, *, across_epochs: bool) -> int:
        """Skip each of the draws ``first_draw .. stop - 1`` whose point falls into an arc.

        The arc of ``circle`` is the whole circle of this mixture. If the caller continues ``across_epochs``, the end of a
        source does not end the epoch with ``stop="first"``.

        Returns:
            ``stop``, or the draw at which the epoch ended.
        """
        original_stop = self._stop_rule
        self._stop_rule = "never" if across_epochs and original_stop == "first" else original_stop
        try:
            while first_draw < stop and (arcs := self._get_weight_arcs()) is not None:
                samples_left = self._samples_left()
                if isinstance(arcs, TokenWeightArcs) or samples_left is None:
                    return self._skip_one_by_one(circle, first_draw, stop, arc)
                nested_arcs = [scale_circle_to_arc(arcs.arc(source), arc) for source in range(len(samples_left))]
                weight_change = self._next_weight_change(circle, first_draw, stop, arc)
                next_stop, ended_source = circle.first_source_end(first_draw, weight_change, nested_arcs, samples_left)
                for source, source_arc in enumerate(nested_arcs):
                    self._skip_source(source, circle, first_draw, next_stop, source_arc)
                first_draw = next_stop
                self._change_weights()
                if ended_source >= 0:
                    self._skip_past_source_end(ended_source)
        finally:
            self._stop_rule = original_stop
        return first_draw

    def _next_weight_change(self, circle: WeightCircle, first_draw: int, stop: int, arc: Arc) -> int:
        """Return the first of the draws that uses other weights; ``stop`` if there is none."""
        change_at = self._current_weights.weights_until
        if change_at is None or circle.count(first_draw, stop, arc) <= (num := change_at - self._position[DRAWS_SLOT]):
            return stop
        return circle.find_draw(first_draw, arc, num)

    def _skip_one_by_one(self, circle: WeightCircle, first_draw: int, stop: int, arc: Arc) -> int:
        """Skip draws as `skip_draws` does, but one at a time, if only reading can show the ends of sources."""
        draw_from: Callable[[Node[Any]], Any] = next if self.by_tokens else self._skip_sample
        for draw in range(first_draw, stop):
            point = circle.point(draw)
            if arc[0] <= point < arc[1]:
                self._outer_point = scale_arc_to_circle(point, arc)
                try:
                    self.draw(draw_from)
                except StopIteration:
                    return draw
        return stop

    def _skip_sample(self, node: Node[Any]) -> None:
        """Skip a sample of the chosen source; if that is a mixture by samples, it skips one of the source that it draws."""
        inner = self._inner_mixtures.get(self.last_source)
        if inner is None or inner.by_tokens:
            if not skip(node, 1):
                raise StopIteration
        else:
            inner.draw(inner._skip_sample)

    def _samples_left(self) -> list[int] | None:
        """Return how many samples can still be drawn from each source before it ends; `None` if not known."""
        position, shard_index = np.array(self._position)[None], self._shard[0]
        goes_on, final_epochs = self.repeats_sources, self._current_weights.end_epochs
        samples_left: list[int] = []
        for source, (node, slots) in enumerate(zip(self.sources.nodes, self.sources.slots, strict=True)):
            if goes_on and source not in final_epochs:
                samples_left.append(_UNLIMITED_SAMPLES)
                continue
            source_end = epoch_end(node, position[:, slots], np.array([shard_index]))
            if source_end is None:
                return None
            samples_left.append(int(source_end[0][0]))
            if goes_on:
                reader, slot = readers_of(node, 0)[0]
                samples_left[-1] += reader.rows.num_rows(int(source_end[1][0, slot]), final_epochs[source], shard_index)
        return samples_left

    def _skip_source(self, source: int, circle: WeightCircle, first_draw: int, stop: int, source_arc: Arc) -> None:
        """Skip draws of one source, over as many of its epochs as they need."""
        inner, shard_index = self._inner_mixtures.get(source), self._shard[0]
        samples_left = num_draws = circle.count(first_draw, stop, source_arc)
        if not num_draws:
            return
        node = self._bound_node(source)
        while samples_left:
            num_before = samples_left
            if inner is not None:
                first_draw = inner.skip_draws(circle, first_draw, stop, source_arc, across_epochs=self.repeats_sources)
                samples_left = circle.count(first_draw, stop, source_arc)
            else:
                samples_left -= skip(node, samples_left)
            if samples_left < num_before:
                self._empty_epochs.pop(source, None)
            if samples_left:
                self._skip_past_source_end(source)
                num_skipped = skip_epochs(node, np.asarray(node.position), shard_index, samples_left)
                node.bind(node.position)
                first_draw = circle.find_draw(first_draw, source_arc, num_skipped)
                samples_left -= num_skipped
        self._position[DRAWS_SLOT] += num_draws
        self._position[self.row.drawn_slots.start + source] += num_draws

    def _skip_past_source_end(self, source: int) -> None:
        if not skip(self._bound_node(source), 1):
            self._handle_source_end(source)

    # Ends

    def skip_or_end(self, chosen_source: int) -> bool:
        """Skip a sample of the chosen source; record and return True if the source has ended."""
        try:
            self._skip_sample(self._bound_node(chosen_source))
        except StopIteration:
            self._handle_source_end(chosen_source)
            return True
        return False

    def _handle_source_end(self, chosen_source: int) -> None:
        """Record that a source has ended; its position is already the beginning of its next epoch."""
        self._weight_arcs = None
        self.weights.record_epoch_end(self._position, chosen_source, self._current_weights)
        if self.repeats_sources:
            node = self._bound_node(chosen_source)
            node.bind(node.position)  # also before an error: who goes on draws or skips from there
            num_empty = self._empty_epochs[chosen_source] = self._empty_epochs.get(chosen_source, 0) + 1
            if num_empty > MAX_EMPTY_EPOCHS:
                self.refuse_empty(chosen_source)
        else:
            self._is_epoch_over = self.record_source_end(self._position, chosen_source)

    def record_source_end(self, position: View, source: int) -> bool:
        """Record that a source has ended; return True if this ends the epoch of the mixture."""
        if self._stop_rule == "all":
            position[self.row.drawn_slots.start + source] ^= -1
        return self._stop_rule == "first"

    def _require_endless(self, current_weights: CurrentWeights) -> None:
        """Raise ``DataStateError`` if the stream below is endless, and all sources have reached their `max_epochs`."""
        if not any(current_weights.source_weights) and any(map(is_endless, self.sources.nodes)):
            shard_index, num_logical_shards = self._shard
            raise DataStateError(
                f"All sources of a mixture have reached their max_epochs, {dict(self.weights.rule.max_epochs)}, in logical "
                f"shard {shard_index} of {num_logical_shards}, and the stream is to be endless (repeat=True). Give more "
                f"epochs, a source without max_epochs, or repeat=False, where the stream ends."
            )

    def refuse_empty(self, source: int) -> NoReturn:
        """Raise ``DataStateError`` for a source that began again too often without yielding anything."""
        shard_index, num_logical_shards = self._shard
        raise DataStateError(
            f"The source {self.row.sources[source]!r} of a mixture yielded no {self.row.unit[:-1]} in {MAX_EMPTY_EPOCHS} whole "
            f"epochs of logical shard {shard_index} of {num_logical_shards}: all of its rows were filtered out or are empty, "
            f"or it has none. Use fewer logical shards, more data, or weight 0."
        )
