"""`WeightRule`: the weights of a mixture as a pure function of the amounts drawn so far."""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal

from rescale_data.nodes.mixture.schedule import Schedule, weight_pieces_of


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


@dataclass(frozen=True)
class CurrentWeights:
    """The weights of sources at one point of a run, and the points at which they may change.

    Args:
        source_weights: Weight of each source.
        change_at_amount: The number of draws or tokens of one logical shard at which other weights begin; `None` if none do.
        end_epochs: ``{source: epoch}`` for sources at whose ends other weights may begin; the source is over before that epoch.
    """

    source_weights: tuple[float, ...]
    change_at_amount: int | None
    end_epochs: Mapping[int, int]


def weights_at(
    rule: WeightRule, sources: Sequence[str], amount_drawn: int, num_shards: int, epochs: Mapping[str, int]
) -> CurrentWeights:
    """Return the weights that a rule gives after the amounts and epochs drawn so far.

    Args:
        rule: The rule.
        sources: Names of the sources whose weights are returned; 0 for a source that the rule does not have.
        amount_drawn: Samples or tokens drawn by one logical shard.
        num_shards: Number of logical shards; each takes the others to have drawn as much.
        epochs: Number of whole epochs drawn from each source with a limit in `WeightRule.max_epochs`, by name.
    """
    piece_starts, weights = rule.weight_pieces
    piece_number, limits = bisect_right(piece_starts, amount_drawn * num_shards), dict(rule.max_epochs)
    ended = {name for name, limit in limits.items() if epochs.get(name, 0) >= limit}
    known_weights = dict(zip(rule.sources, weights[piece_number - 1], strict=True)) | dict.fromkeys(ended, 0.0)
    change_at = -(-piece_starts[piece_number] // num_shards) if piece_number < len(piece_starts) else None
    end_epochs = {sources.index(name): limits[name] for name in limits.keys() - ended if name in sources}
    return CurrentWeights(tuple(known_weights.get(name, 0.0) for name in sources), change_at, end_epochs)


def make_rule(weights: Mapping[str, float] | Schedule, max_epochs: Mapping[str, int]) -> WeightRule:
    """Return the rule for given weights and limits on epochs; all logical shards share one object."""
    keys = weights.keys if isinstance(weights, Schedule) else [(0, weights)]
    names = tuple(sorted(keys[0][1]))
    schedule_keys = tuple((int(begin), tuple(float(key[name]) for name in names)) for begin, key in keys)
    interpolate = weights.interpolate if isinstance(weights, Schedule) else None
    return _shared_rule(names, schedule_keys, interpolate, tuple(sorted(max_epochs.items())))


_shared_rule = lru_cache(maxsize=64)(WeightRule)


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
