"""`load_state_dict(state, delivered=n)`: what other ranks delivered after a state is neither repeated nor lost; and `skip`."""

import functools
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import rescale_data as rd
from rescale_data.testing import full_state_dict
from tests.simulate import Topology, same_state
from tests.states import opened

NUM_ROWS = 1000
SIZES: dict[str, tuple[int, list[Topology]]] = {  # N, and the topologies of a run; W, b, O, K
    "aligned": (96, [Topology(4, 3, 24), Topology(3, 8, 24), Topology(4, 6, 24)]),
    "not aligned": (64, [Topology(4, 6, 24), Topology(3, 4, 24), Topology(4, 2, 24)]),
    "O above N": (12, [Topology(8, 3, 24), Topology(6, 4, 24), Topology(3, 2, 24)]),
    "workers": (24, [Topology(2, 3, 12, 3), Topology(3, 4, 12), Topology(1, 2, 12, 3)]),
    "a ramp": (64, [Topology(4, 6, 24), Topology(3, 4, 48), Topology(4, 6, 24)]),
}
"""An unaligned run, and one with workers, is the one of its topology alone: what `skip` leaves out on others is not theirs."""


def rows(shard: rd.Shard) -> rd.Node[Any]:
    return rd.Reader(range(NUM_ROWS), shard, shuffle=8)


class Ranks:
    """The ranks of a topology; `served` are their rows in the order of steps, of which some are not complete."""

    def __init__(self, n: int, top: Topology, repeat: bool, **load: Any) -> None:
        sizes = {"num_logical_shards": n, "global_batch_size": top.o, "micro_batch_size": top.b, "num_workers": top.k}
        make = functools.partial(rd.DataLoader, rows, dp_world_size=top.w, repeat=repeat, seed=1, **sizes)
        self.loaders = [make(dp_rank=rank, multiprocessing_context="fork") for rank in range(top.w)]
        for loader in self.loaders if load else ():
            loader.load_state_dict(load["state"], delivered=load.get("delivered", 0))

    def take(self, num_micro_batches: int) -> list[int]:
        iterators, served = [iter(loader) for loader in self.loaders], list[int]()
        for _ in range(num_micro_batches):
            for rank, loader in enumerate(self.loaders):
                batch = next(iterators[rank], None)
                if batch is None:
                    iterators[rank] = iter(loader)
                    batch = next(iterators[rank])
                served += batch.tolist()
        return served

    def state(self) -> dict[str, Any]:
        return full_state_dict(self.loaders)

    def close(self) -> None:
        for loader in self.loaders:
            loader.close()


@pytest.mark.parametrize("repeat", [True, False])
@pytest.mark.parametrize("sizes", SIZES)
def test_others_go_on_behind_what_was_delivered(sizes: str, repeat: bool) -> None:
    """States are old by 0 to 29 micro batches, some of them within a step, and over an epoch's end and its remainder."""
    n, tops = SIZES[sizes]
    state, kept = None, list[dict[str, Any]]()
    for segment, (top, age) in enumerate(zip(tops * 2, (5, 29, 1, 0, 8, 13), strict=True)):
        ranks = Ranks(n, top, repeat, **({} if state is None else {"state": state}))
        ranks.take(segment)
        kept.append(ranks.state())
        ranks.take(age)
        wanted, num = ranks.state(), age * top.w * top.b
        ranks.close()
        for other in {top, tops[(segment + 1) % 3]}:
            here = Ranks(n, other, repeat, state=kept[-1], delivered=num)
            there = Ranks(n, other, repeat, state=wanted)
            assert same_state(here.state(), there.state())
            assert here.take(4) == there.take(4)
            here.close()
            there.close()
        state = wanted


def test_a_state_has_the_ranges_that_were_left_out_on_any_ranks_and_loses_them_with_an_older_state() -> None:
    whole, two = Ranks(96, Topology(1, 24, 24), True).take(8), Ranks(96, Topology(2, 12, 24), True)
    first = two.take(2)
    before = two.state()
    for loader in two.loaders:
        loader.skip(48)
        loader.skip(24)  # a range that goes on
    assert opened(two.state())["skipped"] == [[48, 120]]
    three = Ranks(96, Topology(3, 8, 24), True, state=two.state())
    second = three.take(1)
    for loader in three.loaders:
        loader.skip(0)
        loader.skip(24)
    third = three.take(1)
    assert [first, second, third] == [whole[:48], whole[120:144], whole[168:192]]
    assert opened(three.state())["skipped"] == [[48, 120], [144, 168]]
    for loader in three.loaders:
        loader.load_state_dict(before)
    assert opened(three.state())["skipped"] == []
    assert three.take(1) == whole[48:72]


def test_what_no_topology_can_have_delivered_is_refused_and_nothing_moves() -> None:
    first = Ranks(96, Topology(4, 3, 24), True)
    state = first.state()
    [loader] = Ranks(96, Topology(1, 24, 24), True).loaders
    next(iter(loader))
    before = loader.state_dict()
    for wrong in (-12, 6, 18):
        with pytest.raises(ValueError, match=rf"delivered={wrong}\): give a multiple of 12, dp_world_size=4 times"):
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
