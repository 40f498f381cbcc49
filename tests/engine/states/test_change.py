"""A mixture that changes between the segments of a run, at another topology at the same time."""

import logging
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.api import CheckpointException
from torchdata.nodes import Batcher, Mapper, Unbatcher

import rescale_data as rd
from rescale_data import checkpoint
from rescale_data.nodes.mixture.rules import make_rule
from rescale_data.testing import full_state_dict
from tests.nodes.zoo import BOOKS, CODE, WEB, read, without_arrays
from tests.states import closed, opened

SOURCES = {"web": WEB, "code": CODE, "books": BOOKS}
ALL = {"web": 0.5, "code": 0.3, "books": 0.2}
TOPOLOGIES = [(1, 12), (2, 6), (3, 2), (4, 3), (6, 2)]
Ids = list[list[int]]


class Pipeline:
    """A mixture, below a map and above one."""

    def __init__(self, weights: dict[str, float], **kwargs: Any) -> None:
        self.weights, self.kwargs = weights, kwargs

    def __call__(self, shard: rd.Shard) -> rd.BaseNode[Any]:
        nodes = {name: rd.RandomMap(read(SOURCES[name], shard), lambda row, _: row) for name in self.weights}
        return rd.Map(rd.WeightedSampler(nodes, self.weights, **self.kwargs), without_arrays)


def loaders(weights: dict[str, float], topology: tuple[int, int] = (1, 12), **kwargs: Any) -> list[rd.DataLoader]:
    world_size, micro_batch_size = topology
    return [
        rd.DataLoader(
            Pipeline(weights, **kwargs),
            global_batch_size=12,
            micro_batch_size=micro_batch_size,
            num_logical_shards=12,
            dp_rank=rank,
            dp_world_size=world_size,
            repeat=True,
        )
        for rank in range(world_size)
    ]


def steps(ranks: list[rd.DataLoader], num_steps: int) -> Ids:
    """The ids of global batches, in rank order."""
    batches: Ids = []
    for _ in range(num_steps):
        rows = [
            [next(iter(loader))["id"].tolist() for _ in range(loader.gradient_accumulation_steps)] for loader in ranks
        ]
        batches.append([i for rank in rows for micro_batch in rank for i in micro_batch])
    return batches


def after(
    state: dict[str, Any], weights: dict[str, float], topology: tuple[int, int], num_steps: int
) -> tuple[Ids, Any]:
    """What a segment of the given weights delivers, and its state."""
    ranks = loaders(weights, topology)
    for loader in ranks:
        loader.load_state_dict(state)
    return steps(ranks, num_steps), full_state_dict(ranks)


changes = st.sampled_from(
    [
        {"web": 0.1, "code": 0.7, "books": 0.2},
        {"web": 0.5, "code": 0.5},
        {"books": 1},
        {"web": 1, "code": 0, "books": 2},
    ]
)


@given(changes, changes, st.lists(st.sampled_from(TOPOLOGIES), min_size=4, max_size=4), st.integers(1, 9))
@settings(max_examples=8)
def test_all_topologies_agree_after_a_change(
    second: dict[str, float], third: dict[str, float], topologies: list[tuple[int, int]], num_steps: int
) -> None:
    """R1 and R2 across two changes: the same as a one-rank run that made them at the same samples."""
    first, *rest = topologies
    ranks = loaders(ALL, first)
    one = loaders(ALL)
    assert steps(ranks, num_steps) == steps(one, num_steps)
    state, expected = full_state_dict(ranks), full_state_dict(one)
    for weights, topology in ((second, rest[0]), (third, rest[1]), (third, rest[2])):
        got, state = after(state, weights, topology, num_steps)
        want, expected = after(expected, weights, (1, 12), num_steps)
        assert got == want
    assert str(opened(state)["shards"]) == str(opened(expected)["shards"])


