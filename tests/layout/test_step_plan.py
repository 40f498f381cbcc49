"""Plans of a step: properties of any plan, and what they reach, against a search and the rule of transformers' sampler."""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rescale_data.layout.step_plan import StepPlan
from rescale_data.state import Ints


def step_plan(costs: Any, ranks: int, micro_batches: int, max_tokens: int, **given: Any) -> StepPlan:
    """Return a plan in which samples have as many tokens as they cost, and ranks as many samples."""
    costs = np.array(costs, dtype=np.int64)
    owners = np.arange(len(costs)) * ranks // len(costs)
    sizes = {"num_ranks": ranks, "num_batches": micro_batches, "max_tokens": max_tokens}
    return StepPlan(**{"costs": costs, "tokens": costs, "owner_ranks": owners, **sizes, **given})


@st.composite
def plans(draw: st.DrawFn, **fixed: Any) -> StepPlan:
    """Plans of any sizes; each rank has `b` samples for each of its micro batches."""
    ranks, micro_batches, b = draw(st.integers(1, 6)), draw(st.integers(1, 5)), draw(st.integers(1, 4))
    size = ranks * micro_batches * b
    costs = draw(st.lists(st.integers(0, 60), min_size=size, max_size=size))
    given: dict[str, Any] = {
        "tokens": np.array(draw(st.lists(st.integers(1, 20), min_size=size, max_size=size))),
        "sync_interval": draw(st.sampled_from(["micro", "step"])),
        "pads_bins": draw(st.booleans()),
        "seed": draw(st.integers(0, 3)),
        "step": draw(st.integers(0, 3)),
    }
    return step_plan(costs, ranks, micro_batches, draw(st.integers(1, 60)), **{**given, **fixed})


def loads_of(plan: StepPlan, values: Ints) -> Ints:
    """Return the cost, or the tokens, of each micro batch of each rank: ``int64[ranks, micro_batches]``."""
    rank, micro_batch = plan.assign_samples()
    loads, most, num = np.zeros((3, plan.num_ranks, plan.num_batches), dtype=np.int64)
    np.add.at(loads, (rank, micro_batch), values)
    np.maximum.at(most, (rank, micro_batch), values)
    np.add.at(num, (rank, micro_batch), 1)
    return most * num if plan.pads_bins else loads


@given(plans())
def test_each_micro_batch_of_each_rank_has_a_sample(plan: StepPlan) -> None:
    rank, micro_batch = plan.assign_samples()
    assert len(rank) == len(micro_batch) == len(plan.costs)
    bins = set(zip(rank.tolist(), micro_batch.tolist(), strict=True))
    assert bins == set(itertools.product(range(plan.num_ranks), range(plan.num_batches)))


@given(plans(), st.integers(1, 9))
def test_packed_samples_leave_b_as_it_is(plan: StepPlan, tokens: int) -> None:
    b = len(plan.costs) // plan.num_bins
    packed = replace(plan, tokens=np.full(len(plan.costs), tokens), max_tokens=b * tokens)
    rank, micro_batch = packed.assign_samples()
    assert (np.bincount(rank * plan.num_batches + micro_batch) == b).all()


