"""`Schedule`: weights of a mixture that change in the course of a run, in pieces of constant weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

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


def weight_pieces_of(
    keys: Sequence[tuple[int, tuple[float, ...]]], *, is_linear: bool
) -> tuple[list[int], list[tuple[float, ...]]]:
    """Return the progress at which each piece of constant weights begins, the first at 0, and the weights of each piece.

    In place of a linear change there are constant steps; each has the weights of the line at its middle.
    """
    if not is_linear or len(keys) == 1:
        return [begin for begin, _ in keys], [weights for _, weights in keys]
    shares = [(begin, tuple(weight / math.fsum(weights) for weight in weights)) for begin, weights in keys]
    step_begins, step_weights = list[int](), list[tuple[float, ...]]()
    for (begin, old_shares), (end, new_shares) in pairwise(shares):
        num_steps = min(NUM_LINEAR_STEPS, end - begin)
        for step in range(num_steps):
            fraction = (2 * step + 1) / (2 * num_steps)
            step_begins.append(begin + (end - begin) * step // num_steps)
            step_weights.append(
                tuple(old * (1 - fraction) + new * fraction for old, new in zip(old_shares, new_shares, strict=True))
            )
    return [*step_begins, shares[-1][0]], [*step_weights, shares[-1][1]]


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
