"""`verify=True`: each row once an epoch, or an error that says which shard. That right runs pass: `tests.test_histories`."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterable
from typing import Any, Literal

import pytest
from torchdata.nodes import Mapper, SamplerWrapper

import rescale_data as rd
from rescale_data.testing import full_state_dict
from tests.pipelines import Rows
from tests.states import opened

ROWS = rd.DatasetSource(Rows(101))


def rows(shuffle: bool | int, shard: rd.Shard) -> rd.BaseNode[Any]:
    return rd.Reader(ROWS, shard, shuffle=shuffle)


def loader(pipeline: Any, rank: int, world_size: int, b: int, k: int, **options: Any) -> rd.DataLoader:
    where = {"dp_rank": rank, "dp_world_size": world_size, "micro_batch_size": b, "num_workers": k}
    return rd.DataLoader(pipeline, global_batch_size=12, **where, **{"verify": True, **options})


def test_the_order_is_the_same_as_without() -> None:
    pipeline = functools.partial(rows, True)
    with loader(pipeline, 0, 1, 12, 0) as one, loader(pipeline, 0, 1, 12, 0, verify=False) as other:
        assert [b["row"].tolist() for b in one] == [b["row"].tolist() for b in other]


Kind = Literal["known", "filtered"]


def rows_of(kind: Kind, shard: rd.Shard) -> rd.BaseNode[Any]:
    reader = rd.Reader(ROWS, shard)
    return reader if kind == "known" else rd.Filter(reader, lambda sample: sample["row"] % 7 != 3)


def resumed(kind: Kind, change: Callable[[dict[str, Any]], None], **options: Any) -> rd.DataLoader:
    """A loader from a state of three batches that was changed behind its back, as a wrong resume would."""
    make = functools.partial(loader, functools.partial(rows_of, kind), 0, 1, 12, 0, num_logical_shards=12, **options)
    first = make()
    batches = iter(first)
    for _ in range(3):
        next(batches)
    state = full_state_dict([first])
    change(opened(state)["shards"])
    second = make()
    second.load_state_dict(state)
    return second


def until_error(batches: Iterable[Any]) -> tuple[int, str]:
    """How many there are before the error, and what it says."""
    count = 0
    try:
        for _ in batches:
            count += 1
    except rd.DataStateError as error:
        return count, str(error)
    raise AssertionError("there was no error")


def fails(loader: rd.DataLoader) -> str:
    """At the same batch however often it is asked for, with nothing counted that was not delivered; and after a skip."""
    before, saved = loader.step, loader.state_dict()
    count, said = until_error(loader)
    assert (loader.step, loader.epoch) == (before + count, 0)
    with pytest.raises(rd.DataStateError):
        loader.peek()
    loader.load_state_dict(loader.state_dict())
    assert until_error(loader) == (0, said)
    loader.load_state_dict(saved)
    with pytest.raises(rd.DataStateError):
        loader.skip(12 * (count + 2))
    return said


@pytest.mark.parametrize("moved", [1, -1])
@pytest.mark.parametrize("kind", ["known", "filtered"])
def test_rows_that_a_segment_lost_or_repeated_are_an_error_at_the_end_of_the_epoch(kind: Kind, moved: int) -> None:
    def move(shards: dict[str, Any]) -> None:
        shards["row" if kind == "known" else "source.row"][5] += moved

    assert re.search(r"logical shard 5 of 12.*lost or repeated", fails(resumed(kind, move)))
    with pytest.raises(rd.DataStateError, match=r"logical shard 5 of 12.*lost or repeated"):
        for _, _ in zip(range(20), resumed(kind, move, repeat=True), strict=False):
            pass


def test_a_failed_proof_is_in_place_of_the_last_batch_and_reset_begins_anew() -> None:
    failed = resumed("known", lambda shards: shards["row"][5].add_(1))
    assert len(list(itertools.islice(failed, 4))) == 4
    assert failed.batches_left == 1
    with pytest.raises(rd.DataStateError, match="Epoch 0 does not end as it should"):
        next(iter(failed))
    failed.reset()
    assert sum(1 for _ in failed) == 8


@pytest.mark.parametrize("tail", ["drop", "pad"])
def test_samples_that_a_remainder_leaves_out_are_an_error_though_no_digest_is_wrong(tail: Any) -> None:
    """The position is right, what the state says is left of the epoch is not."""

    def leave_out(shards: dict[str, Any]) -> None:
        shards["remainder"].fill_(6)

    message = fails(resumed("known", leave_out, tail=tail))
    assert re.search(r"Logical shard \d+ of 12 has more than the \d samples left that are counted as dropped", message)


def test_what_cannot_be_proved_is_named(caplog: pytest.LogCaptureFixture) -> None:
    def pipeline(shard: rd.Shard) -> rd.Node[Any]:
        stream = rd.StreamReader(rd.IterableSource([[{"x": i}] * 9 for i in range(4)]), shard)
        rows = rd.Reader([{"x": i} for i in range(36)], shard)
        ids = Mapper(SamplerWrapper(range(shard.index, 36, shard.num_logical_shards)), lambda i: {"x": i})
        nodes = {"stream": rd.Map(stream, dict), "rows": rows, "ids": ids}
        return rd.WeightedSampler(nodes, dict.fromkeys(nodes, 1), stop="all")

    rd.DataLoader(pipeline, global_batch_size=4, num_logical_shards=4, verify=True)
    assert "proves nothing of the rows of ['ids.source', 'stream.source']" in caplog.text
