"""A mixture that changes between the segments of a run, at another topology at the same time.

That no token is lost or comes twice, whatever windows are open: law 3 (`tests.laws.test_changes_keep_the_rest`). That shares
are those of the new weights at once: `tests.nodes.mixture.test_mixtures`.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.api import CheckpointException
from torchdata.nodes import Batcher, Mapper, Unbatcher

import rescale_data as rd
from rescale_data import checkpoint
from rescale_data.testing import full_state_dict
from tests.nodes.resume import BATCH, alone, ranks_of, samples_by_shard
from tests.nodes.zoo import BOOKS, CODE, WEB, mixture, read, without_arrays
from tests.states import closed, opened

SOURCES = {"web": WEB, "code": CODE, "books": BOOKS}
ALL = {"web": 0.5, "code": 0.3, "books": 0.2}
TOPOLOGIES = [(1, 12), (2, 6), (3, 2), (4, 3), (6, 2)]
Ids = list[list[int]]
State = dict[str, Any]


def loaders(weights: dict[str, float], topology: tuple[int, int] = (1, 12), **kwargs: Any) -> list[rd.DataLoader]:
    """Return the loaders of all ranks: a mixture, below a map and above one."""

    def pipeline(shard: rd.Shard) -> rd.BaseNode[Any]:
        nodes = {name: rd.RandomMap(read(SOURCES[name], shard), lambda row, _: row) for name in weights}
        return rd.Map(rd.WeightedSampler(nodes, weights, **kwargs), without_arrays)

    sizes = {"global_batch_size": 12, "micro_batch_size": topology[1], "num_logical_shards": 12}
    ranks = [{"dp_rank": rank, "dp_world_size": topology[0]} for rank in range(topology[0])]
    return [rd.DataLoader(pipeline, repeat=True, **sizes, **rank) for rank in ranks]


def steps(ranks: list[rd.DataLoader], num_steps: int) -> Ids:
    """Return the ids of global batches, in rank order."""
    batches: Ids = []
    for _ in range(num_steps):
        rows = [
            [next(iter(loader))["id"].tolist() for _ in range(loader.gradient_accumulation_steps)] for loader in ranks
        ]
        batches.append([i for rank in rows for micro_batch in rank for i in micro_batch])
    return batches


def after(state: State, weights: dict[str, float], num_steps: int) -> Ids:
    """Return what one rank delivers with the given weights, from a state on."""
    [loader] = loaders(weights)
    loader.load_state_dict(state)
    return steps([loader], num_steps)


def served(loader: rd.DataLoader) -> Iterator[tuple[list[int], State]]:
    """Yield the tokens of each batch, with the state after it."""
    for batch in loader:
        yield batch["tokens"].flatten().tolist(), loader.state_dict()


def is_between_documents(state: State) -> bool:
    shards = opened(state)["shards"]
    return not any(shards[key].item() for key in shards if key.split(".")[-1] in ("emitted", "offset", "piece"))


@pytest.mark.parametrize("rested", [False, True])
def test_a_source_that_goes_is_named_and_what_it_had_begun_too(rested: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Of a window: not where the source had weight 0 for a while. One that is added begins with its first row."""

    def packed(weights: dict[str, float], shard: rd.Shard) -> rd.BaseNode[Any]:
        return rd.WholeDocumentPacker(mixture(shard, weights), column="tokens", seq_len=16, window=7, pad_id=0)

    state: State | None = None
    for web, num_batches in [(0.5, 10), (0.0, 41)][: 1 + rested]:
        loader = alone(partial(packed, {"web": web, "code": 0.5}), state, repeat=True)
        state = next(
            s for i, (_, s) in enumerate(served(loader), 1) if i >= num_batches and not is_between_documents(s)
        )
    with caplog.at_level(logging.WARNING, "rescale_data"):
        loader = alone(partial(packed, {"books": 0.5, "code": 0.5}), state, repeat=True)
    assert "These sources begin with their first row: ['source.books']" in caplog.text
    assert "These are gone, with their positions: ['source.web']" in caplog.text
    assert ("begin it again" in caplog.text) != rested
    shards, before = opened(loader.state_dict())["shards"], opened(state)["shards"]
    assert not [key for key in shards if "web" in key]
    assert shards["source.books.row"].item() == 0
    assert shards["source.code.row"].item() <= before["source.code.row"].item()


