"""``WeightedSampler(group=)``: neighbouring rows of a global batch are of one source."""

import itertools
from typing import Any

import numpy as np
import pytest

import rescale_data as rd
from rescale_data.testing import full_state_dict
from tests.nodes.mixture.test_mixtures import rows, without_tokens

WEIGHTS = {"a": 0.5, "b": 0.3, "c": 0.2}


def pipeline(shard: rd.Shard, group: int = 4, **kwargs: Any) -> rd.BaseNode[Any]:
    nodes: dict[str, Any] = {name: rd.Reader(rows(i, 4096), shard) for i, name in enumerate("abcd")}
    nodes["c"] = rd.WeightedSampler({name: nodes.pop(name) for name in "cd"}, {"c": 1, "d": 1})
    return rd.Map(rd.WeightedSampler(nodes, WEIGHTS, group=group, **kwargs), without_tokens)


def make(
    o: int = 24, b: int = 8, group: int = 4, w: int = 1, rank: int = 0, n: int = 72, **kwargs: Any
) -> rd.DataLoader:
    return rd.DataLoader(
        lambda shard: pipeline(shard, group, **kwargs), global_batch_size=o, micro_batch_size=b, num_logical_shards=n,
        dp_rank=rank, dp_world_size=w, repeat=True,
    )  # fmt: skip


def batches(loader: rd.DataLoader, num: int) -> Any:
    return np.array([batch["source"].tolist() for batch in itertools.islice(loader, num)])


@pytest.mark.parametrize("group", [2, 4, 8, 24])
def test_groups_of_one_source_at_their_weights(group: int) -> None:
    found = batches(make(b=24, group=group), 120).reshape(120, -1, group)
    assert (found == found[:, :, :1]).all()
    counts = np.array([np.bincount(np.minimum(step[:, 0], 2), minlength=3) for step in found])
    assert np.abs(counts - 24 / group * np.array([0.5, 0.3, 0.2])).max() <= 1
    assert np.abs(counts.sum(axis=0) / counts.sum() - [0.5, 0.3, 0.2]).max() < 0.03
    assert len({tuple(step) for step in found[:, :, 0].tolist()}) > 1


def test_any_micro_batch_of_groups_rescales() -> None:
    """At steps in the middle of a round of tracks, the batches of one rank that was never interrupted."""
    whole, state, step = batches(make(b=24), 20), None, 0
    for w, b in ((1, 8), (2, 4), (3, 8), (6, 4), (2, 12), (1, 24)):
        ranks = [make(b=b, w=w, rank=rank) for rank in range(w)]
        for loader in ranks:
            if state is not None:
                loader.load_state_dict(state)
        per_step = 24 // (w * b)
        found = np.array([batches(loader, 2 * per_step).reshape(2, -1) for loader in ranks])
        assert (found.transpose(1, 0, 2).reshape(2, 24) == whole[step : step + 2]).all()
        state, step = full_state_dict(ranks), step + 2


def test_another_global_batch_only_at_a_whole_round() -> None:
    first, other = make(), make(o=36, b=12)
    states = []
    for _ in range(6):
        batches(first, 3)
        states.append(full_state_dict([first]))
    for step, state in enumerate(states, start=1):
        if step % 3:
            with pytest.raises(
                rd.DataStateError, match=rf"is of step {step},.* to step {3 if step < 3 else 6}, save there"
            ):
                other.load_state_dict(state)
        else:
            other = make(o=36, b=12)
            other.load_state_dict(state)
            found = batches(other, 12).reshape(-1, 4)
            assert (found == found[:, :1]).all()
    again = make(b=4)
    again.load_state_dict(states[0])
    assert (batches(again, 6).reshape(-1, 4).std(axis=1) == 0).all()
    with pytest.raises(rd.DataStateError, match=r"would tear the groups of WeightedSampler\(group=4\) apart"):
        again.reopen(global_batch_size=36)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n": 36}, "num_logical_shards=36 is not a multiple of global_batch_size=24"),
        ({"b": 6}, "group=4 does not divide global_batch_size=24 and micro_batch_size=6"),
        ({"unit": "tokens", "column": "tokens"}, "only by samples"),
        ({"stop": "all"}, "with stop='never'"),
        ({"caps": {"a": {"samples": 9}}}, "without caps"),
        ({"group": 0}, "at least 1"),
    ],
)
def test_what_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**arguments)


def test_a_mixture_that_is_not_the_root_is_refused() -> None:
    def filtered(shard: rd.Shard) -> Any:
        return rd.Filter(pipeline(shard), bool)

    with pytest.raises(ValueError, match=r"the mixture 'source\.source' is not the root"):
        rd.DataLoader(filtered, global_batch_size=24, micro_batch_size=8, num_logical_shards=72, repeat=True)
    with pytest.raises(ValueError, match="not aligned: num_workers=4"):
        rd.DataLoader(
            pipeline, global_batch_size=24, micro_batch_size=8, num_logical_shards=72, num_workers=4, repeat=True
        )
