"""Which documents were in the batch of a step."""

import functools
from pathlib import Path
from typing import Any

import pytest

import rescale_data as rd
from tests.corpus import documents, write
from tests.nodes.zoo import CODE, WEB, by_letters, read

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
