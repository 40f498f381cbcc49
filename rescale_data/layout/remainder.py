"""Redistributes the remainder of an epoch over all ranks, until less than one global batch is left.

The shard with the most samples left serves first, the lowest index first among equals. That order needs the counts
alone, so every rank computes the same plan. In each step of it the O samples are sorted by shard and become the rows
of the global batch; of a shard with several rows in one step, the rows are filled in the order of time (micro
batch, then rank), so that at any micro batch what a shard has delivered is a prefix of what it has.

Source: docs/design.md, 6.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from rescale_data.layout.balance import water_fill
from rescale_data.layout.batch_shards import BatchShards
from rescale_data.layout.layout import Layout
from rescale_data.state import Ints

_StepSamples: TypeAlias = tuple[Ints, Ints, npt.NDArray[np.bool_]]  # shard, sample number, whether it is real; O each


@dataclass(frozen=True, eq=False)
class Remainder:
    """The last steps of an epoch, in which the samples left in the logical shards are redistributed over all ranks.

    Args:
        layout: The topology that serves these samples.
        samples_left: ``int64[N]``, the samples that each shard had left when the remainder began.
        samples_at_start: ``int64[N]``, the samples that each shard had delivered then.
        pads_last_batch: Whether the rest that is less than a global batch is filled up with first samples of its shards, or
            dropped.
    """

    layout: Layout
    samples_left: Ints
    samples_at_start: Ints
    pads_last_batch: bool
    _recent_steps: dict[int, _StepSamples] = field(default_factory=dict, repr=False)

    @property
    def num_samples(self) -> int:
        return int(self.samples_left.sum())

    @property
    def num_steps(self) -> int:
        o = self.layout.global_batch_size
        return -(-self.num_samples // o) if self.pads_last_batch else self.num_samples // o

    @property
    def num_micro_batches(self) -> int:
        return self.num_steps * self.layout.gradient_accumulation_steps

    @property
    def num_padding_samples(self) -> int:
        return -self.num_samples % self.layout.global_batch_size if self.pads_last_batch else 0

    def samples_delivered(self, u: int) -> Ints:
        """Return the samples that each shard delivers in the first ``u`` micro batches of the remainder: ``int64[N]``."""
        t, m = divmod(u, self.layout.gradient_accumulation_steps)
        served_by_shard = self._num_served(t * self.layout.global_batch_size)
        if m:
            shards, _, is_real = self._step_samples(t)
            is_served = is_real & (self._micro_batch_of_row < m)
            served_by_shard = served_by_shard + np.bincount(shards[is_served], minlength=len(self.samples_left))
        return served_by_shard

    def owner_ranks_after(self, owner_ranks: Ints, u: int) -> Ints:
        """Return the rank that has the up-to-date row of each shard after micro batch ``u`` of the remainder: ``int64[N]``.

        Args:
            owner_ranks: The same before it.
        """
        t, m = divmod(u, self.layout.gradient_accumulation_steps)
        shards, _, is_real = self._step_samples(t)
        batch_rows = np.flatnonzero(is_real & (self._micro_batch_of_row == m))
        new_owner_ranks = owner_ranks.copy()  # of a shard that several ranks serve, the highest has its last sample
        new_owner_ranks[shards[batch_rows]] = batch_rows // (self.layout.global_batch_size // self.layout.dp_world_size)
        return new_owner_ranks

    def batch_shards(self, rank: int, u: int) -> BatchShards:
        """Return the shard and the number of each sample that ``rank`` delivers in micro batch ``u`` of the remainder."""
        layout = self.layout
        t, m = divmod(u, layout.gradient_accumulation_steps)
        first_row = rank * (layout.global_batch_size // layout.dp_world_size) + m * layout.micro_batch_size
        rank_rows = slice(first_row, first_row + layout.micro_batch_size)
        shards, sample_numbers, is_real = self._step_samples(t)
        shards, sample_numbers, is_real = shards[rank_rows], sample_numbers[rank_rows], is_real[rank_rows]
        shard_index, samples_per_shard = np.unique(shards[is_real], return_counts=True)
        return BatchShards(shards.tolist(), shard_index, samples_per_shard, sample_numbers.tolist(), int(is_real.sum()))

    def _num_served(self, num_samples: int) -> Ints:
        """Return how many of the first ``num_samples`` samples of the remainder each shard serves: ``int64[N]``."""
        samples_to_serve = min(num_samples, self.num_samples)  # padding is not served from what is left
        # The most left first: the fewest first of the negative numbers
        return water_fill(-self.samples_left, np.array([samples_to_serve]), np.array([0, len(self.samples_left)]))

    @cached_property
    def _micro_batch_of_row(self) -> Ints:
        layout = self.layout
        row_in_rank = np.arange(layout.global_batch_size) % (layout.global_batch_size // layout.dp_world_size)
        return row_in_rank // layout.micro_batch_size

    def _step_samples(self, t: int) -> _StepSamples:
        """Return the shard and the number of each sample in step ``t`` of the remainder, and a mask of real samples."""
        if t not in self._recent_steps:
            self._recent_steps.clear()
            self._recent_steps[t] = self._compute_step_samples(t)
        return self._recent_steps[t]

    def _compute_step_samples(self, t: int) -> _StepSamples:
        o = self.layout.global_batch_size
        served_before, served_after = self._num_served(t * o), self._num_served((t + 1) * o)
        served_shards = np.repeat(np.arange(len(self.samples_left)), served_after - served_before)
        time_order = np.lexsort((self._micro_batch_of_row[: len(served_shards)], served_shards))
        sample_numbers = np.empty(len(served_shards), dtype=np.int64)
        sample_numbers[time_order] = np.arange(len(served_shards)) - np.searchsorted(served_shards, served_shards)
        sample_numbers += (self.samples_at_start + served_before)[served_shards]
        sample_indices = np.arange(o) % len(served_shards)
        is_real = np.arange(o) < len(served_shards)
        return served_shards[sample_indices], np.where(is_real, sample_numbers[sample_indices], 0), is_real
