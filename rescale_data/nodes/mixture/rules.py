"""`Rule`: the weights of a mixture as a pure function of what has been drawn."""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal, NamedTuple

from rescale_data.nodes.mixture.schedule import Schedule, keys_of, pieces_of


@dataclass(frozen=True)
class Rule:
    """The weights of all sources in the course of a run, and how many epochs of some of them there may be.

    Args:
        names: Of the sources, sorted.
        keys: ``(progress, weights)`` in the order of the names, as `Schedule` has them; constant weights are one key.
        interpolate: That of a schedule; `None` where the weights are constant.
        max_epochs: By name, sorted.
    """

    names: tuple[str, ...]
    keys: tuple[tuple[int, tuple[float, ...]], ...]
    interpolate: Literal["step", "linear"] | None
    max_epochs: tuple[tuple[str, int], ...]

    @cached_property
    def pieces(self) -> tuple[list[int], list[tuple[float, ...]]]:
        """The progress at which each piece of constant weights begins, and these."""
        return pieces_of(self.keys, is_linear=self.interpolate == "linear")

    @cached_property
    def digest(self) -> int:
        """The number by which positions name this rule: a hash of its content."""
        text = json.dumps(as_json(self), sort_keys=True)
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


class Weights(NamedTuple):
    """The weights at some point of a run.

    Args:
        values: In the order of the names of the rule.
        until: The progress at which others begin; `None` where they hold until a source of ``ending`` ends.
        ending: The sources that may be drawn from for some epochs more, and then no longer.
    """

    values: tuple[float, ...]
    until: int | None
    ending: frozenset[str]


def weights_at(rule: Rule, progress: int, epochs: Mapping[str, int]) -> Weights:
    """Return the weights at a point of a run.

    Args:
        progress: Samples or tokens that all logical shards have drawn, as one of them counts: its own times their number.
        epochs: Whole epochs that have been drawn of those sources of which there may be so many.
    """
    begins, weights = rule.pieces
    number = bisect_right(begins, progress)
    values, until = weights[number - 1], begins[number] if number < len(begins) else None
    if not rule.max_epochs:
        return Weights(values, until, frozenset())
    ending = frozenset(name for name, limit in rule.max_epochs if epochs.get(name, 0) < limit)
    ended = {name for name, _ in rule.max_epochs} - ending
    values = tuple(0.0 if name in ended else value for name, value in zip(rule.names, values, strict=True))
    return Weights(values, until, ending)


def rule_of(weights: Mapping[str, float] | Schedule, max_epochs: Mapping[str, int]) -> Rule:
    """Return the rule of weights and limits by name, the same object for all logical shards."""
    names = tuple(sorted(weights.keys[0][1] if isinstance(weights, Schedule) else weights))
    interpolate = weights.interpolate if isinstance(weights, Schedule) else None
    return _shared(Rule(names, keys_of(names, weights), interpolate, tuple(sorted(max_epochs.items()))))


@lru_cache(maxsize=64)
def _shared(rule: Rule) -> Rule:
    return rule


def as_json(rule: Rule) -> dict[str, Any]:
    """Return a rule as it stands in the parameters of a mixture."""
    keys = [[begin, dict(zip(rule.names, weights, strict=True))] for begin, weights in rule.keys]
    weights = {"keys": keys, "interpolate": rule.interpolate} if rule.interpolate else keys[0][1]
    return {"weights": weights, **({"max_epochs": dict(rule.max_epochs)} if rule.max_epochs else {})}


def from_json(saved: Mapping[str, Any]) -> Rule:
    """Return the rule in the parameters of a mixture."""
    weights = saved["weights"]
    if isinstance(weights.get("keys"), list):
        weights = Schedule([(begin, key) for begin, key in weights["keys"]], weights["interpolate"])
    return rule_of(weights, saved.get("max_epochs", {}))
