"""A segment of a run: class `Leg`, micro batches that follow one plan."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import numpy as np

from rescale_data.engine.recipe import SAMPLES, Histories, History
from rescale_data.layout.deal import Deal
from rescale_data.layout.layout import Layout
from rescale_data.layout.turns import AlignedTurns, BalancedTurns, Turns
from rescale_data.state import Ints

_SOON = 64  # in micro batches of one worker


@dataclass(frozen=True, eq=False)
class Leg:
    """A segment of a run: micro batches without a change of plan.

    Args:
        stop: The micro batch after the last one, counted from `Clock.origin`; `None` if there is no last one, or only reading
            can find it.
        first: The first micro batch of the segment.
        samples: ``int64[N]``, the samples that each shard had delivered at `first`; in a remainder, at the beginning of the
            `Deal`.
        left: ``int64[N]``, the samples that each shard had left of the epoch at that time; `None` if only reading can find
            them.
        deal: The plan of the remainder of an epoch; `None` in the main phase, where the layout is the plan.
        histories: The data of each source, by epoch (`Histories`).
        pads: True if batches say which of their samples are real.
        whole_steps: True if the rows of a step count as consumed with its last micro batch (balanced steps).
        calm_until: Up to this micro batch, nothing has to be looked for between two micro batches: no end of the segment, no
            failed proof; else 0.
    """

    layout: Layout
    rank: int
    stop: int | None
    first: int = 0
    samples: Ints = field(default_factory=partial(np.zeros, 0, np.int64))
    left: Ints | None = None
    deal: Deal | None = None
    histories: Histories = field(default_factory=dict[str, History])
    pads: bool = False
    calm_until: int = 0
    whole_steps: bool = False

    def turns(self, table: Ints) -> Turns:
        """Return the turns: the shards that this rank serves in each micro batch of the segment."""
        if self.deal is not None:
            return partial(self.deal.turn, self.rank)
        if self.layout.aligned:
            return AlignedTurns(self.layout, self.rank).turn
        return BalancedTurns(self.layout, self.rank, table[:, SAMPLES]).turn

    def served(self, u: int) -> Ints:
        """Return the shards of the worker that makes micro batch `u`; in a remainder, the shards that it serves soon."""
        workers = self.layout.workers
        if self.deal is None:
            return self.layout.served(self.rank, u % workers)
        soon = range(u, min(u + _SOON * workers, self.deal.num_micro_batches), workers)
        return np.unique(
            np.concatenate([np.arange(len(self.deal.left))[self.deal.turn(self.rank, v).index] for v in soon])
        )

    def step_of(self, u: int) -> int:
        """Return the first micro batch, in this segment, of the step that `u` is part of."""
        return max(self.first, u - u % self.layout.gradient_accumulation_steps)

    def counted(self, u: int) -> int:
        """Return the first micro batch that a state does not contain, if `u` is the next micro batch."""
        return self.step_of(u) if self.whole_steps else u

    def for_a_worker(self) -> Leg:
        """Return the part of the segment that a worker needs to make its micro batches."""
        return Leg(self.layout, self.rank, self.stop, deal=self.deal, histories=self.histories, pads=self.pads)

    @property
    def is_last(self) -> bool:
        """True if the epoch ends with this segment: a remainder that no other round follows."""
        known = self.left is not None
        return self.deal is not None and (known or self.deal.num_samples < self.layout.global_batch_size)

    def delivered(self, u: int) -> Ints:
        """Return the samples that each of the N shards delivers in this segment before micro batch u, on all ranks."""
        if self.deal is not None:
            return self.deal.delivered(u)
        return self.layout.delivered(self.samples, self.first, u)

    def reached(self, u: int) -> Ints:
        """Return the samples that each of the N shards has delivered in the run before micro batch u."""
        return self.samples + self.delivered(u)

    def left_at(self, u: int) -> int | None:
        """Return the number of micro batches from u to the end of the epoch; `None` if that is not known or never comes."""
        if self.stop is None or self.left is None:
            return None
        if self.deal is not None:
            return self.stop - u
        main = self.delivered(self.stop)
        return self.stop - u + Deal(self.layout, self.left - main, self.samples, self.pads).num_micro_batches