def test_new_weights_count_from_the_change() -> None:
    ranks = loaders({"web": 0.9, "code": 0.1})
    before = steps(ranks, 20)
    weights = {"web": 0.1, "code": 0.9}
    batches, state = after(full_state_dict(ranks), weights, (3, 4), 20)
    assert opened(state)["shards"]["source.draws"].tolist() == [40] * 12
    counts = Counter(i // 1000 for batch in batches for i in batch)
    assert abs(counts[4] / 240 - 0.9) < 12 / 240
    web = [i for batch in (*before, *batches) for i in batch if i // 1000 == 3]
    assert max(Counter(web).values()) - min(Counter(web).values()) <= 2  # web went on where it was, epoch by epoch
    _, again = after(state, weights, (1, 12), 1)
    assert opened(again)["shards"]["source.draws"].tolist() == [41] * 12
    shards = opened(again)["shards"]
    assert (shards["source.drawn.web"] + shards["source.drawn.code"]).tolist() == [41] * 12


def test_a_removed_source_is_dropped_with_a_warning_and_an_added_one_begins(caplog: pytest.LogCaptureFixture) -> None:
    ranks = loaders({"web": 0.5, "code": 0.5}, (2, 6))
    steps(ranks, 5)
    saved = full_state_dict(ranks)
    with caplog.at_level(logging.WARNING, "rescale_data"):
        batches, state = after(saved, {"web": 0.5, "books": 0.5}, (4, 3), 3)
    assert "These sources begin with their first row: ['source.books']" in caplog.text
    assert "These are gone, with their positions: ['source.code']" in caplog.text
    assert {i // 1000 for batch in batches for i in batch} == {3, 5}
    assert not [key for key in opened(state)["shards"] if "code" in key]
    rows = opened(state)["shards"]["source.books.source.row"]
    assert (rows == opened(state)["shards"]["source.drawn.books"]).all()
    assert (opened(state)["shards"]["source.web.source.row"] >= opened(saved)["shards"]["source.web.source.row"]).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [({"unit": "tokens", "column": "tokens"}, "source.since.* is new"), ({"stop": "first"}, "stop: saved")],
)
def test_nothing_else_may_change(change: dict[str, Any], message: str) -> None:
    ranks = loaders(ALL)
    steps(ranks, 1)
    state = full_state_dict(ranks)
    for weights in (ALL, {"web": 1.0}):
        with pytest.raises(rd.DataStateError, match=message):
            loaders(weights, **change)[0].load_state_dict(state)


def test_another_order_of_a_source_that_stays_is_an_error() -> None:
    def make(shuffle: int, name: str) -> rd.DataLoader:
        def pipeline(shard: rd.Shard) -> rd.BaseNode[Any]:
            nodes = {"web": rd.Reader(WEB, shard, shuffle=shuffle), name: read(CODE, shard)}
            return rd.Map(rd.WeightedSampler(nodes, {"web": 1, name: 1}), without_arrays)

        return rd.DataLoader(
            pipeline, global_batch_size=4, num_logical_shards=4, dp_rank=0, dp_world_size=1, repeat=True
        )

    with pytest.raises(rd.DataStateError, match=r"source.web: shuffle: saved 4, now 5"):
        make(5, "new").load_state_dict(make(4, "old").state_dict())


def test_below_a_node_of_torchdata_weights_are_fixed_and_the_error_says_so() -> None:
    def make(weight: float, above: Any) -> rd.DataLoader:
        def pipeline(shard: rd.Shard) -> rd.BaseNode[Any]:
            rows = Pipeline({"web": weight, "code": 1 - weight})(shard)
            return rd.Map(above(rows), lambda _: {"id": 0})

        return rd.DataLoader(pipeline, global_batch_size=4, num_logical_shards=4, repeat=True)

    for above in (lambda rows: Batcher(rows, 2), lambda rows: Unbatcher(Batcher(rows, 2))):
        with pytest.raises(
            rd.DataStateError, match=r"weights: web: saved 0.5.*weights'\] could change if all nodes above"
        ):
            make(0.9, above).load_state_dict(make(0.5, above).state_dict())
    make(0.9, lambda rows: Mapper(rows, dict)).load_state_dict(make(0.5, lambda rows: Mapper(rows, dict)).state_dict())


class Packed:
    """A mixture below a packer, with or without something that cuts documents, or another packer, in between."""

    def __init__(self, weights: dict[str, float], packer: str) -> None:
        self.weights, self.packer = weights, packer

    def __call__(self, shard: rd.Shard) -> rd.BaseNode[Any]:
        nodes = {
            name: rd.Filter(read(SOURCES[name], shard), lambda row: len(row["tokens"]) > 0) for name in self.weights
        }
        rows: rd.BaseNode[Any] = rd.WeightedSampler(nodes, self.weights)
        inner, _, outer = self.packer.rpartition(" within ")
        if "clean" in outer:
            rows = rd.CleanDocuments(rows, "tokens", max_length=4)
        if inner == "whole":
            rows = rd.WholeDocumentPacker(rows, column="tokens", seq_len=4, window=3, pad_id=0)
        if inner == "cut":
            rows = rd.TokenPacker(rows, column="tokens", seq_len=3, eos_id=None)
        if "whole" in outer:
            return rd.WholeDocumentPacker(rows, column="tokens", seq_len=16, window=7, pad_id=0)
        if "cut" in outer:
            return rd.TokenPacker(rows, column="tokens", seq_len=5, eos_id=None, labels=True)
        return rd.Map(rows, _first_tokens)


def _first_tokens(row: dict[str, Any]) -> dict[str, Any]:
    return {"tokens": torch.nn.functional.pad(torch.from_numpy(row["tokens"].astype(int)), (0, 4 - len(row["tokens"])))}


PACKERS = ("whole", "cut", "clean whole", "clean cut", "clean")
NESTED = ("cut within whole", "cut within cut", "whole within cut")


def packed(weights: dict[str, float], packer: str) -> rd.DataLoader:
    return rd.DataLoader(
        Packed(weights, packer), global_batch_size=1, num_logical_shards=1, dp_rank=0, dp_world_size=1, repeat=True
    )  # fmt: skip


def drawn_before(state: dict[str, Any], source: str) -> Counter[int]:
    """The tokens of the rows that lie before the position of a source."""
    at = {key.rpartition(".")[2]: int(v[0]) for key, v in opened(state)["shards"].items() if f"{source}.source." in key}
    reader = read(SOURCES[source], rd.Shard(0, 1, repeat=True))
    counts: Counter[int] = Counter()
    for epoch in range(at["epoch"] + 1):
        rows = [row["tokens"].tolist() for row in reader]
        reader.reset(reader.get_state())
        counts.update(token for row in (rows[: at["row"]] if epoch == at["epoch"] else rows) for token in row)
    return counts


def is_between_documents(state: dict[str, Any]) -> bool:
    return not any(
        int(v[0]) for key, v in opened(state)["shards"].items() if key.split(".")[-1] in ("emitted", "offset", "piece")
    )


@pytest.mark.parametrize("packer", ["clean cut", *NESTED])
@pytest.mark.parametrize("at", [1, 4, 9, 14])
def test_a_packer_goes_on_within_what_it_has_begun(packer: str, at: int) -> None:
    """New weights and an added source wait for the end of a document or window: no token is lost, none comes twice."""
    delivered: Counter[int] = Counter()
    state: dict[str, Any] | None = None
    loader = None
    segments = ({"web": 0.8, "code": 0.2}, {"web": 0.1, "code": 0.9}, ALL, {"web": 0.0, "code": 0.5, "books": 1.5})
    for number, weights in enumerate(segments):
        loader = packed(weights, packer)
        if state is not None:
            loader.load_state_dict(state)
        for count, batch in enumerate(loader, 1):
            delivered.update(batch["tokens"].flatten().tolist())
            state = loader.state_dict()
            if count >= at + number and (number < len(segments) - 1 or (count > 100 and is_between_documents(state))):
                break
    assert loader is not None
    assert state is not None
    shards, rule = opened(state)["shards"], make_rule(segments[-1], {})
    assert shards[next(key for key in shards if key.endswith(".rule"))].item() == rule.digest
    del delivered[0]
    assert delivered == drawn_before(state, "web") + drawn_before(state, "code") + drawn_before(state, "books")


@pytest.mark.parametrize("at", [1, 4, 7])
def test_new_weights_count_from_the_same_document_on_however_often_a_run_stops(at: int, tmp_path: Path) -> None:
    """Of documents that are read in blocks, none is read by the old weights behind the one that was begun."""
    for base, name in enumerate("ab"):
        lists = [(10**6 * base + 100 * i + np.arange(1 + 7 * i % 40)).tolist() for i in range(200)]
        table = pa.table({"tokens": pa.array(lists, pa.list_(pa.int64()))})
        with pa.ipc.new_file(tmp_path / f"{name}.arrow", table.schema) as writer:
            writer.write_table(table, max_chunksize=40)
    sources = {name: rd.ArrowSource(tmp_path / f"{name}.arrow") for name in "ab"}

    def begun(weights: dict[str, float], state: Any = None) -> rd.DataLoader:
        def pipeline(shard: rd.Shard) -> rd.BaseNode[Any]:
            rows = rd.WeightedSampler({name: rd.Reader(sources[name], shard) for name in "ab"}, weights)
            pieces = rd.CleanDocuments(rows, "tokens", max_length=3)
            return rd.TokenPacker(pieces, column="tokens", seq_len=8, eos_id=0)

        made = rd.DataLoader(pipeline, global_batch_size=2, num_logical_shards=2, repeat=True)
        if state is not None:
            made.load_state_dict(state)
        return made

    first = begun({"a": 1, "b": 0.05})
    for _ in zip(range(at), first, strict=False):
        pass
    changed = begun({"a": 0.05, "b": 1}, first.state_dict())
    served, states = [], []
    for _, batch in zip(range(16), changed, strict=False):
        served.append(batch["tokens"].tolist())
        states.append(changed.state_dict())
    for stop in (0, 2, 5):
        again = begun({"a": 0.05, "b": 1}, states[stop])
        assert [b["tokens"].tolist() for _, b in zip(range(10), again, strict=False)] == served[stop + 1 : stop + 11]


@pytest.mark.parametrize("packer", PACKERS)
@pytest.mark.parametrize("rested", [False, True])
def test_a_source_that_goes_while_a_packer_is_within_a_window(
    packer: str, rested: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """What was begun is begun again, with a warning; not where the source had weight 0 for a while."""
    delivered: Counter[int] = Counter()
    segments = [({"web": 0.5, "code": 0.5}, 10), ({"code": 0.5}, 60)]
    if rested:
        segments.insert(1, ({"web": 0.0, "code": 0.5}, 41))
    state: dict[str, Any] | None = None
    for weights, num_samples in segments:
        loader = packed(weights, packer)
        if state is not None:
            begun = not is_between_documents(state)
            with caplog.at_level(logging.WARNING, "rescale_data"):
                loader.load_state_dict(state)
        for count, batch in enumerate(loader, 1):
            delivered.update(batch["tokens"].flatten().tolist())
            state = loader.state_dict()
            if count >= num_samples and ("web" in weights or is_between_documents(state)):
                break
    assert "are gone, with their positions" in caplog.text
    assert ("begin it again" in caplog.text) == (begun and not rested)
    assert state is not None
    code = Counter({token: n for token, n in delivered.items() if 4000 <= token < 5000})
    expected = drawn_before(state, "code")
    if rested or not begun:
        assert code == expected
    else:
        assert not expected - code  # none is lost
        assert (code - expected).total() <= 7 * 12


@given(st.permutations(range(18)))
@settings(max_examples=10)
def test_columns_are_found_by_their_names(order: list[int]) -> None:
    """A pipeline that names its nodes in another order has another order of columns, and the same state."""
    [old] = loaders(ALL)
    steps([old], 3)
    parts = opened(old.state_dict())
    columns = [parts["columns"][i] for i in (0, 1, 2, *(3 + i for i in order))]
    shards = {column["name"]: parts["shards"][column["name"]] for column in columns}
    [loader] = loaders(ALL)
    loader.load_state_dict(closed({**parts, "columns": columns, "shards": shards}))
    assert str(loader.state_dict()) == str(old.state_dict())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
class TestCheckpoint:
    """Through torch.distributed.checkpoint, without a process group."""

    def save(self, path: Path) -> tuple[rd.DataLoader, Ids]:
        [loader] = loaders({"web": 0.5, "code": 0.5})
        batches = steps([loader], 4)
        dcp.save({"loader": loader}, checkpoint_id=path, no_dist=True)
        return loader, batches

    def test_plain_load_takes_new_weights(self, tmp_path: Path) -> None:
        old, _ = self.save(tmp_path)
        [loader] = loaders({"web": 0.9, "code": 0.1})
        rd.checkpoint.check_checkpoint(tmp_path, loader)
        dcp.load({"loader": loader}, checkpoint_id=tmp_path, no_dist=True)
        want, _ = after(old.state_dict(), {"web": 0.9, "code": 0.1}, (1, 12), 3)
        assert steps([loader], 3) == want

    def test_one_source_in_place_of_another_loads_plainly(self, tmp_path: Path) -> None:
        """The table then has as many columns; they are found by their names."""
        old, _ = self.save(tmp_path)
        weights = {"books": 0.5, "web": 0.5}
        [loader] = loaders(weights)
        rd.checkpoint.check_checkpoint(tmp_path, loader)
        dcp.load({"loader": loader}, checkpoint_id=tmp_path, no_dist=True)
        want, _ = after(old.state_dict(), weights, (1, 12), 3)
        assert steps([loader], 3) == want

    @pytest.mark.parametrize("topology", TOPOLOGIES)
    @pytest.mark.parametrize(
        ("weights", "said"), [(ALL, r"'source.books'\] are new"), ({"web": 1.0}, r"'source.code'\] gone")]
    )
    def test_an_added_or_removed_source_takes_one_call(
        self, tmp_path: Path, topology: tuple[int, int], weights: dict[str, float], said: str
    ) -> None:
        old, _ = self.save(tmp_path)
        ranks = loaders(weights, topology)
        with pytest.raises(rd.DataStateError, match=f"{said}.*load_changed"):
            rd.checkpoint.check_checkpoint(tmp_path, ranks[0])
        for loader in ranks:
            rd.checkpoint.load_changed(tmp_path, loader)
        want, _ = after(old.state_dict(), weights, (1, 12), 5)
        assert steps(ranks, 5) == want

    def test_what_dcp_says_of_an_added_source(self, tmp_path: Path) -> None:
        self.save(tmp_path)
        [loader] = loaders(ALL)
        with pytest.raises(CheckpointException, match=r"Size mismatch between saved .* for loader.table"):
            dcp.load({"loader": loader}, checkpoint_id=tmp_path, no_dist=True)

    @pytest.mark.parametrize("weights", [ALL, {"web": 1.0}])
    def test_the_loads_of_this_package_take_an_added_or_removed_source(
        self, tmp_path: Path, weights: dict[str, float]
    ) -> None:
        old, _ = self.save(tmp_path)
        [loader] = loaders(weights)
        checkpoint.load(tmp_path, {"loader": loader})
        want, _ = after(old.state_dict(), weights, (1, 12), 5)
        assert steps([loader], 5) == want

    def test_load_changed_is_strict_about_the_rest(self, tmp_path: Path) -> None:
        self.save(tmp_path)
        with pytest.raises(rd.DataStateError, match="stop: saved"):
            rd.checkpoint.load_changed(tmp_path, loaders(ALL, stop="first")[0])
        with pytest.raises(FileNotFoundError, match=r"No checkpoint at .*none"):
            rd.checkpoint.load_changed(tmp_path / "none", loaders(ALL)[0])
