"""What a state and the counters are made of: a stream itself, or a stream as it stood at an earlier batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from rescale_data.engine.ranks import Ranks
from rescale_data.engine.recipe import Schema
from rescale_data.layout.clock import Clock
from rescale_data.layout.layout import Layout
from rescale_data.state import Ints


class Standing(Protocol):
    """Where a run stands: all that its state and its counters are made of."""

    @property
    def schema(self) -> Schema: ...
    @property
    def layout(self) -> Layout: ...
    @property
    def ranks(self) -> Ranks: ...
    @property
    def seed(self) -> int: ...
    @property
    def table(self) -> Ints: ...
    @property
    def clock(self) -> Clock: ...
    @property
    def owners(self) -> Ints: ...
    @property
    def dropped_samples(self) -> int: ...
    @property
    def padded_samples(self) -> int: ...

    def whole(self) -> Ints:
        """The table with all rows right (collective as a state is)."""
        ...


def counters(at: Standing) -> dict[str, float]:
    """For a logger: of the run, and of what this rank's shards have drawn."""
    counts = {
        "global_samples": float(at.clock.samples),
        "global_step": float(at.clock.global_step(at.layout.global_batch_size)),
        "filtered_rows": 0.0,
        "skipped_rows": 0.0,
        "dropped_samples": float(at.dropped_samples),
        "padded_samples": float(at.padded_samples),
    }
    return {**counts, **at.schema.progress(at.table, np.array(at.layout.owned(at.ranks.rank), dtype=np.int64))}


@dataclass(frozen=True)
class Moment:
    """A stream as it stood at one batch; the table is a copy."""

    schema: Schema
    layout: Layout
    ranks: Ranks
    seed: int
    table: Ints
    clock: Clock
    owners: Ints
    dropped_samples: int
    padded_samples: int

    @classmethod
    def of(cls, stream: Standing) -> Moment:
        return cls(
            stream.schema,
            stream.layout,
            stream.ranks,
            stream.seed,
            stream.table.copy(),
            stream.clock,
            stream.owners,
            stream.dropped_samples,
            stream.padded_samples,
        )

    def whole(self) -> Ints:
        return self.ranks.saving.merge(self.table, self.owners)
