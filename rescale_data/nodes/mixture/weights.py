"""`MixtureWeights`: which weights of a mixture count at a position, and how the next ones take over."""

from __future__ import annotations

import logging
from collections.abc import Container, Iterable, Mapping
from typing import Any

import numpy as np

from rescale_data.errors import DataStateError
from rescale_data.nodes.base import View
from rescale_data.nodes.mixture.caps import Cap
from rescale_data.nodes.mixture.circle import Arc, Circle
from rescale_data.nodes.mixture.row import NOW, NUM, MixtureRow
from rescale_data.nodes.mixture.schedule import Schedule, from_json, mix_of, pieces_of, shares_until
from rescale_data.nodes.mixture.sizes import Sizes
from rescale_data.nodes.reading.spans import MANY
from rescale_data.state import Ints

_log = logging.getLogger("rescale_data")


class MixtureWeights:
    """The weights of one logical shard's mixture. Those in use stand in its row; they change where these say.

    Args:
        row: Where the mixture keeps what.
        given: By name, or a schedule; with ``sizes``, what these are at first.
        shard: The index of the logical shard, and how many there are.
        sizes: What the weights follow.
        caps: By the number of their source.
        number: What tells this schedule or these caps from others (`rescale_data.nodes.mixture.rules.number_of`).

    Attributes:
        before: Those of earlier legs of the run, by which a document or window goes on that was begun with them.
        rule: Whose schedule and caps the position goes by: these, or some of those before. `None` where the weights in use
            belong to none of them, and stay until the position is settled.
        turn_at: What has been drawn in this shard when the next weights begin; `None` where that is not ahead.
    """

    def __init__(
        self,
        row: MixtureRow,
        given: Mapping[str, float] | Schedule,
        shard: tuple[int, int] = (0, 1),
        sizes: Sizes | None = None,
        caps: Mapping[int, Cap] | None = None,
        number: int = 0,
    ) -> None:
        self._row, self._given, self._shard = row, given, shard
        self.sizes, self.caps = sizes, caps or {}
        self._pieces = pieces_of(row.names, given)
        self._said: set[str] = set()
        self._number = number
        self.before: list[MixtureWeights] = []
        self.seek()

    def borrow(self, other: MixtureWeights, reads_alike: bool) -> None:
        """Keep what those of another shard, which say the same, have as well."""
        self._given, self._pieces = other._given, other._pieces
        if self.sizes is not None and other.sizes is not None and reads_alike:
            self.sizes.readers = other.sizes.readers

    def seek(self) -> None:
        """The position has been rewritten."""
        self.rule: MixtureWeights | None = self
        self.turn_at: int | None = None

    @property
    def caps_now(self) -> Mapping[int, Cap]:
        """Those by which the position goes."""
        return self.caps if self.rule is None else self.rule.caps

    @property
    def is_scheduled(self) -> bool:
        return len(self._pieces.begins) > 1

    @property
    def grow(self) -> bool:
        """Whether they follow sizes that differ from epoch to epoch."""
        return self.sizes is not None and self.sizes.grow

    def grows_from(self, position: View) -> bool:
        """Whether sizes that they follow change after a position."""
        return self.sizes is not None and self.sizes.grow_from(position)

    @property
    def may_change(self) -> bool:
        """Whether others may count from any document on."""
        return bool(self.is_scheduled or self.sizes or self.caps)

    def begin(self, position: View) -> None:
        """Write those of the beginning of a run."""
        pieces = self._pieces if self.sizes is None else self.sizes.pieces(position)
        mix, weights = pieces.slots[0]
        position[NOW], position[self._row.weights] = mix ^ self._number, weights

    def stand_for(self, shard: int) -> None:
        """Settle positions of this logical shard: it has a part of its own of each cap."""
        for rule in (self, *self.before):
            rule.caps = {source: cap.of(shard, self._shard[1]) for source, cap in rule.caps.items()}

    def settle(self, position: View) -> None:
        """Let those of now count."""
        self._put(position, *self._target(position))

    def is_pending(self, position: View) -> bool:
        """Whether others than those in use are to count."""
        return self.rule_at(position) is not self

    def watch(self, position: View) -> None:
        """Whether the weights are those of now, and how far they hold; else they stay until the position is settled."""
        self.begin_capped(position)
        self.rule = self.rule_at(position)
        self.turn_at = None if self.rule is None else self.rule.next_turn(position)

    def begin_capped(self, position: View) -> None:
        """At the beginning of a run: a cap may be of less than one in each logical shard."""
        if position[NUM] or not (self.caps or self.before):
            return
        number = mix_of(self._row.names, self._row.weights_at(position)) ^ position[NOW]
        rule = next((rule for rule in (self, *self.before) if rule._number == number), None)
        if rule is not None and rule.caps:
            rule.change(position, rule.caps)

    def next_turn(self, position: View) -> int | None:
        """`turn_at` of this schedule."""
        if not self.is_scheduled:
            return None
        end = self._pieces.end(int(self._progress_of(np.array(position)[None])[0]))
        return None if end is None else -(-end // self._shard[1])

    def rule_at(self, position: View) -> MixtureWeights | None:
        """`rule` of any position."""
        now = position[NOW]
        found = next((rule for rule in (self, *self.before) if rule._target(position)[0] == now), None)
        if found is None:  # a state of before schedules had numbers
            last = self.before[-1] if self.before else self
            found = last if last._target(position)[0] ^ last._number == now else None
        return found

    def used_in(self, rows: Ints) -> set[int]:
        """The numbers of those by which some positions go, ``int64[M, slots]``."""
        _, some = np.unique(rows[:, NOW], return_index=True)
        mixes = [mix_of(self._row.names, self._row.weights_at(row.data)) for row in np.ascontiguousarray(rows[some])]
        return {mix ^ int(now) for mix, now in zip(mixes, rows[some, NOW], strict=True)}

    def is_of(self, position: View, weights: list[float]) -> bool:
        """True if no source is gone that counts at a position: by its weight, or by tokens in the progress of a schedule."""
        number = mix_of(self._row.names, weights) ^ position[NOW]
        rules = [rule for rule in (self, *self.before) if rule._number == number]
        return not number or any(not rule._counts_others() for rule in rules)

    def _counts_others(self) -> bool:
        """True if these are a schedule by tokens, of which some were drawn from sources that the mixture has no longer."""
        if self._row.unit != "tokens" or not isinstance(self._given, Schedule):
            return False
        return not self._given.keys[0][1].keys() <= {*self._row.names}

    def cross(self, position: View, drawn: int, sources: Iterable[int]) -> bool:
        """After a draw: whether a schedule's next piece begins, or a source has reached its cap; what follows then counts.

        Args:
            drawn: In this shard, in the mixture's unit.
            sources: That may have reached their caps.
        """
        caps, rule = self.caps_now, self.rule
        capped = [s for s in sources if rule is not None and s in caps and caps[s].reached(position)]
        crossed = bool(capped) or (self.turn_at is not None and drawn >= self.turn_at)
        if crossed and rule is not None:
            rule.change(position, capped)
        return crossed

    def room(self, position: View) -> tuple[int, int | None]:
        """As many draws may be made before a schedule goes on, and only until so many tokens have been drawn."""
        turn = self.next_turn(position)
        if self._row.unit == "tokens" or turn is None:
            return MANY, turn
        return max(1, turn - position[NUM]), None

    def ends_count(self, position: View) -> Container[int]:
        """The sources behind whose ends others may count."""
        by_epochs = [source for source, cap in self.caps.items() if cap.unit == "epochs"]
        return range(len(self._row.names)) if self.grows_from(position) else by_epochs

    def end(self, position: View, source: int) -> None:
        """A source's next epoch begins, where it may have another size or have reached its cap."""
        if self.rule is not None and (self.rule.sizes or source in self.rule.caps):
            self.rule.change(position, [source])

    def first_change(self, position: View, circle: Circle, first: int, stop: int, arc: Arc, parts: list[Arc]) -> int:
        """The first of the draws that is drawn with other weights; ``stop`` where there is none."""
        if self.turn_at is not None and circle.count(first, stop, arc) > (room := self.turn_at - position[NUM]):
            stop = circle.find(first, arc, room)
        for source, cap in self.caps_now.items():
            room = cap.limit - cap.drawn(position)
            if self.rule is not None and cap.unit == "samples" and 0 < room <= circle.count(first, stop, parts[source]):
                stop = circle.find(first, parts[source], room - 1) + 1
        return stop

    def check_change(self, saved: Mapping[str, Any], rows: Ints) -> None:
        """`Node.check_change` of the mixture."""
        names, before, progress = self._row.names, from_json(saved["weights"]), int(self._progress_of(rows).max())
        if isinstance(self._given, Schedule) and isinstance(before, Schedule | dict):
            was = shares_until(pieces_of(names, before), progress)
            now = shares_until(self._pieces, progress)
            if was != now:
                raise DataStateError(
                    f"The weights of the Schedule up to {progress}, which is what the logical shard that is farthest has drawn "
                    f"times their number, differ from those of the checkpoint: they were {_shown(was, now)}, and are "
                    f"{_shown(now, was)}. What has been drawn cannot change: give the saved keys up to there, and change "
                    f"those behind. With interpolate='linear' both keys around it count."
                )
        for source, cap in self.caps.items():
            name, drawn = names[source], rows[:, cap.slot]
            drawn = np.maximum(drawn, ~drawn)
            if cap.unit == "epochs":  # and the one that a reader is in, which its row says
                drawn = drawn + (rows[:, cap.slot + 1] > 0)
            limits = cap.limits(range(len(rows)), self._shard[1])
            if saved.get("caps", {}).get(name) != cap.given and (drawn > limits).any():
                total = drawn.max() if cap.unit == "epochs" else drawn.sum()
                raise DataStateError(
                    f"caps[{name!r}]={cap.given} is below what has been drawn already: {int(total)} {cap.unit}, in "
                    f"{int((drawn > limits).sum())} of {len(rows)} logical shards more than their part. Give a larger cap; for "
                    f"a source that is to rest, weight 0."
                )

    def _progress_of(self, rows: Ints) -> Ints:
        """What the mixture has drawn in each logical shard in its unit, times the number of these."""
        return self._row.drawn_in(rows) * self._shard[1]

    def _target(self, position: View) -> tuple[int, View]:
        """The weights that are to count at a position, and a number that stands for them."""
        if not self.may_change:
            return self._pieces.slots[0]  # and its number is 0
        pieces = self._pieces if self.sizes is None else self.sizes.pieces(position)
        number = 0 if len(pieces.begins) == 1 else pieces.number(int(self._progress_of(np.array(position)[None])[0]))
        reached = [source for source, cap in self.caps.items() if cap.reached(position)]
        if not reached:
            mix, slots = pieces.slots[number]
            return mix ^ self._number, slots
        weights = [0.0 if source in reached else weight for source, weight in enumerate(pieces.weights[number])]
        return mix_of(self._row.names, weights) ^ self._number, np.array(weights).view(np.int64).data

    def _put(self, position: View, mix: int, weights: View) -> None:
        row = self._row
        if position[NOW] == mix:
            return
        if row.unit == "tokens" and position[row.weights] != weights:
            position[row.since] = position[row.tokens]
        position[NOW], position[row.weights] = mix, weights

    def change(self, position: View, sources: Iterable[int]) -> None:
        """Let the weights of now take effect, in the middle of an epoch."""
        self.settle(position)
        for source in [s for s in sources if s in self.caps and self.caps[s].reached(position)]:
            name = self._row.names[source]
            if self._shard[0] or name in self._said:
                continue
            self._said.add(name)
            _log.warning(
                "The source %r of a mixture has reached its cap of %s in the first of %d logical shards, as it will in the "
                "others: its part goes to the other sources.", name, self.caps[source].given, self._shard[1],
            )  # fmt: skip


def _shown(one: list[Any], other: list[Any]) -> str:
    """What is in one list of (progress, weights) and not in the other, in a few words."""
    found = [f"{dict(shares)} from {begin} on" for begin, shares in one if (begin, shares) not in other]
    return ", ".join(found[:3]) or "nothing there"
