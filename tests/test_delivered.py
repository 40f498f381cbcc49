"""`load_state_dict(state, delivered=n)`, and what a state says of `skip`. On any ranks: `tests.test_histories`."""

from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
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


def write(folder: Path, name: str, first: int) -> None:
    tokens = [[first + i] * (1 + i % 9) for i in range(40)]
    pq.write_table(pa.table({"tokens": pa.array(tokens, pa.list_(pa.int32()))}), folder / name, row_group_size=7)


class Changing:
    """A pipeline over files, of which others come; also its weights and lengths change."""

    def __init__(self, top: str, folder: Path, **given: Any) -> None:
        self.top, self.source, self.given = top, rd.ParquetSource(folder), given

    def __call__(self, shard: rd.Shard) -> rd.Node[Any]:
        readers = {name: rd.Reader(self.source, shard) for name in ("a", "b")}
        rows = rd.WeightedSampler(readers, {"a": 1, "b": self.given.get("b", 1)})
        if self.top == "Shuffle":
            return rd.Shuffle(rd.Map(rows, sum_of), 5)
        sizes: dict[str, Any] = {"column": "tokens", "seq_len": self.given.get("seq_len", 12)}
        return (
            rd.TokenPacker(rows, eos_id=None, **sizes)
            if self.top == "TokenPacker"
            else rd.WholeDocumentPacker(rows, **sizes)
        )

    def loader(self, state: Any = None, delivered: int = 0) -> rd.DataLoader:
        loader = rd.DataLoader(
            self, global_batch_size=4, num_logical_shards=4, repeat=True, verify=True, collate_fn=list
        )
        if state is not None:
            loader.load_state_dict(state, delivered)
        return loader


def sum_of(row: dict[str, Any]) -> int:
    return int(row["tokens"].sum())


@pytest.mark.parametrize("num_delivered", [1, 4, 11, 40])
@pytest.mark.parametrize("change", ["files", "weights", "seq_len", "nothing"])
@pytest.mark.parametrize("top", ["TokenPacker", "WholeDocumentPacker", "Shuffle"])
def test_what_changed_before_or_since_it_was_delivered(
    top: str, change: str, num_delivered: int, tmp_path: Path
) -> None:
    """Files that came later were not read for it; windows of earlier weights or lengths end as they began."""
    write(tmp_path, "b.parquet", 0)
    first = Changing(top, tmp_path).loader()
    for _ in range(3):
        next(iter(first))
    changed = {"weights": {"b": 3}, "seq_len": {"seq_len": 9}}.get(change, {})
    then = Changing(top, tmp_path, **changed).loader(first.state_dict())
    next(iter(then))
    state = then.state_dict()
    for _ in range(num_delivered):
        next(iter(then))
    if change == "files":
        write(tmp_path, "a.parquet", 1000)
    now = Changing(top, tmp_path, **changed)
    here, there = now.loader(state, 4 * num_delivered), now.loader(then.state_dict())
    assert same_state(here.state_dict(), there.state_dict())
    for _ in range(20):
        assert str(next(iter(here))) == str(next(iter(there)))
