"""Nodes that may loop: over endless sources they end with an error that says where."""

import functools
import logging
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from torchdata.nodes import Batcher

import rescale_data as rd
from rescale_data.nodes.foreign import as_node
from tests.nodes.resume import take
from tests.nodes.zoo import FEW, mixture, read, weighted


def never(_: Any) -> bool:
    return False


def fails(*_: Any) -> Any:
    raise ValueError("by hand")


NODES: dict[str, Callable[[Any], rd.BaseNode[Any]]] = {
    "Filter": lambda node: rd.Filter(node, never),
    "Filter-skip": lambda node: rd.Filter(node, fails, on_error="skip"),
    "Map": lambda node: rd.Map(node, fails, on_error="skip"),
    "RandomMap": lambda node: rd.RandomMap(node, fails, on_error="skip"),
    "CleanDocuments": lambda node: rd.CleanDocuments(node, "tokens", min_length=1000),
    "Tokenize": lambda node: rd.Tokenize(node, fails, "text", on_error="skip"),
}


def cut(node: Any) -> rd.BaseNode[Any]:
    return rd.TokenPacker(node, column="tokens", seq_len=8, eos_id=None)


@pytest.mark.parametrize("name", NODES)
@pytest.mark.parametrize("resting", [False, True])
@pytest.mark.parametrize("above", [lambda node: node, cut], ids=["alone", "packer"])
def test_over_a_mixture_without_an_end(name: str, resting: bool, above: Any) -> None:
    """Also where a source rests, and below another node."""
    weights = {"web": 1.0, "code": 0.0 if resting else 0.2}
    mixed = mixture(rd.Shard(2, 5), weights)
    node = above(NODES[name](mixed if above is cut else rd.Map(mixed, lambda x: x)))
    with pytest.raises(
        rd.DataStateError, match=f"{name.split('-')[0]} has drawn .* code, web in logical shard 2 of 5 and"
    ):
        next(node)


def test_over_a_torchdata_mixture_without_an_end() -> None:
    below = as_node(weighted(rd.Shard(1, 3), "CYCLE_FOREVER"))
    with pytest.raises(rd.DataStateError, match=r"Filter has drawn .* few in logical shard 1 of 3"):
        next(rd.Filter(below, never))


def whole(node: Any) -> rd.BaseNode[Any]:
    return rd.WholeDocumentPacker(node, column="tokens", seq_len=8, long="drop")


EMPTY = rd.DatasetSource([{"tokens": []}] * 8, name="empty")
HALF_EMPTY = rd.DatasetSource([{"tokens": [1] if i > 3 else []} for i in range(8)], name="half")
LONG = rd.DatasetSource([{"tokens": [1] * 20}] * 8, name="long")
SILENT = rd.Shard(1, 4, repeat=True)


def mixed(source: rd.DatasetSource, unit: Any, **others: Any) -> rd.BaseNode[Any]:
    nodes = {"few": rd.Reader(source, SILENT, shuffle=False), **others}
    column = "tokens" if unit == "tokens" else None
    return rd.WeightedSampler(nodes, dict.fromkeys(nodes, 1.0), unit=unit, column=column)


NO_TOKEN = r"'few' of a mixture yielded no token .* logical shard 1 of 4"
TOKENLESS: list[tuple[Callable[[], Any], str]] = [
    (lambda: rd.Reader(EMPTY, SILENT), "no token in 2 whole epochs"),
    (lambda: mixed(EMPTY, "samples"), r"Packer has drawn .* from empty in logical shard 1 of 4"),
    (lambda: mixed(HALF_EMPTY, "tokens"), NO_TOKEN),
    (lambda: mixed(HALF_EMPTY, "tokens", few2=read(FEW, SILENT)), NO_TOKEN),
]


