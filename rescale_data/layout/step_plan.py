"""Plans a balanced step: assigns each sample to a rank and a micro batch, so that ranks finish together.

The samples of a step are a set: whichever rank computes one of them, the gradient is the same. All of it is integers, and ties
go by the number of a sample, so each rank finds the same plan by itself. A *bin* is one micro batch of one rank. Bins that are
computed at the same time form a *cost tier*, and the bins of the first tier cost the most:

    rank 0   #########  ####  ###        a step takes the sum over tiers of the largest bin: short samples (=) fill up the
    rank 1   ######===  ###=  ===        bins beside an expensive one (#), so that the bins of other tiers are small
    rank 2   ####=====  ##==  ===

Source: the largest first, each to the bin with the least (Graham, "Bounds on multiprocessing timing anomalies", 1969).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from rescale_data.order import permutation
from rescale_data.state import Ints

_COST_PRECISION = 256
"""The precision of the cost limit of padded bins: one part in this number."""
SyncInterval: TypeAlias = Literal["micro", "step"]


@dataclass(frozen=True, eq=False, kw_only=True)
class StepPlan:
    """Assigns the samples of one step to micro batches of ranks by cost; each micro batch gets at least one sample.

    Args:
        costs: ``int64[samples]``, by the number of the sample; 0 or more, and their sum times ``samples`` below 2**62.
        tokens: ``int64[samples]``, 1 or more.
        owner_ranks: ``int64[samples]``, the rank that has read each sample.
        num_ranks: The number of ranks that plan together.
        num_batches: The number of micro batches of each rank; ``num_ranks * num_batches`` is at most ``samples``.
        max_tokens: The most tokens of a micro batch with several samples; it is raised if the samples of the step do not fit.
        sync_interval: "micro" where ranks wait for each other in every micro batch; "step" where they wait once a step: then
            the sums of ranks are alike, and the first and the last micro batches of a rank are its least.
        pads_bins: A micro batch costs its number of samples times the largest cost, and has so many times the most tokens.
        seed, step: The key of the random order of tiers, the same for all groups of ranks.
    """

    costs: Ints
    tokens: Ints
    owner_ranks: Ints
    num_ranks: int
    num_batches: int
    max_tokens: int
    sync_interval: SyncInterval = "micro"
    pads_bins: bool = False
    seed: int = 0
    step: int = 0

    def assign_samples(self) -> tuple[Ints, Ints]:
        """Return the rank and the micro batch that compute each sample: two arrays ``int64[samples]``."""
        item_bins = self._assign_padded_bins() if self.pads_bins else self._assign_bins()
        bin_costs = _bin_costs(self.costs, item_bins, self.num_bins, pads_bins=self.pads_bins)
        if self.sync_interval == "step":
            group_of_bin = np.arange(self.num_bins) // self.num_batches  # bins of one rank
            if self.pads_bins:
                ones, zeros = np.ones(self.num_bins, dtype=np.int64), np.zeros(self.num_ranks, dtype=np.int64)
                group_of_bin = fill_bins(bin_costs, ones, zeros, self.num_batches)
            rank = self._assign_ranks(group_of_bin[item_bins], np.zeros(self.num_ranks, dtype=np.int64))
            return rank, _costliest_bins_in_middle(bin_costs, group_of_bin, self.num_batches)[item_bins]
        cost_tier_of_bin = np.empty(self.num_bins, dtype=np.int64)
        cost_tier_of_bin[np.argsort(-bin_costs, kind="stable")] = np.arange(self.num_bins) // self.num_ranks
        batch_of_cost_tier = permutation(self.num_batches, "balance", self.seed, self.step)
        return self._assign_ranks(item_bins, cost_tier_of_bin), batch_of_cost_tier[cost_tier_of_bin][item_bins]

    def num_tokens(self, rank: Ints, micro_batch: Ints) -> Ints:
        """Return the number of tokens in each micro batch of each rank: ``int64[ranks * micro_batches]``."""
        return _bin_costs(self.tokens, rank * self.num_batches + micro_batch, self.num_bins, pads_bins=self.pads_bins)

    @property
    def num_bins(self) -> int:
        return self.num_ranks * self.num_batches

    def _assign_bins(self) -> Ints:
        """Return the bin (a micro batch of a rank) of each sample, if a bin costs the sum of its samples."""
        token_limit = max(self.max_tokens, -(-int(self.tokens.sum()) // self.num_bins))
        if self.sync_interval == "step":
            zeros, rank_token_limit = np.zeros(self.num_ranks, dtype=np.int64), token_limit * self.num_batches
            rank = _fill_raising_limit(self.costs, self.tokens, zeros, rank_token_limit, min_items=self.num_batches)
            return rank * self.num_batches + _fill_each_rank(
                self.costs, self.tokens, rank, self.num_batches, token_limit
            )
        first_cost, other_cost = self._target_costs(self.costs)
        initial_costs = np.full(self.num_bins, first_cost - other_cost, dtype=np.int64)
        initial_costs[: self.num_ranks] = 0
        return _fill_raising_limit(self.costs, self.tokens, initial_costs, token_limit)

    def _assign_padded_bins(self) -> Ints:
        """Return the bin (a micro batch of a rank) of each sample, if samples of a bin are padded to its largest.

        Samples of similar cost share a bin; their number is such that the bins of a tier cost the same when padded.

        Source: the length-grouped sampler of transformers finds a limit of the cost by bisection, too.
        """
        cost_order = np.lexsort((-self.tokens, -self.costs))
        costs, tokens = np.maximum(self.costs[cost_order], 1), self.tokens[cost_order]
        first_cost, low = self._target_costs(costs)
        num_first = self.num_ranks if self.sync_interval == "micro" else 0

        def cut_bins(cost_limit: int) -> list[int] | None:
            """Return the first sample of each bin, and the end, if bins of this cost hold all samples; else `None`."""
            other_ends = _bin_ends(costs, tokens, cost_limit, token_limit)
            first_ends = _bin_ends(costs, tokens, max(cost_limit, first_cost), token_limit)
            bin_starts, bin_end, max_bin_end = [0], 0, len(costs) - self.num_bins
            for bin_number in range(self.num_bins):
                bin_end, max_bin_end = (first_ends if bin_number < num_first else other_ends)[bin_end], max_bin_end + 1
                bin_end = min(bin_end, max_bin_end)  # one is left for each other bin
                bin_starts.append(bin_end)
            return bin_starts if bin_end == len(costs) else None

        token_limit, high = max(self.max_tokens, int(tokens.max())), int(costs[0]) * len(costs)
        while (bin_starts := cut_bins(high)) is None:
            token_limit += token_limit // 16 + 1
        while (new_starts := cut_bins(2 * low)) is None:
            low *= 2
        bin_starts, high = new_starts, 2 * low
        while high - low > 1 + low // _COST_PRECISION:
            middle = (low + high) // 2
            new_starts = cut_bins(middle)
            low, high, bin_starts = (middle, high, bin_starts) if new_starts is None else (low, middle, new_starts)
        item_bins = np.empty(len(costs), dtype=np.int64)
        item_bins[cost_order] = np.repeat(np.arange(self.num_bins), np.diff(bin_starts))
        return item_bins

    def _target_costs(self, costs: Ints) -> tuple[int, int]:
        """Return the target costs of each rank's first bin, which holds the costliest samples, and of all other bins."""
        total_cost = int(costs.sum())
        mean_cost = -(-total_cost // self.num_bins)
        if self.sync_interval == "step":  # tiers do not matter
            return mean_cost, max(1, mean_cost)
        first_cost = max(int(costs.max()), mean_cost)
        return first_cost, max(1, (total_cost - first_cost * self.num_ranks) // max(self.num_bins - self.num_ranks, 1))

    def _assign_ranks(self, group_of_sample: Ints, cost_tier_of_group: Ints) -> Ints:
        """Return the rank of each sample, chosen so that few tokens have to move from the ranks that own them.

        Samples of one group have one rank, and groups of one tier have different ranks.

        The group and the rank that have the most tokens in common come together first.

        Args:
            group_of_sample: ``int64[samples]``.
            cost_tier_of_group: ``int64[groups]``; each has as many groups as there are ranks.
        """
        owner_pairs, pair_index = np.unique(group_of_sample * self.num_ranks + self.owner_ranks, return_inverse=True)
        pair_tokens = np.zeros(len(owner_pairs), dtype=np.int64)
        np.add.at(pair_tokens, pair_index, self.tokens)
        groups, candidate_ranks = np.divmod(owner_pairs[np.argsort(-pair_tokens, kind="stable")], self.num_ranks)
        rank = np.full(len(cost_tier_of_group), -1, dtype=np.int64)
        is_rank_free = np.ones((len(cost_tier_of_group) // self.num_ranks, self.num_ranks), dtype=np.bool_)
        while len(groups):
            is_chosen = _is_first(groups) & _is_first(cost_tier_of_group[groups] * self.num_ranks + candidate_ranks)
            rank[groups[is_chosen]] = candidate_ranks[is_chosen]
            is_rank_free[cost_tier_of_group[groups[is_chosen]], candidate_ranks[is_chosen]] = False
            is_possible = (rank[groups] < 0) & is_rank_free[cost_tier_of_group[groups], candidate_ranks]
            groups, candidate_ranks = groups[is_possible], candidate_ranks[is_possible]
        unassigned = np.flatnonzero(rank < 0)
        rank[unassigned[np.argsort(cost_tier_of_group[unassigned], kind="stable")]] = np.nonzero(is_rank_free)[1]
        return rank[group_of_sample]


def fill_bins(costs: Ints, item_sizes: Ints, bin_costs: Ints, size_limit: int, *, min_items: int = 1) -> Ints:
    """Assign items to bins, the costliest item first, to the cheapest bin; return the bin of each item, -1 if none has room.

    The bins with the least take an item each at a time, as many of them as would have taken one each in turn: so thousands of
    samples take a millisecond or two, without a loop over them.

    Args:
        costs: ``int64[items]``.
        item_sizes: ``int64[items]``.
        bin_costs: ``int64[bins]``, what each bin costs before.
        size_limit: The sizes in a bin with more than ``min_items`` items.
        min_items: Items of each bin at least; there are so many.
    """
    bin_costs, used_sizes, item_counts = bin_costs.copy(), np.zeros_like(bin_costs), np.zeros_like(bin_costs)
    item_bins, unassigned = np.full(len(costs), -1, dtype=np.int64), np.argsort(-costs, kind="stable")
    while len(unassigned):
        needs_item = item_counts < min_items
        num_spare = len(unassigned) - int(np.maximum(min_items - item_counts, 0).sum())  # for bins that lack none
        has_room = needs_item | (used_sizes <= size_limit - item_sizes[unassigned[0]]) if num_spare else needs_item
        open_bins = np.flatnonzero(has_room)
        if not len(open_bins):
            break
        bins = open_bins[np.argsort(bin_costs[open_bins], kind="stable")][: len(unassigned)]
        items = unassigned[: len(bins)]
        lowest_cost = np.minimum.accumulate(bin_costs[bins] + costs[items])  # of the bins that have just taken one
        can_take_next = (bin_costs[bins[1:]] <= lowest_cost[:-1]) & (np.cumsum(~needs_item[bins])[1:] <= num_spare)
        num_assigned = 1 + int(np.argmin(np.append(can_take_next, False)))
        items, bins, unassigned = items[:num_assigned], bins[:num_assigned], unassigned[num_assigned:]
        fits = needs_item[bins] | (used_sizes[bins] <= size_limit - item_sizes[items])
        unassigned, items, bins = np.concatenate([items[~fits], unassigned]), items[fits], bins[fits]
        item_bins[items] = bins
        bin_costs[bins] += costs[items]
        used_sizes[bins] += item_sizes[items]
        item_counts[bins] += 1
    return item_bins


def _fill_raising_limit(costs: Ints, item_sizes: Ints, bin_costs: Ints, size_limit: int, *, min_items: int = 1) -> Ints:
    """Return the bin of each item as `fill_bins` does, with the size limit raised until all items have a bin."""
    while (item_bins := fill_bins(costs, item_sizes, bin_costs, size_limit, min_items=min_items)).min() < 0:
        size_limit += size_limit // 16 + 1
    return item_bins


def _fill_each_rank(costs: Ints, item_sizes: Ints, rank_of_item: Ints, bins_per_rank: int, size_limit: int) -> Ints:
    """Return the bin of each item within its rank, as `fill_bins` does, for all ranks at once; without room, the least used."""
    item_order, counts = np.lexsort((-costs, rank_of_item)), np.bincount(rank_of_item)
    first_items, max_items = np.cumsum(counts) - counts, int(counts.max())
    bin_costs, used_sizes = np.zeros((2, len(counts), bins_per_rank), dtype=np.int64)
    item_bins = np.empty(len(costs), dtype=np.int64)
    for index in range(max_items):
        ranks = np.flatnonzero(counts > index)
        items = item_order[first_items[ranks] + index]
        is_empty = used_sizes[ranks] == 0
        must_fill_empty = is_empty.sum(axis=1) >= counts[ranks] - index  # each item that is left goes to an empty bin
        fits = is_empty | (used_sizes[ranks] <= (size_limit - item_sizes[items])[:, None])
        fits = np.where(must_fill_empty[:, None], is_empty, fits)
        no_room_cost = bin_costs.max() + 1 + used_sizes[ranks]
        bin_index = np.argmin(np.where(fits, bin_costs[ranks], no_room_cost), axis=1)
        item_bins[items] = bin_index
        bin_costs[ranks, bin_index] += costs[items]
        used_sizes[ranks, bin_index] += item_sizes[items]
    return item_bins


def _bin_ends(costs: Ints, tokens: Ints, max_cost: int, max_tokens: int) -> list[int]:
    """Return for each sample the index after the last sample of the largest bin, within both limits, that begins with it."""
    bin_sizes = np.minimum(max_cost // costs, max_tokens // tokens)
    return (np.arange(len(costs)) + np.maximum(bin_sizes, 1)).tolist()


def _bin_costs(costs: Ints, item_bins: Ints, num_bins: int, *, pads_bins: bool) -> Ints:
    """Return the cost of each bin, ``int64[num_bins]``; if padded, its number of samples times their largest cost."""
    bin_totals = np.zeros(num_bins, dtype=np.int64)
    if not pads_bins:
        np.add.at(bin_totals, item_bins, costs)
        return bin_totals
    np.maximum.at(bin_totals, item_bins, costs)
    return bin_totals * np.bincount(item_bins, minlength=num_bins)


def _costliest_bins_in_middle(bin_costs: Ints, group_of_bin: Ints, num_micro_batches: int) -> Ints:
    """Return the micro batch of each bin in its group: the cheapest bins come first and last, the costliest in the middle."""
    ascending_bins = np.lexsort((bin_costs, group_of_bin)).reshape(-1, num_micro_batches)
    up_down_order = np.concatenate([np.arange(0, num_micro_batches, 2), np.arange(1, num_micro_batches, 2)[::-1]])
    micro_batch = np.empty(len(bin_costs), dtype=np.int64)
    micro_batch[ascending_bins[:, up_down_order]] = np.arange(num_micro_batches)
    return micro_batch


def _is_first(values: Ints) -> npt.NDArray[np.bool_]:
    """Return a mask of the values that occur for the first time: ``bool[values]``."""
    is_first = np.zeros(len(values), dtype=np.bool_)
    is_first[np.unique(values, return_index=True)[1]] = True
    return is_first
