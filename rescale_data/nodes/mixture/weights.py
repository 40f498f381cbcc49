"""`MixtureWeights`: returns the weights at a position of a mixture, and writes changes of weights into positions."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from rescale_data.errors import DataStateError
from rescale_data.nodes.base import View
from rescale_data.nodes.mixture.row import DRAWS_SLOT, RULE_SLOT, MixtureRow
from rescale_data.nodes.mixture.rules import CurrentWeights, WeightRule, as_json, from_json, weights_at
from rescale_data.nodes.sample_format import EARLIER_PARAMETERS_KEY, ParameterHistory
from rescale_data.state import Ints

_log = logging.getLogger("rescale_data")
_UNKNOWN_RULE_MESSAGE = (
    "By the state a mixture has weights that are not in it: it was changed or damaged. Load another checkpoint."
)


class MixtureWeights:
    """The weights of one logical shard's mixture, computed from a position: the rule in use, and the amounts drawn.

    A position that was begun with the rule of an earlier segment of the run keeps that rule until it is settled.

    Args:
        row: The slots of the mixture's own values.
        rule: The present rule.
        shard: The index of the logical shard, and the number of logical shards.
        epoch_slots: The slot of the epoch of each source whose epochs are counted, by name.
    """

    def __init__(
        self, row: MixtureRow, rule: WeightRule, shard: tuple[int, int], epoch_slots: Mapping[str, int]
    ) -> None:
        self.rule, self.row, self.shard, self._epoch_slots = rule, row, shard, epoch_slots
        self._earlier_rules: Sequence[WeightRule] = ()
        self._logged_sources: set[str] = set()

    def use_history(self, earlier_rules: Sequence[WeightRule], epochs: Mapping[str, int]) -> None:
        """Add the rules of earlier segments that some positions still use, and the indices of the epochs that they count."""
        self._earlier_rules, self._epoch_slots = earlier_rules, {**self._epoch_slots, **epochs}

    def current(self, position: View) -> CurrentWeights:
        """Return the weights in use at a position."""
        return self._weights_of(self._rule_at(position), self.row.sources, position)

    def apply_changes_at(self, position: View) -> None:
        """Change a position from the weights of an earlier segment of the run to the present ones."""
        if self.is_node_change_due(position):
            old_weights = self.current(position)
            position[RULE_SLOT] = self.rule.digest
            self.record_change(position, old_weights)

    def is_node_change_due(self, position: View) -> bool:
        """True if a position still uses the weights of an earlier segment of the run."""
        return position[RULE_SLOT] != self.rule.digest

    def record_change(self, position: View, old_weights: CurrentWeights) -> None:
        """Record in a position that its weights have just changed from ``old_weights``.

        By tokens, if the weights differ, the tokens drawn so far no longer count as ahead or behind.
        """
        row = self.row
        if row.unit == "tokens" and self.current(position).source_weights != old_weights.source_weights:
            position[row.old_token_slots] = position[row.token_slots]

    def record_epoch_end(self, position: View, source: int, old_weights: CurrentWeights) -> None:
        """Change the weights after a source with a limit in `max_epochs` has ended an epoch."""
        if source not in old_weights.end_epochs:
            return
        self.record_change(position, old_weights)
        name, new_weights = self.row.sources[source], self.current(position)
        if source in new_weights.end_epochs or self.shard[0] or name in self._logged_sources:
            return
        self._logged_sources.add(name)
        _log.warning(
            "The source %r of a mixture has reached its max_epochs of %d in the first of %d logical shards, as it will in the "
            "others: its part goes to the other sources.", name, old_weights.end_epochs[source], self.shard[1],
        )  # fmt: skip

    def needs_missing_source(self, position: View) -> bool:
        """True if the weights at a position depend on a source that is missing now.

        Its weight is not 0, or its tokens count in the progress of a schedule by tokens.
        """
        rule, names = self._rule_at(position), {*self.row.sources}
        if names.issuperset(rule.sources):
            return False
        weights = self._weights_of(rule, rule.sources, position).source_weights
        counts_tokens = self.row.unit == "tokens" and rule.interpolate is not None
        missing_weights = (weight for name, weight in zip(rule.sources, weights, strict=True) if name not in names)
        return counts_tokens or any(missing_weights)

    def earlier_parameters(self, saved: Mapping[str, Any], rows: Ints) -> ParameterHistory:
        """Return ``(digest, rule)`` for each rule of an earlier segment that a position still uses."""
        rules = [from_json(rule) for rule in (*(rule for _, rule in saved.get(EARLIER_PARAMETERS_KEY, ())), saved)]
        rules_by_digest, digests = ({rule.digest: rule for rule in rules}, {*np.unique(rows[:, RULE_SLOT]).tolist()})
        if not digests <= rules_by_digest.keys():
            raise DataStateError(_UNKNOWN_RULE_MESSAGE)
        return [(digest, as_json(rules_by_digest[digest])) for digest in sorted(digests - {self.rule.digest})]

    def check_change(self, saved: Mapping[str, Any], rows: Ints) -> None:
        """Raise ``DataStateError`` if changed weights or `max_epochs` do not fit what has been drawn (`Mixes.check_change`)."""
        saved_rule, progress = from_json(saved), int(self.row.amounts_drawn(rows).max()) * self.shard[1]
        if self.rule.interpolate:
            old_shares, new_shares = _shares_until(saved_rule, progress), _shares_until(self.rule, progress)
            if old_shares != new_shares:
                raise DataStateError(
                    f"The weights of the Schedule up to {progress}, which is what the logical shard that is farthest has drawn "
                    f"times their number, differ from those of the checkpoint: they were "
                    f"{_describe_shares(old_shares, new_shares)}, and are {_describe_shares(new_shares, old_shares)}. "
                    f"What has been drawn cannot change: give the saved keys up to there, and change those behind. "
                    f"With interpolate='linear' both keys around it count."
                )
        for name, limit in self.rule.max_epochs:
            slot = self._epoch_slots[name]
            epochs_begun = rows[:, slot] + (rows[:, slot + 1] > 0)  # includes the epoch that the reader is in
            if (name, limit) not in saved_rule.max_epochs and (epochs_begun > limit).any():
                raise DataStateError(
                    f"max_epochs[{name!r}]={limit} is below what has been drawn already: {int(epochs_begun.max())} epochs, "
                    f"more than "
                    f"that in {int((epochs_begun > limit).sum())} of {len(rows)} logical shards. Give more; for a source that "
                    f"is to "
                    f"rest, weight 0."
                )

    def num_ended_shards(self, rows: Ints) -> dict[str, int]:
        """Return, by source, how many of the positions ``int64[M, slots]`` are at or beyond its `max_epochs`."""
        return {name: int((rows[:, self._epoch_slots[name]] >= limit).sum()) for name, limit in self.rule.max_epochs}

    def _rule_at(self, position: View) -> WeightRule:
        digest = position[RULE_SLOT]
        for rule in (self.rule, *self._earlier_rules):
            if rule.digest == digest:
                return rule
        raise DataStateError(_UNKNOWN_RULE_MESSAGE)

    def _weights_of(self, rule: WeightRule, sources: Sequence[str], position: View) -> CurrentWeights:
        row, epochs = self.row, {name: position[slot] for name, slot in self._epoch_slots.items()}
        amount_drawn: int = sum(position[row.token_slots]) if row.unit == "tokens" else position[DRAWS_SLOT]
        return weights_at(rule, sources, amount_drawn, self.shard[1], epochs)


def _shares_until(rule: WeightRule, progress: int) -> list[tuple[int, dict[str, float]]]:
    """Return when each period of constant weights up to ``progress`` begins, and the sources' shares in it (9 decimals).

    Successive pieces with the same shares are one piece.
    """
    pieces: list[tuple[int, dict[str, float]]] = []
    for begin, weights in zip(*rule.weight_intervals, strict=True):
        total = sum(weights)
        shares = {name: round(weight / total, 9) for name, weight in zip(rule.sources, weights, strict=True) if weight}
        if begin <= progress and (not pieces or pieces[-1][1] != shares):
            pieces.append((begin, shares))
    return pieces


def _describe_shares(pieces: Iterable[Any], other_pieces: Sequence[Any]) -> str:
    """Describe, for messages, up to three pieces that are in the first list of (progress, shares) and not in the other."""
    descriptions = [f"{shares} from {begin} on" for begin, shares in pieces if (begin, shares) not in other_pieces]
    return ", ".join(descriptions[:3]) or "nothing there"
