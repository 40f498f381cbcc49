"""Which checkpoints to keep: a pure function of the steps there are and their metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Retention:
    """What is kept; everything else may go. The newest checkpoint always stays.

    Args:
        keep_latest: This many of the newest; None keeps all.
        keep_every: Every step that is a multiple of this, for good.
        keep_best: ``(metric, "min" or "max", count)``: the best by a metric given at save; nan is worse than any number.

    Raises:
        ValueError: a count below 1, or a mode that is neither ``"min"`` nor ``"max"``.
    """

    keep_latest: int | None = 3
    keep_every: int | None = None
    keep_best: tuple[str, str, int] | None = None

    def __post_init__(self) -> None:
        for name, value in (("keep_latest", self.keep_latest), ("keep_every", self.keep_every)):
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: give at least 1, or None.")
        if self.keep_best is not None and (
            len(self.keep_best) != 3 or self.keep_best[1] not in ("min", "max") or self.keep_best[2] < 1
        ):
            raise ValueError(
                f'keep_best={self.keep_best}: give (metric, "min" or "max", count of at least 1), or None.'
            )

    def to_delete(self, metrics: Mapping[int, Mapping[str, float]]) -> list[int]:
        """Steps that nothing keeps, oldest first, of checkpoints given as ``{step: metrics}``."""
        if self.keep_latest is None:
            return []
        steps = sorted(metrics)
        kept = set(steps[-self.keep_latest :]) | set(self._best(metrics))
        if self.keep_every is not None:
            kept |= {step for step in steps if step % self.keep_every == 0}
        return [step for step in steps if step not in kept]

    def _best(self, metrics: Mapping[int, Mapping[str, float]]) -> list[int]:
        if self.keep_best is None:
            return []
        name, mode, count = self.keep_best
        sign = 1.0 if mode == "min" else -1.0
        scores = {step: sign * values[name] for step, values in metrics.items() if name in values}
        return sorted(scores, key=lambda step: (math.isnan(scores[step]), scores[step], step))[:count]