@pytest.mark.parametrize(
    ("packer", "rows", "message"),
    [(packer, *row) for packer in (cut, whole) for row in TOKENLESS]
    + [(whole, lambda: rd.Reader(LONG, SILENT), "no token in 2 whole epochs")],
)
def test_a_packer_that_finds_no_token_is_an_error_that_names_source_and_shard(
    packer: Any, rows: Any, message: str
) -> None:
    """Rows without tokens are samples, so no epoch is silent, and no token ever comes."""
    with pytest.raises(rd.DataStateError, match=message):
        take(packer(rows()), 50)


@pytest.mark.parametrize(("packer", "source"), [(cut, EMPTY), (whole, EMPTY), (whole, LONG)])
def test_an_epoch_without_a_token_is_empty(packer: Any, source: Any) -> None:
    assert list(packer(rd.Reader(source, rd.Shard()))) == []


def test_what_is_rare_is_found() -> None:
    """A source with a small weight, of which alone something is kept."""
    node = rd.Filter(mixture(rd.Shard(), {"web": 1.0, "code": 0.01}), lambda row: row["id"] >= 4000)
    assert [next(node)["id"] // 1000 for _ in range(5)] == [4] * 5


def test_a_filter_that_drops_most_is_warned_about_once(caplog: pytest.LogCaptureFixture) -> None:
    def rare(row: int) -> bool:
        return row % 40 == 0

    def half(row: int) -> bool:
        return row % 2 == 0

    with caplog.at_level(logging.WARNING, "rescale_data"):
        for shard in range(4):
            assert len(list(rd.Filter(rd.Reader(range(9000), rd.Shard(shard, 4)), half)))
        assert "has dropped" not in caplog.text
        for shard in range(4):
            assert len(list(rd.Filter(rd.Reader(range(9000), rd.Shard(shard, 4)), rare)))
    assert caplog.text.count("has dropped") == 1
    assert re.search(r"rare over range\) has dropped 1000 of 10\d\d samples", caplog.text)


ROWS = rd.DatasetSource([{"id": i} for i in range(96)], name="rows")
IN_A_NODE: dict[str, Callable[[Any, rd.Shard], Any]] = {
    "max_epochs": lambda kind, shard: rd.WeightedSampler(
        {"a": rd.Reader(ROWS, shard), "b": rd.Reader(FEW, shard)}, {"a": kind(1), "b": 2}, max_epochs={"a": kind(2)}
    ),
    "shuffle": lambda kind, shard: rd.Reader(ROWS, rd.Shard(shard.index, 8, seed=kind(3)), shuffle=kind(4)),
    "version": lambda kind, shard: rd.Map(rd.Reader(ROWS, shard), dict, version=kind(2)),
    "torchdata": lambda kind, shard: Batcher(rd.Reader(ROWS, shard), kind(3)),
    "synthetic": lambda kind, shard: rd.Reader(rd.SyntheticSource(kind(96), length=kind(4)), shard),
}


@pytest.mark.parametrize("name", IN_A_NODE)
def test_a_numpy_integer_in_a_node_is_an_int(name: str) -> None:
    """The same batches, and states that load into each other."""

    def make(kind: Any) -> rd.DataLoader:
        pipeline = functools.partial(IN_A_NODE[name], kind)
        given: Any = {"timeout": kind(30), "prefetch": kind(2), "micro_batch_size": kind(2), "seed": kind(3)}
        sizes: Any = {"global_batch_size": kind(4), "num_logical_shards": kind(8)}
        return rd.DataLoader(pipeline, repeat=True, collate_fn=str, **sizes, **given)

    one, other = make(int), make(np.int64)
    for _ in range(3):
        assert next(iter(one)) == next(iter(other))
    one.load_state_dict(other.state_dict())
    other.load_state_dict(one.state_dict())


def test_a_dataset_with_a_state_is_warned_about_once(caplog: pytest.LogCaptureFixture) -> None:
    class Counting(list[int]):
        def state_dict(self) -> Any: ...
        def load_state_dict(self, state: Any) -> None: ...

    for _ in range(2):
        rd.DatasetSource(Counting(range(5)))
    assert caplog.text.count("state_dict and load_state_dict, which are not called") == 1
