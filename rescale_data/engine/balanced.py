"""`BalancedFeed`: a feed that redistributes the samples of a step over micro batches and ranks, so that ranks finish together.

    read ahead, one rank's own samples    InThread(InProcess), Workers
    costs, the plan, samples that move    Balanced: the ranks of a group together (`Exchanges`)
    collated, one step ahead              InThread

The rows of a step count as consumed with its last micro batch. So the table at the end of a step is the same as without
balance.
"""

from __future__ import annotations

import socket
from collections import deque
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from rescale_data.engine.balance import Balance
from rescale_data.engine.collate import collate as stack
from rescale_data.engine.collate import with_valid_mask
from rescale_data.engine.exchanges import COST, IS_REAL, SHARD, TOKENS, Exchanges
from rescale_data.engine.feed import BatchFeed, WrappedFeed
from rescale_data.engine.micro_batch import MicroBatch, TableUpdate, merge_rows
from rescale_data.engine.ranks.meeting import digest
from rescale_data.engine.ranks.ranks import Ranks
from rescale_data.engine.runner import NoSamplesLeft
from rescale_data.engine.segment import EpochSegment
from rescale_data.engine.setup import LoaderSetup
from rescale_data.layout.step_plan import StepPlan
from rescale_data.state import Ints

STEP_WEIGHT = "step_weight"


def leave_uncollated(samples: list[Any]) -> list[Any]:
    """Return the list of samples unchanged: a ``collate_fn`` that defers collation until the samples have been balanced."""
    return samples


@dataclass
class _Step:
    """The samples of one step that this rank has read, their costs, and the error if reading failed.

    A thread that is left behind sees this step alone, and no later one.

    Args:
        segment: The segment that the step belongs to.
        first_batch: The first micro batch of the step.
        stop_batch: The micro batch after its last one.
        micro_batches: The micro batches as the inner feed has made them.
        measures: ``int64[samples, 5]``: cost, tokens, weight and logical shard of each sample, and 1 if the sample is real.
        failure: The error because of which samples are missing; `None` if none are.
    """

    segment: EpochSegment
    first_batch: int
    stop_batch: int
    micro_batches: list[MicroBatch] = field(default_factory=list[MicroBatch])
    measures: Ints = field(default_factory=lambda: np.zeros((0, 5), dtype=np.int64))
    failure: Exception | None = None


_PlannedBatch: TypeAlias = tuple[list[Any], Ints, int]
"""The samples of a micro batch that this rank computes, their measures as in `_Step`, and the weight of the global batch."""


