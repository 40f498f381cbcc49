"""Documents in blocks, through any nodes: what comes out, and where it stands, is as if they came one at a time."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import rescale_data as rd
from rescale_data.nodes.base import Node, initial, slots_of
from rescale_data.nodes.mixture import mixed_documents
from rescale_data.nodes.reading import fragment_documents
from rescale_data.nodes.reading.fragment_documents import FragmentDocuments
from tests.corpus import listed, write
from tests.formats import write_jsonl, write_table
from tests.laws.tables import letters as by_letters
from tests.nodes.resume import plain

SHARD = {"index": 1, "num_logical_shards": 3}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Of several sizes and kinds, with documents of 0 to 12 tokens; one has rows in some epochs only, the last have texts."""
    folder, rng = tmp_path_factory.mktemp("mixed"), np.random.default_rng(0)
    found: list[Any] = []
    for number, rows in enumerate((60, 17, 9, 2)):
        lengths = rng.integers(0, 13, rows) if number else rng.integers(3, 6, rows)
        docs = [rng.integers(100 * number, 100 * number + 99, n).tolist() for n in lengths]
        found.append(write("parquet" if number == 1 else "arrow", folder / str(number), docs, rows, 7))
    found.append(rd.DatasetSource([{"tokens": np.arange(n % 5), "id": n} for n in range(25)], name="rows"))
    texts = [{"text": "abc" * (n % 4)} for n in range(25)]
    found.append(rd.JsonlSource(write_jsonl(folder / "texts.jsonl", texts)))
    found.append(rd.DatasetSource(texts, name="texts"))
    found.append(rd.ParquetSource(write_table(folder / "texts.parquet", pa.Table.from_pylist(texts), 7)))
    return found


def build(what: Any, sources: list[Any], weights: list[float]) -> Node[Any]:
    chosen, below, stop, unit, above, packer, repeat, verify, feature, nested = what
    shard, nodes = rd.Shard(**SHARD, repeat=repeat, verify=verify), dict[str, Any]()
    for number, (at, kind) in enumerate(zip(chosen, below, strict=False)):
        blocked = listed(sources[at], range(0, sources[at].num_rows, 3)) if kind == "blocked" else None
        node: Any = rd.Reader(sources[at], shard, shuffle=5, exclude=blocked)
        if at >= 5:
            node = rd.Tokenize(node, by_letters, "text", batch_size=4)
        nodes[f"s{number}"] = _through(kind, node)
    given: Any = dict(zip(nodes, weights, strict=False))
    max_epochs: Any = None
    if feature == "schedule":
        given = rd.Schedule([(0, given), (30, {**given, "s0": 2.0}), (200, {**given, "s0": 0.1})], "linear")
    elif feature:
        readers = {name: next(n for _, n in node.walk() if isinstance(n, rd.Reader)) for name, node in nodes.items()}
        large = [name for name in [*nodes][1:] if not (repeat and readers[name].rows.is_small)]
        max_epochs = {name: 1 + number for number, name in enumerate(large)}
    column = "tokens" if unit == "tokens" else None
    mixture: Any = rd.WeightedSampler(nodes, given, unit=unit, column=column, stop=stop, max_epochs=max_epochs)
    if nested == "alone":
        mixture = nodes["s0"]
    elif nested:
        more = {name: rd.Reader(sources[at], shard) for at, name in enumerate("az")}
        column = column if nested == "as below" else None
        mixture = rd.WeightedSampler(
            {**more, "inner": mixture},
            {"a": 1, "z": 0.2, "inner": 2},
            unit="tokens" if column else "samples",
            column=column,
        )
    # Pieces of a document that follows blocked rows are of the row before these or behind them; either begins it.
    top = _through("" if above == "clean" and "blocked" in below[: len(chosen)] else above, mixture)
    if packer == "whole":
        return rd.WholeDocumentPacker(top, column="tokens", seq_len=16, window=5)
    form: Any = {"eos_id": None, "last": "pad", "pad_id": 0} if packer == "pad" else {"eos_id": 1}
    return rd.TokenPacker(top, column="tokens", seq_len=3 if packer == "pad" else 9, labels=packer == "labels", **form)


