"""`CleanDocuments`: one document at a time and many at a time are the same."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rescale_data as rd
from tests.corpus import write
from tests.nodes.resume import assert_ends, assert_resumes, take

documents = st.lists(st.lists(st.sampled_from([0, 1, 7, 8, 9]), max_size=9), min_size=2, max_size=20)
cleanings = st.fixed_dictionaries(
    {
        "strip": st.sampled_from([(), (0,), (0, 1)]),
        "min_length": st.integers(0, 3),
        "max_length": st.sampled_from([None, 3, 5]),
    }
)


def naive(document: list[int], strip: tuple[int, ...], min_length: int, max_length: int | None) -> list[list[int]]:
    while document and document[0] in strip:
        document = document[1:]
    while document and document[-1] in strip:
        document = document[:-1]
    if len(document) < min_length:
        return []
    step = max_length or len(document) or 1
    return [document[i : i + step] for i in range(0, len(document), step)] or [[]]


def reader(docs: list[list[int]], shard: rd.Shard | None = None) -> rd.Reader:
    rows = [{"tokens": np.array(doc, dtype=np.uint16), "id": i} for i, doc in enumerate(docs)]
    return rd.Reader(rows, shard or rd.Shard(), shuffle=False)


@given(documents, cleanings)
@settings(max_examples=100)
def test_is_what_the_arguments_say(docs: list[list[int]], cleaning: dict[str, Any]) -> None:
    node = rd.CleanDocuments(reader(docs), "tokens", **cleaning)
    pieces = [(i, piece) for i, doc in enumerate(docs) for piece in naive(doc, **cleaning)]
    assert [(sample["id"], sample["tokens"].tolist()) for sample in node] == pieces
    assert node.get_state()["short"] == sum(not naive(doc, **cleaning) for doc in docs)


@pytest.mark.parametrize("layout", ["arrow", "parquet"])
@pytest.mark.parametrize("cleaning", [{"strip": (10, 18, 19)}, {"min_length": 4}, {"max_length": 3, "min_length": 2}])
def test_many_at_a_time_is_one_at_a_time(layout: str, cleaning: dict[str, Any], tmp_path: Path) -> None:
    """Tokens and positions after each sample, over a reader of decoded fragments and over rows."""
    docs = [list(range(10, 10 + n)) for n in [3, 0, 9, 1, 1, 2, 14, 5, 1, 6, 0, 2, 8, 3, 1]]
    source = write(layout, tmp_path, docs)

    def build(shard: rd.Shard, fast: bool) -> rd.TokenPacker:
        rows = rd.CleanDocuments(rd.Reader(source, shard, shuffle=4), "tokens", **cleaning)
        assert rows.open_documents("tokens") is not None
        if not fast:
            rows.open_documents = lambda column: None  # type: ignore[method-assign]
        return rd.TokenPacker(rows, column="tokens", seq_len=4, eos_id=2, labels=True)

    for repeat in (False, True):
        shard = rd.Shard(1, 2, repeat=repeat)
        fast, slow = build(shard, True), build(shard, False)
        for _ in range(40):
            assert take(fast, 1) == take(slow, 1)
            assert fast.get_state() == slow.get_state()
        assert_resumes(lambda shard=shard: build(shard, True), 25)
    assert_ends(lambda: build(rd.Shard(0, 2), True))


def test_every_piece_keeps_the_other_columns_and_resumes() -> None:
    docs = [list(range(n)) for n in [4, 11, 0, 7, 1]]
    whole = assert_resumes(lambda: rd.CleanDocuments(reader(docs), "tokens", min_length=2, max_length=3), 12)
    assert [sample["id"] for sample in whole[:9]] == [0, 0, 1, 1, 1, 1, 3, 3, 3]
    assert_ends(lambda: rd.CleanDocuments(reader(docs), "tokens", min_length=2, max_length=3))


def test_counts_short_documents() -> None:
    loader = rd.DataLoader(
        lambda shard: rd.TokenPacker(
            rd.CleanDocuments(reader([[1] * (i % 4) for i in range(40)], shard), "tokens", min_length=2),
            column="tokens", seq_len=5, eos_id=0,
        ),
        global_batch_size=2, num_logical_shards=2, dp_rank=0, dp_world_size=1,
    )  # fmt: skip
    list(loader)
    assert loader.progress()["short_documents"] == 20


@pytest.mark.parametrize("kwargs", [{"min_length": -1}, {"max_length": 0}, {"min_length": 5, "max_length": 4}])
def test_bad_arguments(kwargs: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="min_length"):
        rd.CleanDocuments(reader([[1]]), "tokens", **kwargs)


def test_a_sample_without_tokens() -> None:
    with pytest.raises(ValueError, match=r"CleanDocuments\(column='ids'\) was given"):
        list(itertools.islice(rd.CleanDocuments(reader([[1], [2]]), "ids"), 1))