class BalancedFeed(WrappedFeed):
    """A feed that makes the micro batches of balanced steps, from samples that this rank and other ranks have read.

    Args:
        feed: Makes micro batches that are lists of samples (`leave_uncollated`).
    """

    def __init__(self, feed: BatchFeed, setup: LoaderSetup, balance: Balance) -> None:
        super().__init__(feed)
        self._setup, self._balance, self._collate = setup, balance, setup.options.collate_fn or stack
        self._sample_group = setup.ranks.subset(_sample_group_members(balance, setup.ranks))
        group_suffices = balance.weight is None or self._sample_group.world_size == setup.ranks.world_size
        self._weight_ranks = self._sample_group if group_suffices else setup.ranks.subset(range(setup.ranks.world_size))
        self._exchanges: Exchanges | None = None  # since the last `begin`
        self._u = self._batches_to_skip = 0
        self._segment: EpochSegment | None = None
        self._ready_batches: deque[MicroBatch] = deque()
        self._has_warned = False

    def begin(self, segment: EpochSegment, table: Ints, first_batch: int) -> None:
        samples_per_rank_step = segment.layout.micro_batch_size * segment.layout.gradient_accumulation_steps
        groups = self._setup.ranks, self._sample_group, self._weight_ranks
        self._exchanges = Exchanges(*groups, samples_per_rank_step, self._exchanges)
        self._segment, self._u, self._ready_batches = segment, segment.step_start(first_batch), deque()
        self._batches_to_skip = first_batch - self._u  # micro batches of the step that were consumed before
        self.feed.begin(segment, table, self._u)

    def next(self) -> MicroBatch:
        if self._segment is None or self._exchanges is None:
            raise NoSamplesLeft
        while not self._ready_batches:
            try:
                self._ready_batches.extend(self._make_step(self._segment, self._exchanges))
            except BaseException:
                self._segment = None
                raise
            for _ in range(self._batches_to_skip):
                self._ready_batches.popleft()
            self._batches_to_skip = 0
        return self._ready_batches.popleft()

    def activity(self) -> str:
        return self.feed.activity() or "waiting for the samples of other ranks"

    def stop(self, *, wait: bool = True) -> None:
        if self._exchanges is not None:
            self._exchanges.stop()
        super().stop(wait=wait)

    def close(self) -> None:
        super().close()
        if self._exchanges is not None:
            self._exchanges.close()
            self._exchanges = None

    def _make_step(self, segment: EpochSegment, exchanges: Exchanges) -> list[MicroBatch]:
        batches_per_step = segment.layout.gradient_accumulation_steps
        step = _Step(segment, self._u, self._u + batches_per_step - self._u % batches_per_step)
        self._read_samples(step, exchanges)
        planned_batches = exchanges.run_exchange(lambda: self._exchange_samples(step, exchanges))
        self._u = step.stop_batch
        batches = [self._collate_batch(*planned, segment) for planned in planned_batches]
        batches[-1] = batches[-1]._replace(rows=merge_rows([batch.rows for batch in step.micro_batches]))
        return batches

    def _read_samples(self, step: _Step, exchanges: Exchanges) -> None:
        """Read this rank's samples of a step and measure their costs; an error is stored in ``step.failure``, not raised."""
        try:
            for _ in range(step.first_batch, step.stop_batch):
                if exchanges.is_stopped:
                    raise NoSamplesLeft
                step.micro_batches.append(self.feed.next())
            measure_rows = [
                (*self._balance.measure(sample), shard, sample_index < batch.num_real)
                for batch in step.micro_batches
                for sample_index, (sample, shard) in enumerate(zip(batch.batch, batch.shards, strict=True))
            ]
            step.measures = np.array(measure_rows, dtype=np.int64)
        except Exception as error:
            step.failure = error

    def _exchange_samples(self, step: _Step, exchanges: Exchanges) -> list[_PlannedBatch]:
        """Exchange costs and samples between ranks; return the samples of a step that this rank computes (collective)."""
        samples_before = int(step.segment.samples_before(step.first_batch).sum())
        is_last = step.stop_batch == step.segment.stop
        sample_measures, weight = exchanges.agree(step.failure, samples_before, step.measures, is_last=is_last)
        owner_ranks = np.repeat(np.arange(self._sample_group.world_size), len(step.measures))
        target_ranks, micro_batch = self._plan_step(step, sample_measures, owner_ranks)
        samples = self._move_samples(step, exchanges, owner_ranks, target_ranks)
        is_mine, batches = target_ranks == self._sample_group.rank, range(step.stop_batch - step.first_batch)
        batch_indices = [np.flatnonzero(is_mine & (micro_batch == number)) for number in batches]
        return [([samples[n] for n in index.tolist()], sample_measures[index], weight) for index in batch_indices]

    def _plan_step(self, step: _Step, sample_measures: Ints, owner_ranks: Ints) -> tuple[Ints, Ints]:
        """Return the rank and the micro batch that compute each sample of the step: two arrays ``int64[samples]``."""
        balance, layout, tokens = self._balance, step.segment.layout, sample_measures[:, TOKENS]
        max_tokens = balance.max_tokens or layout.micro_batch_size * int(tokens.max())
        plan = StepPlan(
            costs=sample_measures[:, COST],
            tokens=tokens,
            owner_ranks=owner_ranks,
            num_ranks=self._sample_group.world_size,
            num_batches=step.stop_batch - step.first_batch,
            max_tokens=max_tokens,
            sync_interval=balance.sync,
            pads_bins=balance.padded,
            seed=self._setup.recipe.seed,
            step=step.first_batch // layout.gradient_accumulation_steps,
        )
        target_ranks, target_batches = plan.assign_samples()
        if balance.max_tokens is not None and not self._has_warned:
            self._warn_if_above(plan.num_tokens(target_ranks, target_batches), balance.max_tokens)
        return target_ranks, target_batches

    def _warn_if_above(self, tokens: Ints, max_tokens: int) -> None:
        if int(tokens.max()) > max_tokens:
            self._has_warned = True
            self._setup.ranks.warn(
                "rd.Balance(max_tokens=%d): a micro batch has %d tokens. A sample alone is longer, or a step has more tokens "
                "than its %d micro batches take. Raise it, shorten samples, or give more micro batches a step. Said once.",
                max_tokens,
                int(tokens.max()),
                tokens.size,
            )

    def _move_samples(self, step: _Step, exchanges: Exchanges, owner_ranks: Ints, target_ranks: Ints) -> dict[int, Any]:
        """Send samples to the ranks that compute them; return the samples read here and received, by index (collective)."""
        my_index, indices = self._sample_group.rank, np.arange(len(target_ranks))
        is_read_here, is_needed = owner_ranks == my_index, target_ranks == my_index
        own_samples = [sample for batch in step.micro_batches for sample in batch.batch]
        samples = dict(zip(indices[is_read_here].tolist(), own_samples, strict=True))
        sent_indices = _group_by_rank(target_ranks[is_read_here], indices[is_read_here], my_index)
        needed_indices = _group_by_rank(owner_ranks[is_needed], indices[is_needed], my_index)
        sent_samples = {rank: [samples[n] for n in rank_indices] for rank, rank_indices in sent_indices.items()}
        for rank, received in exchanges.exchange_lists(sent_samples, list(needed_indices)).items():
            samples.update(zip(needed_indices[rank], received, strict=True))
        return samples

    def _collate_batch(
        self, samples: list[Any], measures: Ints, total_weight: int, segment: EpochSegment
    ) -> MicroBatch:
        """Return the micro batch of some samples; padding samples of the last global batch come last."""
        batch, num_real = self._collate(samples), int(measures[:, IS_REAL].sum())
        if segment.pads:
            batch = with_valid_mask(batch, num_real, len(measures))
        if self._balance.weight is not None:
            batch = _with_weight(batch, total_weight)
        no_rows = np.zeros((0, 1), dtype=np.int64)  # the last micro batch of the step carries all its rows
        return MicroBatch(batch, TableUpdate(no_rows[:, 0], no_rows), measures[:, SHARD].tolist(), num_real)