def _through(kind: str, node: Any) -> Any:
    if kind == "clean":
        return rd.CleanDocuments(node, "tokens", strip=[101], min_length=2, max_length=4)
    return rd.Filter(node, lambda row: len(row["tokens"]) > 3) if kind == "filter" else node


@contextmanager
def one_by_one() -> Iterator[None]:
    """No node hands over several documents at once."""
    with ExitStack() as stack:
        for kind in (rd.Reader, rd.Filter, rd.CleanDocuments, rd.Tokenize, rd.WeightedSampler):
            stack.enter_context(mock.patch.object(kind, "open_documents", return_value=None))
        yield


@contextmanager
def in_blocks(num_bytes: int) -> Iterator[None]:
    """Few documents are copied at a time, or all are left where they are."""
    with ExitStack() as stack:
        if num_bytes:
            stack.enter_context(mock.patch.object(FragmentDocuments, "_fit_in_cache", return_value=False))
            stack.enter_context(mock.patch.object(fragment_documents, "block_bytes", return_value=num_bytes))
        yield


def drawn(node: Any, position: Any, num: int) -> list[Any]:
    """Samples with the position after each, over the ends of epochs, or the error."""
    found: list[Any] = []
    node.position[:] = position
    node.bind(node.position)
    try:
        while len(found) < num:
            sample = next(node, None)
            found.append((plain(sample), node.position.tolist()))
            if sample is None:
                node.bind(node.position)
    except rd.DataStateError as error:
        if "yielded no" not in str(error) and "had no token" not in str(error) and "kept none" not in str(error):
            raise
        found.append(str(error).split(" in ")[0])
    return found


def assert_alike(found: list[Any], expected: list[Any]) -> None:
    """Up to an error: of a source without tokens it comes when whole epochs of it have been read, which may be ahead."""
    ends = [isinstance(samples[-1], str) for samples in (found, expected)]
    assert ends[0] or not ends[1] or len(found) != len(expected)
    num = min(len(found), len(expected)) - max(ends)
    assert found[:num] == expected[:num]


pipelines = st.tuples(
    st.lists(st.integers(0, 7), min_size=1, max_size=4),
    st.lists(st.sampled_from(["", "", "clean", "filter", "blocked"]), min_size=4, max_size=4),
    st.sampled_from(["never", "never", "first", "all"]),
    st.sampled_from(["samples", "tokens"]),
    st.sampled_from(["", "", "clean", "filter"]),
    st.sampled_from(["cut", "labels", "pad", "whole"]),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["", "", "schedule", "epochs"]),
    st.sampled_from(["", "", "alone", "samples", "as below"]),
)
weights = st.lists(st.sampled_from([0.05, 0.3, 1, 1, 2.5, 7]), min_size=4, max_size=4)


@given(pipelines, weights, weights, st.integers(0, 60), st.sampled_from([0, 30, 2**16]))
@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
def test_blocks_are_documents_one_by_one(
    sources: list[Any], what: Any, first: list[float], second: list[float], at: int, num_bytes: int
) -> None:
    """Bit for bit, in every sample and position, also after weights have changed at any of them, and out of copies."""
    second = first if "schedule" in what else second  # what has been drawn of one cannot change
    blocks = build(what, sources, first)
    with one_by_one():
        single = build(what, sources, first)
        changed = build(what, sources, second)
    expected = drawn(single, initial(single), 80)
    with in_blocks(num_bytes):
        assert_alike(drawn(blocks, initial(blocks), 80), expected)
    places = [entry[1] for entry in expected if isinstance(entry, tuple)]
    if places:
        place = np.array(places[at % len(places)])
        many = build(what, sources, second)
        for node in (many, changed):
            tell_of(node, single, place)
        with in_blocks(num_bytes):
            assert_alike(drawn(many, place, 12), drawn(changed, place, 12))


