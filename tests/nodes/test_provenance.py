"""Which documents were in the batch of a step."""

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rescale_data as rd
from tests.corpus import documents, write
from tests.laws.tables import letters as by_letters
from tests.nodes.zoo import CODE, WEB, fails_on_some, read

SOURCES = {"web": WEB, "code": CODE}
PACKERS = {"cut": rd.TokenPacker, "whole": functools.partial(rd.WholeDocumentPacker, window=5)}


def cleaned(packer: str, provenance: bool, shard: rd.Shard) -> rd.BaseNode[Any]:
    """Two corpora, mixed, cleaned and packed."""
    nodes = {name: read(source, shard, provenance=provenance) for name, source in SOURCES.items()}
    rows = rd.CleanDocuments(rd.WeightedSampler(nodes, {"web": 2, "code": 1}), "tokens", max_length=5)
    return PACKERS[packer](rows, column="tokens", seq_len=8, eos_id=None)


def loader(pipeline: Any) -> rd.DataLoader:
    return rd.DataLoader(pipeline, global_batch_size=4, num_logical_shards=4, repeat=True)


@pytest.mark.parametrize("packer", PACKERS)
def test_a_step_is_answered_by_another_run_without_training(packer: str) -> None:
    trained = loader(functools.partial(cleaned, packer, False))
    token_of = {
        token: f"{source.name}: {source.locate(i)}"
        for source in SOURCES.values()
        for i in range(source.num_rows)
        for token in source.row(i)["tokens"].tolist()
    }
    batches = iter(trained)
    for _ in range(5):
        next(batches)
    saved = trained.state_dict()
    seen = [next(batches)["tokens"].tolist() for _ in range(4)]
    asked = loader(functools.partial(cleaned, packer, True))
    for step in (8, 5, 7):
        asked.load_state_dict(saved)
        found = documents_of(asked, step)
        assert found == [list(dict.fromkeys(token_of[t] for t in row if t)) for row in seen[step - 5]]
    assert documents_of(loader(functools.partial(cleaned, packer, True)), 7) == found


def documents_of(asked: rd.DataLoader, step: int) -> list[list[str]]:
    """Of each sample of a step; pieces of one document come side by side."""
    asked.skip((step - asked.step) * 4)
    return [list(dict.fromkeys(lines.splitlines())) for lines in next(iter(asked))["provenance"]]


def test_lines_name_source_file_and_row(tmp_path: Path) -> None:
    source = write("parquet", tmp_path / "corpus", documents([3] * 9))
    rows = list(rd.Reader(source, rd.Shard(), shuffle=False, provenance=True))
    assert rows[8]["provenance"] == f"corpus: {tmp_path / 'corpus' / '001.parquet'}, row 1"
    node = rd.TokenPacker(
        rd.Reader(source, rd.Shard(), shuffle=False, provenance=True), column="tokens", seq_len=7, eos_id=None
    )
    assert [line.rpartition(" ")[2] for line in next(node)["provenance"].splitlines()] == ["0", "1", "2"]
    assert [line.rpartition(" ")[2] for line in next(node)["provenance"].splitlines()] == ["2", "3", "4"]


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_functions_hand_it_on(on_error: Any) -> None:
    rows = rd.Map(read(WEB, rd.Shard(), provenance=True), lambda row: {"text": row["text"]}, on_error=on_error)
    rows = rd.Tokenize(rd.RandomMap(rows, lambda row, rng: {"text": row["text"]}), by_letters, "text")
    assert sorted(row["provenance"] for row in rows) == sorted(f"web: web[{i}]" for i in range(WEB.num_rows))


def test_a_function_may_set_its_own() -> None:
    rows = rd.Map(read(WEB, rd.Shard(), provenance=True), lambda row: {"provenance": "mine"})
    assert next(rows) == {"provenance": "mine"}


