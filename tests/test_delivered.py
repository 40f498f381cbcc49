"""`load_state_dict(state, delivered=n)`, and what a state says of `skip`. On any ranks: `tests.test_histories`."""

from itertools import islice
from typing import Any

import pytest

import rescale_data as rd
from rescale_data.testing import full_state_dict
from tests.states import opened, same_state


def loader_of(b: int, **where: int) -> rd.DataLoader:
    sizes = {"global_batch_size": 24, "num_logical_shards": 96, "micro_batch_size": b}
    return rd.DataLoader(range(1000), **sizes, **where, repeat=True)


def take(loader: rd.DataLoader, num: int) -> list[int]:
    return [row for batch in islice(loader, num) for row in batch.tolist()]


def test_a_state_has_the_ranges_that_were_left_out_and_loses_them_with_an_older_state() -> None:
    whole, first, then = take(loader_of(24), 8), loader_of(12), loader_of(8)
    taken = take(first, 4)
    before = first.state_dict()
    first.skip(48)
    first.skip(24)  # a range that goes on
    assert opened(first.state_dict())["skipped"] == [[48, 120]]
    then.load_state_dict(first.state_dict())
    taken += take(then, 3)
    then.skip(0)
    then.skip(24)
    taken += take(then, 3)
    assert taken == whole[:48] + whole[120:144] + whole[168:192]
    assert opened(then.state_dict())["skipped"] == [[48, 120], [144, 168]]
    then.load_state_dict(before)
    assert opened(then.state_dict())["skipped"] == []
    assert take(then, 3) == whole[48:72]


def test_what_no_topology_can_have_delivered_is_refused_and_nothing_moves() -> None:
    state = full_state_dict([loader_of(3, dp_rank=rank, dp_world_size=4) for rank in range(4)])
    loader = loader_of(24)
    next(iter(loader))
    before = loader.state_dict()
    for wrong in (-12, 6, 18):
        with pytest.raises(
            ValueError, match=rf"delivered={wrong}\): give a multiple of dp_world_size .* = 4 \* 3 = 12"
        ):
            loader.load_state_dict(state, delivered=wrong)
    assert same_state(before, loader.state_dict())


def test_another_pipeline_did_not_deliver_it() -> None:
    def mixed(weight: int) -> rd.DataLoader:
        def pipeline(shard: rd.Shard) -> rd.Node[Any]:
            readers = {"a": rd.Reader(range(64), shard), "b": rd.Reader(range(64, 128), shard)}
            return rd.WeightedSampler(readers, {"a": 1, "b": weight})

        return rd.DataLoader(pipeline, global_batch_size=4, num_logical_shards=4, repeat=True)

    state = mixed(1).state_dict()
    mixed(2).load_state_dict(state)
    mixed(1).load_state_dict(state, delivered=4)
    with pytest.raises(rd.DataStateError, match="the pipeline has changed since the state was saved"):
        mixed(2).load_state_dict(state, delivered=4)
