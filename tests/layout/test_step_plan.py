"""Plans of a step: properties of any plan, and what they reach, against a search and the rule of transformers' sampler."""

import heapq
import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rescale_data.layout.step_plan import StepPlan, fill_bins
from rescale_data.state import Ints

UNBOUND = 1 << 40


def ints(values: list[int]) -> Ints:
    return np.array(values, dtype=np.int64)


@st.composite
def plans(draw: st.DrawFn, **fixed: Any) -> StepPlan:
    """Plans of any sizes; each rank has `b` samples for each of its micro batches."""
    ranks, micro_batches, b = draw(st.integers(1, 6)), draw(st.integers(1, 5)), draw(st.integers(1, 4))
    size = ranks * micro_batches * b
    given: dict[str, Any] = {
        "costs": ints(draw(st.lists(st.integers(0, 60), min_size=size, max_size=size))),
        "tokens": ints(draw(st.lists(st.integers(1, 20), min_size=size, max_size=size))),
        "owners": np.repeat(np.arange(ranks), micro_batches * b),
        "max_tokens": draw(st.integers(1, 60)),
        "sync": draw(st.sampled_from(["micro", "step"])),
        "padded": draw(st.booleans()),
        "seed": draw(st.integers(0, 3)),
        "step": draw(st.integers(0, 3)),
    }
    return StepPlan(ranks=ranks, micro_batches=micro_batches, **{**given, **fixed})


def loads_of(plan: StepPlan, values: Ints) -> Ints:
    """Return the cost, or the tokens, of each micro batch of each rank: ``int64[ranks, micro_batches]``."""
    rank, micro_batch = plan.assign()
    loads, most, num = np.zeros((3, plan.ranks, plan.micro_batches), dtype=np.int64)
    np.add.at(loads, (rank, micro_batch), values)
    np.maximum.at(most, (rank, micro_batch), values)
    np.add.at(num, (rank, micro_batch), 1)
    return most * num if plan.padded else loads


@given(plans())
def test_each_micro_batch_of_each_rank_has_a_sample(plan: StepPlan) -> None:
    rank, micro_batch = plan.assign()
    assert len(rank) == len(micro_batch) == len(plan.costs)
    bins = set(zip(rank.tolist(), micro_batch.tolist(), strict=True))
    assert bins == set(itertools.product(range(plan.ranks), range(plan.micro_batches)))


@given(plans(), st.integers(1, 9))
def test_packed_samples_leave_b_as_it_is(plan: StepPlan, tokens: int) -> None:
    b = len(plan.costs) // plan.num_bins
    same = np.full(len(plan.costs), tokens, dtype=np.int64)
    packed = StepPlan(
        costs=plan.costs, tokens=same, owners=plan.owners, ranks=plan.ranks, micro_batches=plan.micro_batches,
        max_tokens=b * tokens, sync=plan.sync, padded=plan.padded,
    )  # fmt: skip
    rank, micro_batch = packed.assign()
    assert (np.bincount(rank * plan.micro_batches + micro_batch) == b).all()


@given(plans(padded=False, sync="micro"))
def test_tokens_stay_below_a_limit_of_an_even_share_and_the_largest_sample(plan: StepPlan) -> None:
    """Some micro batch then always has room."""
    limit = -(-int(plan.tokens.sum()) // plan.num_bins) + int(plan.tokens.max())
    bound = StepPlan(**{**vars(plan), "max_tokens": limit})
    assert loads_of(bound, bound.tokens).max() <= limit


@given(plans(sync="micro"), st.integers(0, 3), st.integers(0, 3))
def test_levels_are_permuted_alike_in_all_groups(plan: StepPlan, seed: int, step: int) -> None:
    """Two groups with the same seed and step have their most expensive micro batches at the same time."""
    costs = np.arange(len(plan.costs)) // plan.ranks
    groups = [
        StepPlan(**{**vars(plan), "costs": costs, "tokens": np.ones_like(costs), "max_tokens": len(costs) // plan.num_bins,
                    "owners": owners, "seed": seed, "step": step, "padded": False})
        for owners in (plan.owners, plan.owners[::-1])
    ]  # fmt: skip
    one, other = (loads_of(group, costs).max(axis=0).tolist() for group in groups)
    assert one == other


def test_no_micro_batch_is_always_the_most_expensive() -> None:
    costs = ints([9, 1, 1, 1])
    sizes: dict[str, Any] = {"costs": costs, "tokens": costs, "owners": 0 * costs, "max_tokens": 9}
    steps = [StepPlan(ranks=1, micro_batches=4, step=step, **sizes).assign()[1] for step in range(40)]
    where = {int(micro_batch[0]) for micro_batch in steps}
    assert where == {0, 1, 2, 3}


def test_the_least_of_a_rank_are_first_and_last_where_ranks_wait_once_a_step() -> None:
    costs = ints([5, 4, 3, 2, 1])
    plan = StepPlan(costs=costs, tokens=costs, owners=0 * costs, ranks=1, micro_batches=5, max_tokens=5, sync="step")
    assert costs[np.argsort(plan.assign()[1])].tolist() == [1, 3, 5, 4, 2]


def test_samples_stay_with_their_owner_where_the_costs_allow_it() -> None:
    """Every rank has one sample of each cost, dealt in another order: nothing has to move."""
    costs = ints([1, 2, 3, 2, 3, 1, 3, 1, 2])
    owners = np.repeat(np.arange(3), 3)
    for sync in ("micro", "step"):
        plan = StepPlan(
            costs=costs, tokens=ints([1] * 9), owners=owners, ranks=3, micro_batches=3, max_tokens=1, sync=sync
        )
        rank, _ = plan.assign()
        assert sync == "step" or (rank == owners).all()
        assert np.bincount(rank, costs).tolist() == [6, 6, 6]


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=80, unique=True), st.integers(1, 12))
def test_fill_is_the_search_for_the_least_before_each_item(costs: list[int], bins: int) -> None:
    """Where each bin has an item from the first turn on: bins are fewer than items."""
    bins = min(bins, len(costs))
    least, expected = [(0, bin_) for bin_ in range(bins)], {}
    for cost in sorted(costs, reverse=True):
        load, bin_ = heapq.heappop(least)
        expected.setdefault(bin_, []).append(cost)
        heapq.heappush(least, (load + cost, bin_))
    found = fill_bins(ints(costs), ints([1] * len(costs)), np.zeros(bins, dtype=np.int64), len(costs))
    loads = np.bincount(found, costs, bins).tolist()
    if len({sum(group) for group in expected.values()}) == bins:  # of equal loads either may have come first
        assert max(loads) <= max(map(sum, expected.values())) * 4 / 3 + 1
    assert min(found) >= 0


