"""What a state says of samples that were left out, and functions whose version is compared."""

import logging
from typing import Any

import pytest

import rescale_data as rd
from rescale_data.testing import full_state_dict
from tests.nodes.zoo import WEB, read
from tests.states import closed, opened


def loaders(w: int = 1) -> list[rd.DataLoader]:
    def pipeline(shard: rd.Shard) -> rd.BaseNode[Any]:
        return rd.Map(rd.Reader(range(96), shard), lambda row: {"row": row})

    sizes: dict[str, Any] = {"global_batch_size": 12, "micro_batch_size": 2, "num_logical_shards": 12}
    return [rd.DataLoader(pipeline, dp_rank=rank, dp_world_size=w, repeat=True, **sizes) for rank in range(w)]


def take(ranks: list[rd.DataLoader], num_steps: int) -> list[int]:
    iterators = [iter(loader) for loader in ranks]
    per_step = ranks[0].gradient_accumulation_steps
    return [
        row
        for _ in range(num_steps)
        for iterator in iterators
        for _ in range(per_step)
        for row in next(iterator)["row"].tolist()
    ]


def skipped_in(state: dict[str, Any]) -> Any:
    return opened(state)["skipped"]


def test_the_state_has_the_ranges_of_samples_on_any_ranks_and_loses_them_with_an_older_state() -> None:
    whole = take(loaders(), 12)
    ranks = loaders(2)
    first = take(ranks, 2)
    before = full_state_dict(ranks)
    for loader in ranks:
        loader.skip(24)
        loader.skip(12)  # a range that goes on
    assert skipped_in(full_state_dict(ranks)) == [[24, 60]]
    others = loaders(3)
    for loader in others:
        loader.load_state_dict(full_state_dict(ranks))
    second = take(others, 1)
    for loader in others:
        loader.skip(0)
        loader.skip(12)
    third = take(others, 1)
    assert [first, second, third] == [whole[:24], whole[60:72], whole[84:96]]
    assert skipped_in(full_state_dict(others)) == [[24, 60], [72, 84]]
    for loader in others:
        loader.load_state_dict(before)
    assert skipped_in(full_state_dict(others)) == []
    assert take(others, 1) == whole[24:36]


@pytest.mark.parametrize("wrong", [[[3, "4"]], [[-1, 4]], [[0, 2**62]]])
def test_ranges_that_no_run_leaves_out_are_an_error(wrong: Any) -> None:
    [loader] = loaders()
    state = loader.state_dict()
    with pytest.raises(rd.DataStateError, match=r"The state leaves out the samples .*: it was changed or damaged"):
        loader.load_state_dict(closed({**opened(state), "skipped": wrong}))


def even(row: Any) -> bool:
    return row["id"] % 2 == 0


def odd(row: Any) -> bool:
    return row["id"] % 2 == 1


@pytest.mark.parametrize(
    ("saved", "now", "says"),
    [
        ((even, None), (even, None), ""),
        ((even, None), (odd, None), 'root: fn.code: name: saved "even", now "odd"'),
        ((even, 1), (odd, 1), ""),
        ((even, None), (odd, 1), "version is new"),
        ((even, 1), (odd, 2), "error"),
    ],
)
@pytest.mark.parametrize(
    "kind", [rd.Filter, rd.Map, lambda node, fn, version: rd.RandomMap(node, lambda row, _: row, version=version)]
)
def test_another_function_is_warned_about_and_another_version_an_error(
    saved: Any, now: Any, says: str, kind: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def make(fn: Any, version: Any) -> rd.DataLoader:
        return rd.DataLoader(
            lambda shard: kind(read(WEB, shard), fn, version=version),
            global_batch_size=4, num_logical_shards=4, repeat=True, collate_fn=list,
        )  # fmt: skip

    state = make(*saved).state_dict()
    loader = make(*now)
    if says == "error":
        with pytest.raises(rd.DataStateError, match="version: saved 1, now 2"):
            loader.load_state_dict(state)
        return
    with caplog.at_level(logging.WARNING, "rescale_data"):
        loader.load_state_dict(state)
    if kind in (rd.Filter, rd.Map) or "new" in says:
        assert (says in caplog.text) if says else "Functions of the pipeline" not in caplog.text