def opened_with(weights: Any = ALL, above: Any = None, shuffle: int = 4, **kwargs: Any) -> rd.DataLoader:
    """Open a loader of a mixture below a map, and below a node of torchdata where one is given."""

    def pipeline(shard: rd.Shard) -> rd.BaseNode[Any]:
        sources = {name: rd.Reader(SOURCES[name], shard, shuffle=shuffle) for name in weights}
        rows = rd.WeightedSampler(sources, weights, **kwargs)
        return rd.Map(rows if above is None else above(rows), lambda _: {"id": 0})

    return alone(pipeline, repeat=True)


def in_batches(rows: Any) -> Any:
    return Batcher(rows, 2)


def in_batches_and_back(rows: Any, size: int = 2) -> Any:
    return Unbatcher(Batcher(rows, size))


def mapped(rows: Any) -> Any:
    return Mapper(rows, dict)


HALF, MOST = {"web": 0.5, "code": 0.5}, {"web": 0.9, "code": 0.1}
BY_TOKENS = {"unit": "tokens", "column": "tokens"}
FIXED = "weights: web: saved 0.5.* may not below other nodes of torchdata than Mapper"


@pytest.mark.parametrize(
    ("saved", "now", "words"),
    [
        ({}, BY_TOKENS, "source.since.* is new"),
        ({}, {"weights": {"web": 1.0}, **BY_TOKENS}, "source.since.* is new"),
        ({}, {"stop": "first"}, "stop: saved"),
        ({}, {"weights": {"web": 1.0}, "stop": "first"}, "stop: saved"),
        ({}, {"weights": {"web": 1.0}, "shuffle": 5}, "source.web: shuffle: saved 4, now 5"),
        ({"above": in_batches_and_back}, {"above": partial(in_batches_and_back, size=3)}, "batch_size"),
        ({"weights": HALF, "above": in_batches}, {"weights": MOST, "above": in_batches}, FIXED),
        ({"weights": HALF, "above": in_batches_and_back}, {"weights": MOST, "above": in_batches_and_back}, FIXED),
    ],
)
def test_nothing_else_may_change(saved: dict[str, Any], now: dict[str, Any], words: str) -> None:
    """Nor weights below a node of torchdata that keeps samples."""
    with pytest.raises(rd.DataStateError, match=words):
        opened_with(**now).load_state_dict(opened_with(**saved).state_dict())


def test_weights_below_a_mapper_of_torchdata_may_change_and_another_pipeline_delivered_nothing() -> None:
    state = opened_with(HALF, mapped).state_dict()
    opened_with(MOST, mapped).load_state_dict(state)
    opened_with(HALF, mapped).load_state_dict(state, delivered=4)
    with pytest.raises(rd.DataStateError, match="the pipeline has changed since the state was saved"):
        opened_with(MOST, mapped).load_state_dict(state, delivered=4)


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


def plainly(path: Path, loader: rd.DataLoader) -> None:
    checkpoint.check_checkpoint(path, loader)
    dcp.load({"loader": loader}, checkpoint_id=path, no_dist=True)


def with_the_package(path: Path, loader: rd.DataLoader) -> None:
    checkpoint.load(path, {"loader": loader})


