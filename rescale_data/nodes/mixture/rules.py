"""The weights of a mixture over a run: `Schedule`, as a user gives them, and `WeightRule`, as states refer to them."""

from __future__ import annotations

import hashlib
import json
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from rescale_data.errors import require_int

NUM_LINEAR_STEPS = 64
"""Number of steps of constant weights from one key of a linear schedule to the next."""


@dataclass(frozen=True)
class Schedule:
    """Weights that change in the course of a run, for `WeightedSampler`.

    Progress is the amount that the mixture has drawn in a logical shard, in its ``unit``, times the number of logical shards.
    These are the samples or tokens of the run, as each shard sees them. So two shards may pass a key in different steps.

    Args:
        keys: ``(progress, weights)``: the first key is at 0, each key is later than the one before and has a weight for every
            source.
        interpolate: "step": a key's weights hold up to the next key. "linear": the shares change to the shares of the next key
            in 64 equal steps of constant weights. So the number of draws is still computed by sums.

    Raises:
        ValueError: The keys do not begin at 0, or go back; a key has other names than the first; values are no valid weights.
        TypeError: The keys are no such pairs; a weight is no number.

    Example:
        >>> import rescale_data as rd
        >>> anneal = rd.Schedule([(0, {"web": 0.9, "math": 0.1}), (1000, {"web": 0.5, "math": 0.5})])
        >>> shard = rd.Shard()
        >>> rows = {name: rd.Reader([name] * 50, shard) for name in ("web", "math")}
        >>> next(rd.WeightedSampler(rows, anneal))
        'math'
    """

    keys: Sequence[tuple[int, Mapping[str, float]]]
    interpolate: Literal["step", "linear"] = "step"

    def __post_init__(self) -> None:
        if not _is_key_list(self.keys):
            raise TypeError(f"Schedule({self.keys!r}): give a list of (progress, {{name: weight}}).")
        if self.interpolate not in ("step", "linear"):
            raise ValueError(f"Schedule(interpolate={self.interpolate!r}): give 'step' or 'linear'.")
        begins = [begin for begin, _ in self.keys]
        for begin in begins:
            require_int(progress=begin)
        if not begins or begins[0] != 0 or any(earlier >= later for earlier, later in pairwise(begins)):
            raise ValueError(
                f"Schedule with keys at {begins}: give the first at 0, and each later than the one before."
            )
        for begin, weights in self.keys:
            if weights.keys() != self.keys[0][1].keys():
                raise ValueError(
                    f"Schedule: the key at {begin} has weights of {sorted(weights)}, the first of {sorted(self.keys[0][1])}. "
                    f"Give one for each source in every key; 0 lets it rest."
                )
            require_weights(weights, f" in the key at {begin}")