@pytest.mark.parametrize("packer", [rd.TokenPacker, rd.WholeDocumentPacker])
def test_of_some_sources_only(packer: Any) -> None:
    def pipeline(shard: rd.Shard) -> rd.BaseNode[Any]:
        nodes = {name: read(WEB, shard, provenance=name == "b") for name in "abc"}
        return packer(rd.WeightedSampler(nodes, dict.fromkeys("abc", 1)), column="tokens", seq_len=8, eos_id=1)

    with pytest.raises(ValueError, match=r"of \['source.b'\] come .* of \['source.a', 'source.c'\] do not. Give"):
        loader(pipeline)


# What nodes report of an epoch, summed over logical shards: DataLoader.progress


ROWS = rd.DatasetSource([{"id": i, "tokens": [i] * n} for i, n in enumerate([5, 1, 20, 5] * 6)], name="rows")


def ids(node: rd.BaseNode[Any]) -> rd.BaseNode[Any]:
    return rd.Map(node, lambda row: {"id": row["id"]})


def masked(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "loss_mask": [row["id"] % 3 > 0] * len(row["tokens"])}


def cut(node: rd.BaseNode[Any], **given: Any) -> rd.BaseNode[Any]:
    return rd.TokenPacker(node, column="tokens", seq_len=4, **{"eos_id": None, **given})


def whole(node: rd.BaseNode[Any], long: Any) -> rd.BaseNode[Any]:
    return rd.WholeDocumentPacker(node, column="tokens", seq_len=8, window=6, long=long)


REPORTS: dict[str, tuple[Callable[[rd.Reader], rd.BaseNode[Any]], Mapping[str, float]]] = {
    "Reader": (ids, {"rows/rows": 24, "epoch_min/rows": 1, "epoch_max/rows": 1, "skipped_rows": 0}),
    "Filter": (lambda rows: ids(rd.Filter(rows, lambda row: row["id"] % 3 != 1)), {"filtered_rows": 8}),
    "Map": (lambda rows: ids(rd.Map(rows, fails_on_some, on_error="skip")), {"skipped_rows": 5}),
    "CleanDocuments": (lambda rows: cut(rd.CleanDocuments(rows, "tokens", min_length=2)), {"short_documents": 6}),
    "TokenPacker": (cut, {"tokens/rows": 2 * 92, "rows/rows": 24}),
    "untrained": (
        lambda rows: cut(rd.Map(rows, masked), columns={"loss_mask": torch.bool}),
        {"untrained_documents": 8, "cut_documents": 18},
    ),
    "truncating": (
        lambda rows: whole(rows, "truncate"),
        {"truncated_documents": 6, "tokens/rows": 12 * 5 + 6 * 8 + 6, "padding_share/rows": 1 - 114 / (18 * 8)},
    ),
    "splitting": (lambda rows: whole(rows, "split"), {"split_documents": 6, "tokens/rows": 186}),
    "dropping": (lambda rows: whole(rows, "drop"), {"dropped_documents": 6, "tokens/rows": 66}),
}


@pytest.mark.parametrize("name", REPORTS)
def test_an_epoch_is_reported(name: str) -> None:
    pipeline, expected = REPORTS[name]
    loader = rd.DataLoader(
        lambda shard: pipeline(rd.Reader(ROWS, shard)), global_batch_size=2, num_logical_shards=2, tail="pad"
    )
    list(loader)
    progress = loader.progress()
    assert {key: progress[key] for key in expected} == pytest.approx(expected)


def test_epochs_and_rows_of_shards_that_stand_apart() -> None:
    reader = rd.Reader(ROWS, rd.Shard(0, 2))
    progress = reader.progress(np.array([[0, 3, 0], [2, 1, 5]]), np.arange(2), np.array([3, 11]))
    assert progress == {"rows/rows": 28.0, "epoch_min/rows": 0.0, "epoch_max/rows": 2.0, "skipped_rows": 5.0}
