"""`MixtureDraws`: chooses the source of each sample of a mixture, and handles sources that end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

import numpy as np

from rescale_data.nodes.base import Node, View
from rescale_data.nodes.below import is_endless, pass_epochs, skip
from rescale_data.nodes.bound import SILENT_EPOCHS
from rescale_data.nodes.column import length_of
from rescale_data.nodes.mixture.circle import WHOLE, Arc, Arcs, Circle, arcs, circle_of, stretched, within
from rescale_data.nodes.mixture.ends import (
    first_end,
    leave_out_of_epoch,
    refuse_end,
    refuse_silent,
    samples_left,
)
from rescale_data.nodes.mixture.lengths import TokenArcs
from rescale_data.nodes.mixture.row import NUM, MixtureRow
from rescale_data.nodes.mixture.sources import Sources
from rescale_data.nodes.mixture.weights import InUse, MixtureWeights

Stop: TypeAlias = Literal["never", "first", "all"]


class MixtureDraws:
    """The draws of one logical shard's mixture.

    Args:
        position: The position of the mixture, from which it draws.
        sources: The sources; each is bound when it is first drawn from.
        inner: By number, the draws of each source that yields the samples of another mixture one for one.
        row: The slots of the mixture's own values.
        weights: The weights at any position.
        shard: The index of the logical shard, and the number of logical shards.
        column: The column of the tokens, if the unit is tokens.
        stop: As in `WeightedSampler`.

    Attributes:
        row: The slots of the mixture's own values.
        circle: The points of the draws.
        chosen: The source of the last draw.
    """

    def __init__(
        self,
        position: View,
        sources: Sources,
        inner: Mapping[int, MixtureDraws],
        row: MixtureRow,
        weights: MixtureWeights,
        shard: tuple[int, int],
        column: str | None,
        stop: Stop,
    ) -> None:
        self.sources, self._inner, self.row = sources, inner, row
        self.weights, self._shard, self._column, self._stop = weights, shard, column, stop
        self._given: int | None = None  # the next draw's point, if the mixture above gives it
        self.circle = circle_of(*shard)
        self.chosen = 0
        self.seek(position)

    def seek(self, position: View) -> None:
        """Go on from a position, and forget all that was derived from another one."""
        self._position = position
        self._over = False
        self._arcs: Arcs | TokenArcs | None = None
        self._in_use: InUse | None = None  # the weights of the arcs
        self._silent: dict[int, int] = {}

    @property
    def by_tokens(self) -> bool:
        return self.row.unit == "tokens"

    def draw(self, how: Callable[[Node[Any]], Any]) -> Any:
        """Return ``how(node)`` for the node of the next draw; with ``how=next`` this is the next sample."""
        while (chosen := self.choose()) is not None:
            try:
                sample = how(node := self._bound(chosen))
            except StopIteration:
                self._end(chosen)
                continue
            self._count(chosen, 1 if self._column is None else length_of(sample, self._column, node))
            return sample
        raise StopIteration

    def _bound(self, source: int) -> Node[Any]:
        return self.sources.bound(source, self._position)

    def bind_all(self) -> None:
        for source in range(len(self.sources.nodes)):
            self._bound(source)

    def choose(self) -> int | None:
        """Return the source of the next draw; `None` at the end of the epoch."""
        arcs = self._arcs or self._plan()
        if arcs is None:
            return None
        point = self.circle.point(self._position[NUM]) if self._given is None else self._given
        self.chosen = chosen = arcs.choose(point)
        inner = self._inner.get(chosen)
        if inner is not None:
            inner._given = arcs.stretch(point, chosen)
        return chosen

    def _plan(self) -> Arcs | TokenArcs | None:
        """Return the arcs of the sources that have not ended; `None` at the end of the epoch."""
        if self._arcs is None and not self._over:
            self._in_use = self.weights.at(self._position)
            self._arcs = self.arcs_at(self._position, self._in_use)
            self._over = self._arcs is None
        return self._arcs

    def arcs_at(self, position: View, in_use: InUse) -> Arcs | TokenArcs | None:
        """Return the arcs of the sources that have not ended, at any position and for its weights.

        If the epoch has ended, return `None` and write the beginning of the next epoch into the position.
        """
        drawn = position[self.row.drawn].tolist()
        counts = [max(count, ~count) for count in drawn]
        going = tuple(weight if count >= 0 else 0.0 for weight, count in zip(in_use.values, drawn, strict=True))
        if not any(going):
            self._require_more(in_use)
            position[self.row.drawn] = np.array(counts, dtype=np.int64).data
            return None
        if not self.by_tokens:
            return arcs(going)
        return TokenArcs(going, counts, *(position[kind].tolist() for kind in (self.row.tokens, self.row.since)))

    def _count(self, chosen: int, length: int) -> None:
        self._position[NUM] += 1
        self._position[self.row.drawn.start + chosen] += 1
        if length and self._silent:
            self._silent.pop(chosen, None)
        if isinstance(self._arcs, TokenArcs):
            self._position[self.row.tokens.start + chosen] += length
            self._arcs.drew(chosen, length)
        self._turn()

    def _turn(self) -> None:
        """Begin the next piece of a schedule, if it is due after a draw."""
        in_use = self._in_use
        if in_use is None or in_use.turn_at is None:
            return
        drawn = self._arcs.num_tokens if isinstance(self._arcs, TokenArcs) else self._position[NUM]
        if drawn >= in_use.turn_at:
            self.weights.turn(self._position, in_use)
            self._arcs = None

    # Leaving out

    def skip(self, num_samples: int) -> None:
        """Leave out samples as in `rescale_data.nodes.below.skip`, if the unit is samples."""
        if self.skip_ahead(num_samples) < num_samples:
            raise StopIteration

    def skip_ahead(self, num_samples: int, *, goes_on: bool = False) -> int:
        """Leave out samples as in `rescale_data.nodes.below.skip_ahead`, if the unit is samples.

        Args:
            num_samples: Number of samples.
            goes_on: True in an endless stream: go on over ends of epochs that make no difference there.
        """
        first = self._position[NUM]
        stop = (self.skip_on if goes_on else self.skip_draws)(self.circle, first, first + num_samples, WHOLE)
        self._given = None
        return stop - first

    def skip_on(self, circle: Circle, first: int, stop: int, arc: Arc) -> int:
        """Leave out draws as in `skip_draws`, for a consumer that goes on with the next epoch.

        With ``stop="first"`` the end of a source then does not end the epoch.
        """
        was = self._stop
        self._stop = "never" if was == "first" else was
        try:
            return self.skip_draws(circle, first, stop, arc)
        finally:
            self._stop = was

    def skip_draws(self, circle: Circle, first: int, stop: int, arc: Arc) -> int:
        """Leave out each draw from ``first`` to ``stop - 1`` that falls into an arc.

        The arc of ``circle`` is the whole circle of this mixture.

        Returns:
            ``stop``, or the draw at which the epoch ended.
        """
        while first < stop and (arcs := self._plan()) is not None:
            lefts = self._samples_left()
            if isinstance(arcs, TokenArcs) or lefts is None:
                return self._draw_in(circle, first, stop, arc)
            parts = [within(arcs.arc(source), arc) for source in range(len(lefts))]
            until, ended = first_end(circle, first, self._until_turn(circle, first, stop, arc), parts, lefts)
            for source, part in enumerate(parts):
                self._leave_out(source, circle, first, until, part)
            first = until
            self._turn()
            if ended >= 0:
                self._pass_end(ended)
        return first

    def _until_turn(self, circle: Circle, first: int, stop: int, arc: Arc) -> int:
        """Return the first of the draws that is drawn with other weights; ``stop`` if there is none."""
        turn_at = None if self._in_use is None else self._in_use.turn_at
        if turn_at is None or circle.count(first, stop, arc) <= (room := turn_at - self._position[NUM]):
            return stop
        return circle.find(first, arc, room)

    def _draw_in(self, circle: Circle, first: int, stop: int, arc: Arc) -> int:
        """Leave out draws as in `skip_draws`, one at a time, if only reading can show the ends of sources."""
        how: Callable[[Node[Any]], Any] = next if self.by_tokens else self._pass_over
        for number in range(first, stop):
            point = circle.point(number)
            if arc[0] <= point < arc[1]:
                self._given = stretched(point, arc)
                try:
                    self.draw(how)
                except StopIteration:
                    return number
        return stop

    def _pass_over(self, node: Node[Any]) -> None:
        """Leave out a sample of the chosen source; a mixture that yields the sample draws it at the point given by `choose`."""
        inner = self._inner.get(self.chosen)
        if inner is None or inner.by_tokens:
            skip(node, 1)
        else:
            inner.draw(inner._pass_over)

    def _samples_left(self) -> list[int] | None:
        sources = zip(self.sources.nodes, self.sources.slots, strict=True)
        stops = {} if self._in_use is None else self._in_use.ending
        return samples_left(sources, self._position, self._shard, stops, endless=self._stop == "never")

    def _leave_out(self, source: int, circle: Circle, first: int, stop: int, part: Arc) -> None:
        """Leave out the draws that belong to a source, over as many of its epochs as they take."""
        inner, shard = self._inner.get(source), self._shard[0]
        left = count = circle.count(first, stop, part)
        if not count:
            return
        node = self._bound(source)
        while left:
            before = left
            if inner is not None:
                skip = inner.skip_on if self._stop == "never" else inner.skip_draws
                first = skip(circle, first, stop, part)
                left = circle.count(first, stop, part)
            else:
                left -= leave_out_of_epoch(node, shard, left)
            if left < before:
                self._silent.pop(source, None)
            if left:
                self._pass_end(source)
                passed = pass_epochs(node, np.asarray(node.position), shard, left)
                node.bind(node.position)
                first = circle.find(first, part, passed)
                left -= passed
        self._position[NUM] += count
        self._position[self.row.drawn.start + source] += count

    def _pass_end(self, source: int) -> None:
        try:
            skip(self._bound(source), 1)
        except StopIteration:
            self._end(source)

    # Ends

    def pass_end(self, chosen: int) -> bool:
        """Leave out a sample of the chosen source; if the source has ended, note that and return true."""
        try:
            self._pass_over(self._bound(chosen))
        except StopIteration:
            self._end(chosen)
            return True
        return False

    def _end(self, chosen: int) -> None:
        """Handle the end of a source, whose position is the beginning of its next epoch."""
        self._arcs = None
        if self._in_use is not None:
            self.weights.end(self._position, chosen, self._in_use)
        if self._stop == "never":
            node = self._bound(chosen)
            node.bind(node.position)  # also before an error: who goes on draws or skips from there
            silent = self._silent[chosen] = self._silent.get(chosen, 0) + 1
            if silent > SILENT_EPOCHS:
                self.refuse_silent(chosen)
        else:
            self._over = self.end_at(self._position, chosen)

    def end_at(self, position: View, source: int) -> bool:
        """Note that a source has ended; return true if the epoch of the mixture has ended with it."""
        if self._stop == "all":
            position[self.row.drawn.start + source] ^= -1
        return self._stop == "first"

    def _require_more(self, in_use: InUse) -> None:
        if not any(in_use.values) and any(map(is_endless, self.sources.nodes)):
            refuse_end(dict(self.weights.rule.max_epochs), self._shard)

    # At any position, for `rescale_data.nodes.mixture.mixed.MixedDocuments`

    def slots_of(self, source: int) -> slice:
        return self.sources.slots[source]

    def refuse_silent(self, source: int) -> None:
        refuse_silent(self.row.names[source], self.row.unit, self._shard)