@dataclass(frozen=True)
class WeightRule:
    """The weights of all sources of a mixture over a whole run, and the largest number of epochs of some of them.

    Args:
        sources: Names of the sources, sorted.
        weight_keyframes: ``(progress, weights)`` as in `Schedule`, weights in the order of `sources`; one if they are constant.
        interpolate: As in `Schedule`; `None` if the weights are constant.
        max_epochs: ``(name, epochs)``, sorted.
    """

    sources: tuple[str, ...]
    weight_keyframes: tuple[tuple[int, tuple[float, ...]], ...]
    interpolate: Literal["step", "linear"] | None
    max_epochs: tuple[tuple[str, int], ...]

    @cached_property
    def weight_intervals(self) -> tuple[list[int], list[tuple[float, ...]]]:
        """The progress at which each piece of constant weights begins, the first at 0, and the weights of each piece.

        In place of a linear change there are constant steps; each has the weights of the line at its middle.
        """
        keys = self.weight_keyframes
        if self.interpolate != "linear" or len(keys) == 1:
            return [begin for begin, _ in keys], [weights for _, weights in keys]
        shares = [(begin, tuple(weight / math.fsum(weights) for weight in weights)) for begin, weights in keys]
        step_begins, step_weights = list[int](), list[tuple[float, ...]]()
        for (begin, old_shares), (end, new_shares) in pairwise(shares):
            num_steps = min(NUM_LINEAR_STEPS, end - begin)
            for step in range(num_steps):
                step_fraction = (2 * step + 1) / (2 * num_steps)
                old_and_new = zip(old_shares, new_shares, strict=True)
                step_begins.append(begin + (end - begin) * step // num_steps)
                step_weights.append(tuple(old * (1 - step_fraction) + new * step_fraction for old, new in old_and_new))
        return [*step_begins, shares[-1][0]], [*step_weights, shares[-1][1]]

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
        weights_until: The number of draws or tokens of one logical shard at which other weights begin; `None` if none do.
        end_epochs: ``{source: epoch}`` for sources at whose ends other weights may begin; the source is over before that epoch.
    """

    source_weights: tuple[float, ...]
    weights_until: int | None
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
    interval_starts, weights = rule.weight_intervals
    piece_number, limits = bisect_right(interval_starts, amount_drawn * num_shards), dict(rule.max_epochs)
    ended = {name for name, limit in limits.items() if epochs.get(name, 0) >= limit}
    known_weights = dict(zip(rule.sources, weights[piece_number - 1], strict=True)) | dict.fromkeys(ended, 0.0)
    change_at = -(-interval_starts[piece_number] // num_shards) if piece_number < len(interval_starts) else None
    end_epochs = {sources.index(name): limits[name] for name in limits.keys() - ended if name in sources}
    return CurrentWeights(tuple(known_weights.get(name, 0.0) for name in sources), change_at, end_epochs)


def make_rule(weights: Mapping[str, float] | Schedule, max_epochs: Mapping[str, int]) -> WeightRule:
    """Return the rule for given weights and limits on epochs; all logical shards share one object."""
    keys = weights.keys if isinstance(weights, Schedule) else [(0, weights)]
    names = tuple(sorted(keys[0][1]))
    weight_keyframes = tuple((int(begin), tuple(float(key[name]) for name in names)) for begin, key in keys)
    interpolate = weights.interpolate if isinstance(weights, Schedule) else None
    return _shared_rule(names, weight_keyframes, interpolate, tuple(sorted(max_epochs.items())))


_shared_rule = lru_cache(maxsize=64)(WeightRule)


def as_json(rule: WeightRule) -> dict[str, Any]:
    """Return a rule as JSON values, in the form of a mixture's saved parameters."""
    keys = [[begin, dict(zip(rule.sources, weights, strict=True))] for begin, weights in rule.weight_keyframes]
    weights = {"keys": keys, "interpolate": rule.interpolate} if rule.interpolate else keys[0][1]
    return {"weights": weights, **({"max_epochs": dict(rule.max_epochs)} if rule.max_epochs else {})}


def from_json(saved_parameters: Mapping[str, Any]) -> WeightRule:
    """Return the rule in the saved parameters of a mixture."""
    weights = saved_parameters["weights"]
    if isinstance(weights.get("keys"), list):
        weights = Schedule([(begin, key) for begin, key in weights["keys"]], weights["interpolate"])
    return make_rule(weights, saved_parameters.get("max_epochs", {}))


def require_weights(weights: Mapping[str, float], context: str = "") -> None:
    """Raise ``ValueError`` if weights are negative, not finite or all 0; ``TypeError`` if one is no number."""
    for name, weight in weights.items():
        if isinstance(weight, bool | np.bool_ | str) or not hasattr(weight, "__float__"):
            raise TypeError(f"weights[{name!r}]={weight!r}{context} is a {type(weight).__name__}; give a number.")
    try:
        float_weights = [*map(float, weights.values())]
    except OverflowError:  # of an int
        float_weights = [math.inf]
    if not any(float_weights) or not math.isfinite(sum(float_weights)) or min(float_weights) < 0:
        raise ValueError(
            f"weights={dict(weights)}{context}: give finite numbers, of a finite sum, none negative and not all 0."
        )


def _is_key_list(keys: object) -> bool:
    if not isinstance(keys, Sequence):
        return False
    return all(isinstance(key, Sequence) and len(key) == 2 and isinstance(key[1], Mapping) for key in keys)