def lengths(sigma: float, longest: int, size: int, seed: int) -> Ints:
    drawn = np.random.default_rng(seed).lognormal(6.5, sigma, size)
    return np.clip(drawn, 16, longest).astype(np.int64)


@pytest.mark.parametrize(
    ("sigma", "longest", "crossover"), [(0.8, 8192, 10_000), (0.8, 8192, 57_000), (1.2, 32_768, 57_000)]
)
@pytest.mark.parametrize(("ranks", "b"), [(8, 8), (64, 4)])
@pytest.mark.parametrize("sync", ["micro", "step"])
def test_a_step_takes_what_its_largest_sample_or_an_even_share_does(
    sigma: float, longest: int, crossover: int, ranks: int, b: int, sync: str
) -> None:
    """Within 3 % of the least that any plan can take."""
    size = 1024 if ranks == 64 else 512
    tokens = lengths(sigma, longest, size, 1)
    costs = tokens + tokens * tokens // crossover
    plan = StepPlan(
        costs=costs, tokens=tokens, owners=np.arange(size) * ranks // size, ranks=ranks,
        micro_batches=size // ranks // b, max_tokens=b * longest, sync=sync,
    )  # fmt: skip
    loads = loads_of(plan, costs)
    reached = loads.max(axis=0).sum() if sync == "micro" else loads.sum(axis=1).max()
    assert reached <= 1.03 * max(costs.max(), costs.sum() / ranks)


def length_grouped(costs: Ints, groups: int) -> float:
    """Return the padded cost of a group by the rule of transformers: neighbours by length, the limit found by bisection."""
    ordered = np.sort(costs)[::-1].tolist()

    def count(limit: float) -> tuple[int, list[int]]:
        starts = [0]
        for i in range(1, len(ordered)):
            if (i - starts[-1] + 1) * ordered[starts[-1]] > limit:
                starts.append(i)
        return len(starts), starts

    low, high = 0.0, float(ordered[0] * len(ordered))
    for _ in range(50):
        low, high = (low, (low + high) / 2) if count((low + high) / 2)[0] <= groups else ((low + high) / 2, high)
    _, starts = count(high)
    return max((b - a) * ordered[a] for a, b in itertools.pairwise([*starts, len(ordered)]))


@pytest.mark.parametrize(("sigma", "longest"), [(0.8, 8192), (1.2, 32_768)])
@pytest.mark.parametrize(("ranks", "b"), [(8, 8), (64, 4)])
def test_padded_plans_are_as_good_as_transformers_sampler(sigma: float, longest: int, ranks: int, b: int) -> None:
    size = 1024 if ranks == 64 else 512
    tokens = lengths(sigma, longest, size, 2)
    costs, micro_batches = tokens + tokens * tokens // 10_000, size // ranks // b
    plan = StepPlan(
        costs=costs, tokens=tokens, owners=np.arange(size) * ranks // size, ranks=ranks, micro_batches=micro_batches,
        max_tokens=b * longest, padded=True,
    )  # fmt: skip
    assert loads_of(plan, costs).max(axis=0).sum() <= 1.05 * micro_batches * length_grouped(
        costs, ranks * micro_batches
    )
