"""`DataLoader.exclude_steps`, and functions whose version is compared."""

import json
import logging
from typing import Any

import numpy as np
import pytest

import rescale_data as rd
from rescale_data.testing import full_state_dict
from tests.nodes.zoo import WEB, read


def loaders(w: int = 1, *, b: int = 2, unknown: bool = False, **others: Any) -> list[rd.DataLoader]:
    def pipeline(shard: rd.Shard) -> rd.BaseNode[Any]:
        rows = rd.Map(rd.Reader(range(96), shard), lambda row: {"row": row})
        return rd.Filter(rows, lambda row: True, version=1) if unknown else rows

    arguments = {"global_batch_size": 12, "micro_batch_size": b, "num_logical_shards": 12, **others}
    return [rd.DataLoader(pipeline, dp_rank=rank, dp_world_size=w, **arguments) for rank in range(w)]


def steps(ranks: list[rd.DataLoader], num: int) -> dict[int, list[int]]:
    """Global batches by step, over ends of epochs."""
    found: dict[int, list[int]] = {}
    iterators = [iter(loader) for loader in ranks]
    for _ in range(num):
        rows: list[list[int]] = [[] for _ in ranks]
        for _ in range(ranks[0].gradient_accumulation_steps):
            for i, loader in enumerate(ranks):
                batch = next(iterators[i], None)
                if batch is None:
                    iterators[i] = iter(loader)
                    batch = next(iterators[i])
                rows[i] += batch["row"].tolist()
        found[ranks[0].step - 1] = [row for rank in rows for row in rank]
    return found


@pytest.mark.parametrize("unknown", [False, True])
@pytest.mark.parametrize("kind", [{"repeat": True}, {"repeat": False}, {"repeat": True, "steps_per_epoch": 5}])
def test_the_other_steps_are_those_of_a_run_that_leaves_out_none(kind: dict[str, Any], unknown: bool) -> None:
    """An epoch has 8 steps: ranges within one, at its end, and over two."""
    whole = steps(loaders(unknown=unknown, **kind), 30)
    [loader] = loaders(unknown=unknown, **kind)
    loader.exclude_steps([(2, 4), (7, 9), (15, 26)])
    found = steps([loader], 12)
    assert found == {step: whole[step] for step in [0, 1, 4, 5, 6, *range(9, 15), 26]}


def test_a_job_that_begins_again_from_before_leaves_them_out_again() -> None:
    whole = steps(loaders(repeat=True), 12)
    ranks = loaders(2, repeat=True)
    for loader in ranks:
        loader.exclude_steps([(4, 6)])
    assert steps(ranks, 2) == {step: whole[step] for step in (0, 1)}
    state = full_state_dict(ranks)
    assert json.loads(state["pipeline"])["root"]["excluded_steps"] == [[4, 6]]
    for given in ([], [(4, 6)]):  # as an argument again, or from the state alone
        again = loaders(3, repeat=True)
        for loader in again:
            loader.exclude_steps(given)
            loader.load_state_dict(state)
        assert steps(again, 4) == {step: whole[step] for step in (2, 3, 6, 7)}
        for loader in again:
            loader.exclude_steps([(4, 6)])  # known to have been left out
    late = loaders(repeat=True)[0]
    late.load_state_dict(full_state_dict(again))
    with pytest.raises(ValueError, match="the loader is at step 8"):
        late.exclude_steps([(7, 9)])


def test_a_range_that_has_passed_is_an_error() -> None:
    ranks = loaders(repeat=True)
    steps(ranks, 3)
    state = full_state_dict(ranks)
    [loader] = loaders(repeat=True)
    loader.exclude_steps([(2, 5)])
    with pytest.raises(rd.DataStateError, match=r"step 3: the steps \[\(2, 5\)\] were to be left out and have passed"):
        loader.load_state_dict(state)
    for wrong in ((3, 3), (-1, 2), (2, 4)):
        with pytest.raises(ValueError, match="exclude_steps"):
            ranks[0].exclude_steps([wrong])
    for no_steps in ([(4.0, 5)], (4, 5), [(4,)], None):
        with pytest.raises(TypeError, match=r"give an int|a list of \(first, stop\)"):
            ranks[0].exclude_steps(no_steps)  # type: ignore[arg-type]
    ranks[0].exclude_steps([(np.int64(4), np.int64(5))])  # type: ignore[list-item]
    assert json.loads(ranks[0].state_dict()["pipeline"])["root"]["excluded_steps"] == [[4, 5]]


@pytest.mark.parametrize("kind", [{"repeat": False}, {"repeat": True, "steps_per_epoch": 8}])
def test_with_skip_rescale_and_a_count_of_what_is_left(kind: dict[str, Any]) -> None:
    """The epoch has 8 steps of 6 micro batches, of which 2 are left out."""
    whole = steps(loaders(**kind), 8)
    [loader] = loaders(**kind)
    loader.exclude_steps([(2, 3), (6, 7)])
    assert loader.batches_left == 36
    left = [loader.batches_left for _ in loader]
    assert left == [*range(35, -1, -1)]
    assert loader.step == 8
    [loader] = loaders(**kind)
    loader.exclude_steps([(2, 3), (6, 7)])
    loader.skip(12)
    loader.rescale(micro_batch_size=4)
    assert steps([loader], 5) == {step: whole[step] for step in (1, 3, 4, 5, 7)}


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
