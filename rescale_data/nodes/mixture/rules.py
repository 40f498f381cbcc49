"""`WeightRule`: the weights of a mixture as a pure function of the amounts drawn so far."""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal, NamedTuple

from rescale_data.nodes.mixture.schedule import Schedule, schedule_keys_of, weight_pieces_of


@dataclass(frozen=True)
class WeightRule:
    """The weights of all sources of a mixture over a whole run, and the largest number of epochs of some of them.

    Args:
        sources: Names of the sources, sorted.
        schedule_keys: ``(progress, weights)`` as in `Schedule`, weights in the order of `sources`; constant weights are one.
        interpolate: As in `Schedule`; `None` if the weights are constant.
        max_epochs: ``(name, epochs)``, sorted.
    """

    sources: tuple[str, ...]
    schedule_keys: tuple[tuple[int, tuple[float, ...]], ...]
    interpolate: Literal["step", "linear"] | None
    max_epochs: tuple[tuple[str, int], ...]

    @cached_property
    def weight_pieces(self) -> tuple[list[int], list[tuple[float, ...]]]:
        """The progress at which each piece of constant weights begins, and the weights of each piece."""
        return weight_pieces_of(self.schedule_keys, is_linear=self.interpolate == "linear")

    @cached_property
    def digest(self) -> int:
        """Hash of the rule, a number of 64 bits by which positions refer to it."""
        rule_json = json.dumps(as_json(self), sort_keys=True)
        return int.from_bytes(hashlib.blake2b(rule_json.encode(), digest_size=8).digest(), "little", signed=True)


class RuleWeights(NamedTuple):
    """The weights at one point of a run, and the progress or the ends of sources after which they may change.

    Args:
        values: Weights in the order of the names of the rule.
        change_at: The progress at which other weights begin; `None` if these hold until a source of ``ending`` ends.
        ending: The sources that may be drawn from only for some epochs more.
    """

    values: tuple[float, ...]
    change_at: int | None
    ending: frozenset[str]


def weights_at(rule: WeightRule, amount_drawn: int, epochs: Mapping[str, int]) -> RuleWeights:
    """Return the weights that a rule gives after the amounts and epochs drawn so far.

    Args:
        rule: The rule.
        amount_drawn: Samples or tokens drawn by all logical shards, as one of them counts: its own amount times N.
        epochs: Number of whole epochs drawn from each source with a limit in `WeightRule.max_epochs`, by name.
    """
    begins, weights = rule.weight_pieces
    piece_number = bisect_right(begins, amount_drawn)
    values, change_at = weights[piece_number - 1], begins[piece_number] if piece_number < len(begins) else None
    if not rule.max_epochs:
        return RuleWeights(values, change_at, frozenset())
    ending = frozenset(name for name, limit in rule.max_epochs if epochs.get(name, 0) < limit)
    ended = {name for name, _ in rule.max_epochs} - ending
    values = tuple(0.0 if name in ended else value for name, value in zip(rule.sources, values, strict=True))
    return RuleWeights(values, change_at, ending)


def make_rule(weights: Mapping[str, float] | Schedule, max_epochs: Mapping[str, int]) -> WeightRule:
    """Return the rule for given weights and limits on epochs; all logical shards share one object."""
    names = tuple(sorted(weights.keys[0][1] if isinstance(weights, Schedule) else weights))
    interpolate = weights.interpolate if isinstance(weights, Schedule) else None
    return _intern_rule(
        WeightRule(names, schedule_keys_of(names, weights), interpolate, tuple(sorted(max_epochs.items())))
    )


@lru_cache(maxsize=64)
def _intern_rule(rule: WeightRule) -> WeightRule:
    return rule


def as_json(rule: WeightRule) -> dict[str, Any]:
    """Return a rule as JSON values, in the form of a mixture's saved parameters."""
    keys = [[begin, dict(zip(rule.sources, weights, strict=True))] for begin, weights in rule.schedule_keys]
    weights = {"keys": keys, "interpolate": rule.interpolate} if rule.interpolate else keys[0][1]
    return {"weights": weights, **({"max_epochs": dict(rule.max_epochs)} if rule.max_epochs else {})}


def from_json(saved_parameters: Mapping[str, Any]) -> WeightRule:
    """Return the rule in the saved parameters of a mixture."""
    weights = saved_parameters["weights"]
    if isinstance(weights.get("keys"), list):
        weights = Schedule([(begin, key) for begin, key in weights["keys"]], weights["interpolate"])
    return make_rule(weights, saved_parameters.get("max_epochs", {}))