ADDED_OR_GONE: list[tuple[dict[str, float], str]] = [
    (ALL, r"'source.books'\] are new"),
    ({"web": 1.0}, r"'source.code'\] gone"),
]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
class TestCheckpoint:
    """Through torch.distributed.checkpoint, without a process group."""

    @pytest.fixture
    def saved(self, tmp_path: Path) -> State:
        """The state that lies in ``tmp_path``."""
        [loader] = loaders({"web": 0.5, "code": 0.5})
        steps([loader], 4)
        dcp.save({"loader": loader}, checkpoint_id=tmp_path, no_dist=True)
        return loader.state_dict()

    @pytest.mark.parametrize(
        ("weights", "load"),
        [
            ({"web": 0.9, "code": 0.1}, plainly),
            ({"books": 0.5, "web": 0.5}, plainly),  # the table has as many columns, found by their names
            (ALL, with_the_package),
            ({"web": 1.0}, with_the_package),
        ],
    )
    def test_what_a_plain_load_takes_and_what_those_of_this_package_do(
        self, saved: State, tmp_path: Path, weights: dict[str, float], load: Callable[[Path, rd.DataLoader], None]
    ) -> None:
        [loader] = loaders(weights)
        load(tmp_path, loader)
        assert steps([loader], 5) == after(saved, weights, 5)

    @pytest.mark.parametrize("topology", TOPOLOGIES)
    @pytest.mark.parametrize(("weights", "said"), ADDED_OR_GONE)
    def test_an_added_or_removed_source_takes_one_call(
        self, saved: State, tmp_path: Path, topology: tuple[int, int], weights: dict[str, float], said: str
    ) -> None:
        ranks = loaders(weights, topology)
        with pytest.raises(rd.DataStateError, match=f"{said}.*load_changed"):
            plainly(tmp_path, ranks[0])
        with pytest.raises(CheckpointException, match=r"Size mismatch between saved .* for loader.table"):
            dcp.load({"loader": loaders(weights)[0]}, checkpoint_id=tmp_path, no_dist=True)
        for loader in ranks:
            checkpoint.load_changed(tmp_path, loader)
        assert steps(ranks, 5) == after(saved, weights, 5)

    def test_load_changed_is_strict_about_the_rest(self, saved: State, tmp_path: Path) -> None:
        with pytest.raises(rd.DataStateError, match="stop: saved"):
            checkpoint.load_changed(tmp_path, loaders(ALL, stop="first")[0])
        with pytest.raises(FileNotFoundError, match=r"No checkpoint at .*none"):
            checkpoint.load_changed(tmp_path / "none", loaders(ALL)[0])


# Samples that change their form: a longer context, labels, another dtype; each at another topology


N = 12
LENGTHS = np.random.default_rng(3).integers(1, 60, 400)
DOCUMENTS = rd.DatasetSource([{"tokens": 100 * i + np.arange(1, n + 1)} for i, n in enumerate(LENGTHS)], name="docs")
WORLDS = (4, 2, 3, 1, 6)
Tokens = dict[int, list[int]]


def form_loaders(packer: Any, world_size: int = 1, state: Any = None, **form: Any) -> list[rd.DataLoader]:
    form = {"column": "tokens", "eos_id": 0, **form}

    def pipeline(shard: rd.Shard) -> rd.BaseNode[Any]:
        return rd.Map(packer(rd.Reader(DOCUMENTS, shard), **form), dict)

    return ranks_of(pipeline, world_size, state, num_logical_shards=N)


Segments = list[tuple[dict[str, Any], int, int]]


def play(packer: Any, segments: Segments) -> tuple[dict[int, list[Any]], list[rd.DataLoader], float]:
    """Samples by shard, the form_loaders of the last segment, and the tokens that were in all samples."""
    state, found, tokens = None, defaultdict(list), 0
    ranks: list[rd.DataLoader] = []
    for form, world_size, num_steps in segments:
        ranks = form_loaders(packer, world_size, state, **form)
        for shard, samples in samples_by_shard(ranks, num_steps).items():
            found[shard] += samples
        tokens += num_steps * BATCH * form["seq_len"]
        state = full_state_dict(ranks)
    return found, ranks, tokens


def counted(ranks: list[rd.DataLoader]) -> float:
    return sum(loader.progress()["tokens/docs"] for loader in ranks)