def _group_by_rank(ranks: Ints, indices: Ints, own_rank: int) -> dict[int, list[int]]:
    """Group sample indices by the rank at the same place of ``ranks``, without this rank: ``{rank: indices}``."""
    return {rank: indices[ranks == rank].tolist() for rank in np.unique(ranks).tolist() if rank != own_rank}


def _sample_group_members(balance: Balance, ranks: Ranks) -> list[int]:
    """Return the dp ranks among which samples may move, this rank included, ascending (collective with ``over="host"``)."""
    if balance.over == "rank" or ranks.world_size == 1:
        return [ranks.rank]
    if balance.over == "all":
        return list(range(ranks.world_size))
    host_digests = ranks.gather_ints([digest(socket.gethostname())])[:, 0]
    return np.flatnonzero(host_digests == host_digests[ranks.rank]).tolist()


def _with_weight(batch: Any, weight: int) -> dict[str, Any]:
    if not isinstance(batch, dict):
        raise TypeError(
            f"rd.Balance(weight=) adds batch[{STEP_WEIGHT!r}], but collate_fn returns a {type(batch).__name__}."
        )
    if STEP_WEIGHT in batch:
        raise ValueError(
            f"rd.Balance(weight=) adds batch[{STEP_WEIGHT!r}], but samples have such a column: rename theirs."
        )
    return {**batch, STEP_WEIGHT: weight}
