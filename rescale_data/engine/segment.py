"""`EpochSegment`: a part of a run whose micro batches follow one plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from rescale_data.engine.recipe import SAMPLES, VersionLog, VersionLogs
from rescale_data.layout.batch_shards import AlignedBatchShards, BatchShardsFunction, UnalignedBatchShards
from rescale_data.layout.layout import Layout
from rescale_data.layout.remainder import Remainder
from rescale_data.state import Ints

_LOOKAHEAD_BATCHES = 64  # in micro batches of one worker


@dataclass(frozen=True, eq=False)
class EpochSegment:
    """A part of a run on one rank, by one plan: the main phase of an epoch, or one round of its remainder.

    Args:
        stop: The micro batch after the last one, counted from `Clock.origin`; `None` if there is no last one, or only reading
            can find it.
        first_batch: The first micro batch of the segment.
        samples: ``int64[N]``, the samples that each shard had delivered at `first_batch`; in a remainder, at the beginning of
            the `Remainder`.
        samples_left: ``int64[N]``, the samples that each shard had left of the epoch at that time; `None` if only reading can
            find them.
        remainder: The plan of the remainder of an epoch; `None` in the main phase, where the layout is the plan.
        histories: The data of each source, by epoch (`VersionLogs`).
        pads: True if batches say which of their samples are real.
        saves_whole_steps: True if the rows of a step count as consumed with its last micro batch (balanced steps).
        end_check_u: Up to this micro batch, nothing has to be looked for between two micro batches: no end of the segment, no
            failed proof; else 0.
    """

    layout: Layout
    rank: int
    stop: int | None
    first_batch: int = 0
    samples: Ints = field(default_factory=partial(np.zeros, 0, np.int64))
    samples_left: Ints | None = None
    remainder: Remainder | None = None
    histories: VersionLogs = field(default_factory=dict[str, VersionLog])
    pads: bool = False
    end_check_u: int = 0
    saves_whole_steps: bool = False

    def batch_shards_function(self, table: Ints) -> BatchShardsFunction:
        """Return a function (`BatchShardsFunction`) that names the logical shards that this rank serves in a micro batch."""
        if self.remainder is not None:
            return partial(self.remainder.batch_shards, self.rank)
        if self.layout.aligned:
            return AlignedBatchShards(self.layout, self.rank).batch_shards
        return UnalignedBatchShards(self.layout, self.rank, table[:, SAMPLES]).batch_shards

    def served_shards(self, u: int) -> Ints:
        """Return the shards of the worker that makes micro batch ``u``; in a remainder, only the ones that it serves soon."""
        workers = self.layout.workers_per_rank
        if self.remainder is None:
            return self.layout.served_shards(self.rank, u % workers)
        upcoming_batches = range(u, min(u + _LOOKAHEAD_BATCHES * workers, self.remainder.num_micro_batches), workers)
        shards = np.arange(len(self.remainder.samples_left))
        shards_by_batch = [shards[self.remainder.batch_shards(self.rank, n).rows] for n in upcoming_batches]
        return np.unique(np.concatenate(shards_by_batch))

    def step_start(self, u: int) -> int:
        """Return the first micro batch, within this segment, of the step that contains micro batch ``u``."""
        return max(self.first_batch, u - u % self.layout.gradient_accumulation_steps)

    def first_unsaved_batch(self, u: int) -> int:
        """Return the first micro batch that a state does not include if it is saved before micro batch ``u``."""
        return self.step_start(u) if self.saves_whole_steps else u

    @property
    def is_last(self) -> bool:
        """True if the epoch ends with this segment: it is a remainder, and no other round follows."""
        is_sized = self.samples_left is not None
        return self.remainder is not None and (is_sized or self.remainder.num_samples < self.layout.global_batch_size)

    def samples_delivered(self, u: int) -> Ints:
        """Return the samples that each shard delivers in this segment before micro batch ``u``, on all ranks: ``int64[N]``."""
        if self.remainder is not None:
            return self.remainder.samples_delivered(u)
        return self.layout.samples_delivered(self.samples, self.first_batch, u)

    def samples_before(self, u: int) -> Ints:
        """Return the samples that each shard has delivered in the run before micro batch ``u``: ``int64[N]``."""
        return self.samples + self.samples_delivered(u)

    def micro_batches_left_at(self, u: int) -> int | None:
        """Return the number of micro batches from ``u`` to the end of the epoch; `None` if it is not known, or endless."""
        if self.stop is None or self.samples_left is None:
            return None
        if self.remainder is not None:
            return self.stop - u
        main = self.samples_delivered(self.stop)
        return (
            self.stop - u + Remainder(self.layout, self.samples_left - main, self.samples, self.pads).num_micro_batches
        )


@dataclass(frozen=True, eq=False)
class LookAhead(EpochSegment):
    """Work for worker processes in place of a segment: they draw samples ahead, to find where epochs of logical shards end.

    What a feed makes in place of micro batch u: `ShardRunner.look_ahead` of the shard with that number, and its table row.

    Args:
        shards: The logical shards to look ahead in.
        num_samples: The number of samples to draw from each.
    """

    shards: Sequence[int] = ()
    num_samples: int = 0

    def batch_shards_function(self, table: Ints) -> Callable[[int], Any]:
        return self.shards.__getitem__

    def served_shards(self, u: int) -> Ints:
        return np.array(self.shards[u :: self.layout.workers_per_rank])