def segments(forms: st.SearchStrategy[dict[str, Any]], max_size: int = 4) -> st.SearchStrategy[Segments]:
    return st.lists(st.tuples(forms, st.sampled_from(WORLDS), st.integers(0, 4)), min_size=2, max_size=max_size)


FORMS = st.fixed_dictionaries(
    {"seq_len": st.sampled_from([64, 256, 16])},
    optional={
        "labels": st.booleans(),
        "doc_ids": st.booleans(),
        "dtype": st.sampled_from([torch.int64, torch.int32]),
        "last": st.sampled_from(["drop", "pad"]),
    },
)
THROUGH = [({"seq_len": 64}, 4, 2), ({"seq_len": 256, "labels": True}, 2, 1), ({"seq_len": 64}, 3, 3)]
some = settings(max_examples=max(4, settings().max_examples // 6))


@given(segments(FORMS))
@example(THROUGH)
@some
def test_the_tokens_of_each_shard_end_to_end_are_those_of_an_uninterrupted_read(chain: Segments) -> None:
    found, ranks, tokens = play(rd.TokenPacker, chain)
    for shard, samples in found.items():
        given_tokens = torch.cat([sample["tokens"].long() for sample in samples]).tolist()
        rows = rd.Reader(DOCUMENTS, rd.Shard(shard, N, repeat=True))
        node = rd.TokenPacker(rows, column="tokens", eos_id=0, seq_len=8)
        assert given_tokens == torch.cat([next(node)["tokens"] for _ in range(len(given_tokens) // 8)]).tolist()
        for sample in samples:
            if "labels" in sample:
                assert sample["labels"][:-1].tolist() == sample["tokens"][1:].tolist()
    assert counted(ranks) == tokens


def test_one_warning_names_old_new_and_the_sample(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "rescale_data"):
        _, ranks, _ = play(rd.TokenPacker, THROUGH[:2])
    said = [record.getMessage() for record in caplog.records if "another form" in record.getMessage()]
    assert len(said) == 1  # of two ranks the first speaks
    assert "source: labels was False up to sample 24, and is True from there; source: seq_len was 64 up" in said[0]
    state = full_state_dict(ranks)
    [again] = form_loaders(rd.TokenPacker, state=state, seq_len=256, labels=True)
    assert opened(again.state_dict())["pipeline"] == opened(state)["pipeline"]  # what was before is kept
    assert opened(state)["pipeline"]["source"]["earlier"] == [[24, {"seq_len": 64, "shards": 12, "tokens": 24 * 64}]]
    again.reset()
    assert "earlier" not in str(opened(again.state_dict())["pipeline"])


def within(rows: Any, *, seq_len: int, **form: Any) -> rd.BaseNode[Any]:
    """A packer below another one, which draws its samples again."""
    return rd.WholeDocumentPacker(rd.TokenPacker(rows, seq_len=seq_len, **form), column="tokens", seq_len=64, window=4)


@pytest.mark.parametrize(
    ("packer", "other", "words"),
    [
        (rd.TokenPacker, {"eos_id": 1}, "eos_id"),
        (rd.TokenPacker, {"bos_id": 2}, "bos_id"),
        (rd.TokenPacker, {"column": "others"}, "column"),
        (within, {"seq_len": 8}, "source: seq_len: saved 16, now 8"),
    ],
)
def test_what_would_be_other_tokens_is_an_error(packer: Any, other: dict[str, Any], words: str) -> None:
    [saved] = form_loaders(packer, seq_len=16)
    with pytest.raises(rd.DataStateError, match=words):
        form_loaders(packer, state=saved.state_dict(), **{"seq_len": 16, **other})


def test_a_third_change_within_a_window_is_an_error() -> None:
    chain = [({"window": 64, "seq_len": 64 * n}, 1, 1) for n in (1, 2, 3, 4)]
    with pytest.raises(rd.DataStateError, match="third change"):
        play(rd.WholeDocumentPacker, chain)