@given(plans(pads_bins=False, sync_interval="micro"))
def test_tokens_stay_below_a_limit_of_an_even_share_and_the_largest_sample(plan: StepPlan) -> None:
    """Some micro batch then always has room."""
    limit = -(-int(plan.tokens.sum()) // plan.num_bins) + int(plan.tokens.max())
    assert loads_of(replace(plan, max_tokens=limit), plan.tokens).max() <= limit


@given(plans(sync_interval="micro", pads_bins=False), st.integers(0, 3), st.integers(0, 3))
def test_levels_are_permuted_alike_in_all_groups(plan: StepPlan, seed: int, step: int) -> None:
    """Two groups with the same seed and step have their most expensive micro batches at the same time."""
    costs = np.arange(len(plan.costs)) // plan.num_ranks
    same = {"costs": costs, "tokens": np.ones_like(costs), "max_tokens": len(costs) // plan.num_bins}
    groups = [
        replace(plan, owner_ranks=owners, seed=seed, step=step, **same)
        for owners in (plan.owner_ranks, plan.owner_ranks[::-1])
    ]
    one, other = (loads_of(group, costs).max(axis=0).tolist() for group in groups)
    assert one == other


def test_no_micro_batch_is_always_the_most_expensive() -> None:
    steps = [step_plan([9, 1, 1, 1], 1, 4, 9, step=step).assign_samples()[1] for step in range(40)]
    assert {int(micro_batch[0]) for micro_batch in steps} == {0, 1, 2, 3}


def test_the_least_of_a_rank_are_first_and_last_where_ranks_wait_once_a_step() -> None:
    plan = step_plan([5, 4, 3, 2, 1], 1, 5, 5, sync_interval="step")
    assert plan.costs[np.argsort(plan.assign_samples()[1])].tolist() == [1, 3, 5, 4, 2]


@pytest.mark.parametrize("sync", ["micro", "step"])
def test_samples_stay_with_their_owner_where_the_costs_allow_it(sync: str) -> None:
    """Every rank has one sample of each cost, in another order: nothing has to move."""
    plan = step_plan([1, 2, 3, 2, 3, 1, 3, 1, 2], 3, 3, 1, tokens=np.ones(9, np.int64), sync_interval=sync)
    rank, _ = plan.assign_samples()
    assert sync == "step" or (rank == plan.owner_ranks).all()
    assert np.bincount(rank, plan.costs).tolist() == [6, 6, 6]


def lengths(sigma: float, longest: int, size: int, seed: int) -> Ints:
    drawn = np.random.default_rng(seed).lognormal(6.5, sigma, size)
    return np.clip(drawn, 16, longest).astype(np.int64)


SIZES = [(8, 8, 512), (64, 4, 1024)]
"""Ranks, micro batch size, and samples of a step."""


@pytest.mark.parametrize(
    ("sigma", "longest", "crossover"), [(0.8, 8192, 10_000), (0.8, 8192, 57_000), (1.2, 32_768, 57_000)]
)
@pytest.mark.parametrize(("ranks", "b", "size"), SIZES)
@pytest.mark.parametrize("sync", ["micro", "step"])
def test_a_step_takes_what_its_largest_sample_or_an_even_share_does(
    sigma: float, longest: int, crossover: int, ranks: int, b: int, size: int, sync: str
) -> None:
    """Within 3 % of the least that any plan can take."""
    tokens = lengths(sigma, longest, size, 1)
    costs = tokens + tokens * tokens // crossover
    loads = loads_of(step_plan(costs, ranks, size // ranks // b, b * longest, tokens=tokens, sync_interval=sync), costs)
    reached = loads.max(axis=0).sum() if sync == "micro" else loads.sum(axis=1).max()
    assert reached <= 1.03 * max(costs.max(), costs.sum() / ranks)


def length_grouped(costs: Ints, groups: int) -> float:
    """Return the padded cost of a group by the rule of transformers: neighbours by length, the limit found by bisection."""
    ordered = np.sort(costs)[::-1].tolist()

    def starts(limit: float) -> list[int]:
        found = [0]
        for i in range(1, len(ordered)):
            if (i - found[-1] + 1) * ordered[found[-1]] > limit:
                found.append(i)
        return found

    low, high = 0.0, float(ordered[0] * len(ordered))
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if len(starts(middle)) <= groups else (middle, high)
    return max((b - a) * ordered[a] for a, b in itertools.pairwise([*starts(high), len(ordered)]))


@pytest.mark.parametrize(("sigma", "longest"), [(0.8, 8192), (1.2, 32_768)])
@pytest.mark.parametrize(("ranks", "b", "size"), SIZES)
def test_padded_plans_are_as_good_as_transformers_sampler(
    sigma: float, longest: int, ranks: int, b: int, size: int
) -> None:
    tokens = lengths(sigma, longest, size, 2)
    costs, micro_batches = tokens + tokens * tokens // 10_000, size // ranks // b
    plan = step_plan(costs, ranks, micro_batches, b * longest, tokens=tokens, pads_bins=True)
    limit = 1.05 * micro_batches * length_grouped(costs, ranks * micro_batches)
    assert loads_of(plan, costs).max(axis=0).sum() <= limit