@pytest.mark.parametrize("unit", ["samples", "tokens"])
@pytest.mark.parametrize("nested", ["", "samples", "as below"])
@pytest.mark.parametrize("feature", ["schedule", "epochs"])
def test_a_mixture_whose_weights_change_has_blocks(sources: list[Any], feature: str, nested: str, unit: str) -> None:
    blocks = build(
        ([0, 1, 0], [""] * 4, "never", unit, "", "cut", True, False, feature, nested), sources, [1, 1, 2.5, 1]
    )
    has_none = blocks.children["source"].open_documents("tokens") is None
    assert has_none == (nested == "as below" and unit == "tokens")


def tell_of(node: Node[Any], before: Node[Any], place: Any) -> None:
    """Tell mixtures of the rules that there were, as a load does."""
    for (path, new), (_, old) in zip(node.walk(), before.walk(), strict=True):
        if isinstance(new, rd.WeightedSampler):
            new.use_history(new.earlier_parameters(old.parameters(), place[None, slots_of(node, path)]))


@pytest.mark.parametrize("unit", ["samples", "tokens"])
def test_many_sources_are_read_together_and_each_seldom(
    unit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also at first, and over the ends of their epochs: each read costs as much as dozens of documents."""
    num, asked, alone = 40, [0], list[Any]()
    find_decoded, read = FragmentDocuments.find_decoded, FragmentDocuments.read

    def count(self: Any, *args: Any) -> Any:
        asked[0] += 1
        return find_decoded(self, *args)

    def count_alone(self: Any, *args: Any) -> Any:
        alone.append(self)
        return read(self, *args)

    monkeypatch.setattr(FragmentDocuments, "find_decoded", count)
    monkeypatch.setattr(FragmentDocuments, "read", count_alone)
    docs = [[row] * 8 for row in range(30)]
    readers = {f"{i:02d}": rd.Reader(write("arrow", tmp_path / f"{i}", docs, 30, 7), rd.Shard()) for i in range(num)}
    column = "tokens" if unit == "tokens" else None
    mixture = rd.WeightedSampler(readers, dict.fromkeys(readers, 1.0), unit=unit, column=column)
    samples = iter(rd.TokenPacker(mixture, column="tokens", seq_len=90, eos_id=0))
    for _ in range((16 + (1 + 4 + 16) * 16 * num) // 10 - 20):
        next(samples)
    assert 2 * num < asked[0] <= 16 + 3 * num
    assert len(alone) <= (16 if unit == "samples" else 16 + num)


def test_one_read_of_sources_of_few_rows_asks_them_a_bounded_number_of_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a batch waits for thousands of epochs of a row or two."""
    asked = [0]
    fill, draw = mixed_documents.SourceBuffer.read_documents, mixed_documents.MixedDocuments._draw_documents

    def count(self: Any, *args: Any) -> Any:
        asked[-1] += 1
        return fill(self, *args)

    def begin(self: Any, *args: Any) -> Any:
        asked.append(0)
        return draw(self, *args)

    monkeypatch.setattr(mixed_documents.SourceBuffer, "read_documents", count)
    monkeypatch.setattr(mixed_documents.MixedDocuments, "_draw_documents", begin)

    def pipeline(shard: rd.Shard) -> Any:
        readers = {name: rd.Reader([{"tokens": [i] * 3} for i in range(4)], shard) for name in "ab"}
        return rd.TokenPacker(rd.WeightedSampler(readers, {"a": 1, "b": 1}), column="tokens", seq_len=64, eos_id=9)

    batches = iter(rd.DataLoader(pipeline, global_batch_size=2, num_logical_shards=2, repeat=True))
    for _ in range(200):
        next(batches)
    assert 128 <= max(asked) <= 258
