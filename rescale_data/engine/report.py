"""`Report`: minimum, median and maximum over ranks of the numbers about waits and reads."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rescale_data.sources.counts import READ_COUNTER_NAMES

READY_COUNTER = "batches_ready"
COUNTER_NAMES = ("wait_seconds", "wait_p50_seconds", "wait_p99_seconds", READY_COUNTER, *READ_COUNTER_NAMES)


class RankSpread(NamedTuple):
    """The minimum, median and maximum of one number over all dp ranks, and the rank with the worst value.

    Args:
        worst: The dp rank with the largest value; for ``batches_ready``, the one with the smallest.
    """

    minimum: float
    median: float
    maximum: float
    worst: int


class Report(dict[str, RankSpread]):
    """Statistics over all dp ranks of the numbers of `DataLoader.progress`, by name; ``str()`` returns one line for a log."""

    def __str__(self) -> str:
        return ", ".join(
            f"{name} {spread.minimum:.4g} / {spread.median:.4g} / {spread.maximum:.4g} (rank {spread.worst})"
            for name, spread in self.items()
        )


def report_over_ranks(counters_by_rank: npt.NDArray[np.float64], first_rank: int = 0) -> Report:
    """Return the `Report` computed from the values of all ranks.

    Args:
        counters_by_rank: ``float64[W, len(COUNTER_NAMES)]``.
        first_rank: The dp rank of the first row; it may differ from 0 if there is only one row.
    """
    rank_spreads = Report()
    for name, rank_values in zip(COUNTER_NAMES, counters_by_rank.T, strict=True):
        worst = rank_values.argmin() if name == READY_COUNTER else rank_values.argmax()
        rank_spreads[name] = RankSpread(
            float(rank_values.min()), float(np.median(rank_values)), float(rank_values.max()), first_rank + int(worst)
        )
    return rank_spreads
