"""Progress counters of a mixture, for loggers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rescale_data.nodes.base import Node
from rescale_data.nodes.below import readers_of
from rescale_data.nodes.mixture.row import MixtureRow
from rescale_data.state import Ints


def mixture_progress(
    row: MixtureRow,
    sources: Mapping[str, tuple[Node[Any], slice]],
    num_ended_shards: Mapping[str, int],
    rows: Ints,
    shards: Ints,
) -> dict[str, float]:
    """Return `WeightedSampler.progress`: amounts drawn, shares and epochs of each source, by name.

    Args:
        row: The slots of the mixture's own values.
        sources: Node and slots of each source, by name.
        num_ended_shards: Number of shards in which a source has reached its `max_epochs`, by name.
        rows: ``int64[M, slots]`` of the mixture.
        shards: ``int64[M]`` indices.
    """
    drawn_counts = rows[:, row.drawn_slots]
    counts = {"samples": np.maximum(drawn_counts, ~drawn_counts).sum(axis=0)}
    if row.unit == "tokens":
        counts["tokens"] = rows[:, row.token_slots].sum(axis=0)
    shown = {f"drawn_{unit}": count for unit, count in counts.items()}
    shown["share"] = counts[row.unit] / max(1, counts[row.unit].sum())
    counters = {f"{key}/{name}": float(value[i]) for key, value in shown.items() for i, name in enumerate(row.sources)}
    for name, (node, slots) in sources.items():
        if readers := readers_of(node, slots.start):
            epochs = [reader.epochs_at(rows[:, slot:], shards) for reader, slot in readers]
            counters[f"epochs/{name}"] = float(np.mean(epochs))
    return {**counters, **{f"ended_shards/{name}": float(num) for name, num in num_ended_shards.items()}}
