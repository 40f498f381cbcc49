"""Every pipeline goes on from every position of its stream, and rescales."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import rescale_data as rd
from rescale_data.testing import assert_rescalable
from tests.nodes.resume import assert_ends, assert_resumes
from tests.nodes.zoo import ENDLESS, PIPELINES, WEB, is_kept

TOPOLOGIES = [(1, 12, 0), (1, 4, 0), (2, 6, 0), (2, 2, 0), (3, 4, 0), (4, 3, 0), (6, 1, 0)]


@pytest.fixture(params=PIPELINES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("repeat", [False, True])
def test_resumes_at_every_position(name: str, repeat: bool) -> None:
    shard = rd.Shard(1, 6, seed=5, repeat=repeat)
    assert_resumes(lambda: PIPELINES[name](shard), num_samples=40)


def test_ends_its_epochs(name: str) -> None:
    if name not in ENDLESS:
        assert_ends(lambda: PIPELINES[name](rd.Shard(0, 4)))


@given(
    st.sampled_from(sorted(PIPELINES)),
    st.lists(st.sampled_from(TOPOLOGIES), min_size=2, max_size=4),
    st.sampled_from([6, 8, 12]),
    st.integers(1, 3),
)
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
def test_any_chain_of_topologies(name: str, chain: list[tuple[int, int, int]], num_shards: int, steps: int) -> None:
    """Of N = 6, 8 and 12 shards and O = 12 samples some are aligned and some are not."""

    def make_loader(dp_rank: int, dp_world_size: int, micro_batch_size: int, num_workers: int) -> rd.DataLoader:
        return rd.DataLoader(
            PIPELINES[name],
            global_batch_size=12,
            micro_batch_size=micro_batch_size,
            num_logical_shards=num_shards,
            dp_rank=dp_rank,
            dp_world_size=dp_world_size,
            repeat=True,
            seed=3,
        )

    assert_rescalable(make_loader, chain, steps=steps)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_finite_epochs_on_one_rank(num_workers: int) -> None:
    """The same multiset as without an interruption, in two epochs that end by themselves, with a save in the last batch."""

    def make_loader() -> rd.DataLoader:
        return rd.DataLoader(
            PIPELINES["filter"],
            global_batch_size=4,
            num_logical_shards=8,
            num_workers=num_workers,
            dp_rank=0,
            dp_world_size=1,
        )

    with make_loader() as loader:
        whole = [[batch["id"].tolist() for batch in loader] for _ in range(2)]
    kept = sorted(row["id"] for row in WEB.dataset if is_kept(row))
    assert all(len(batches) == len(kept) // 4 for batches in whole)
    found: list[list[int]] = []
    state = None
    for stop in (3, len(whole[0]) - 1, len(whole[0]), len(whole[0]) + 2):
        with make_loader() as loader:
            if state is not None:
                loader.load_state_dict(state)
                assert str(loader.state_dict()) == str(state)
            while len(found) < stop:
                found += [batch["id"].tolist() for _, batch in zip(range(stop - len(found)), loader, strict=False)]
            state = loader.state_dict()
    assert found == [*whole[0], *whole[1]][: len(found)]
