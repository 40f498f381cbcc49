"""`Leg`: a segment of a run, micro batches that go by one plan."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import numpy as np

from rescale_data.engine.recipe import SAMPLES, Histories, History
from rescale_data.layout.deal import Deal, DealTurns
from rescale_data.layout.layout import Layout
from rescale_data.layout.turns import AlignedTurns, BalancedTurns, Turns
from rescale_data.state import Ints

_SOON = 64  # micro batches of a worker


@dataclass(frozen=True, eq=False)
class Leg:
    """A segment of a run: micro batches without a change of plan.

    Args:
        stop: The micro batch after the last, counted from `origin`; `None` where there is none or only reading tells.
        first: Its first micro batch.
        samples: ``int64[N]``, what each shard had delivered at `first`; of a deal, when that was made.
        left: ``int64[N]``, what each had left of the epoch then; `None` where only reading tells.
        deal: At the end of an epoch, what serves the shards; else the layout does.
        histories: Of what the sources consist.
        pads: True if batches say which of their samples are real.
        whole_steps: True if the rows of a step count as taken with its last micro batch (balanced steps).
        calm_until: The micro batch up to which each simply follows the one before; 0 where its end has to be looked for.
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
        """Return who serves which samples, from its first micro batch on."""
        if self.deal is not None:
            return DealTurns(self.deal, self.rank)
        if self.layout.aligned:
            return AlignedTurns(self.layout, self.rank)
        return BalancedTurns(self.layout, self.rank, table[:, SAMPLES])

    def served(self, u: int) -> Ints:
        """Return the shards that one worker serves, the one that makes micro batch `u`: of a deal those that it serves soon."""
        workers = self.layout.workers
        if self.deal is None:
            return self.layout.served(self.rank, u % workers)
        soon = range(u, min(u + _SOON * workers, self.deal.num_micro_batches), workers)
        return np.unique(
            np.concatenate([np.arange(len(self.deal.left))[self.deal.turn(self.rank, v).index] for v in soon])
        )

    def step_of(self, u: int) -> int:
        """Return the first micro batch of the step that micro batch `u` is part of; of a step that began before, of the leg."""
        return max(self.first, u - u % self.layout.gradient_accumulation_steps)

    def counted(self, u: int) -> int:
        """Return the micro batch before which a state stands where `u` is the next."""
        return self.step_of(u) if self.whole_steps else u

    def for_a_worker(self) -> Leg:
        """Return the part of it that its micro batches are made by."""
        return Leg(self.layout, self.rank, self.stop, deal=self.deal, histories=self.histories, pads=self.pads)

    @property
    def is_last(self) -> bool:
        """True if the epoch ends with it: a deal that no other round follows."""
        known = self.left is not None
        return self.deal is not None and (known or self.deal.num_samples < self.layout.global_batch_size)

    def delivered(self, u: int) -> Ints:
        """Return the samples that each of the N shards delivers in it before micro batch u, whoever serves them."""
        if self.deal is not None:
            return self.deal.delivered(u)
        return self.layout.delivered(self.samples, self.first, u)

    def reached(self, u: int) -> Ints:
        """Return the samples that each of the N shards has delivered in the run before micro batch u."""
        return self.samples + self.delivered(u)

    def left_at(self, u: int) -> int | None:
        """Return the micro batches from u until the epoch ends; `None` where it never does, or cannot be known."""
        if self.stop is None or self.left is None:
            return None
        if self.deal is not None:
            return self.stop - u
        main = self.delivered(self.stop)
        return self.stop - u + Deal(self.layout, self.left - main, self.samples, self.pads).num_micro_batches
