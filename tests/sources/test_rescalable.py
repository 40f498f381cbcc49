"""R1 to R7 for every source: chains of topologies, aligned and not, with each batch compared to an uninterrupted run."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import rescale_data as rd
from rescale_data.sources import arrow, indexed, megatron
from rescale_data.testing import assert_rescalable
from tests.formats import write_jsonl, write_megatron, write_tar
from tests.states import opened

DOCS = [[1000 * i + j for j in range(i % 11 + 1)] for i in range(200)]
FORMATS = ["parquet", "arrow", "jsonl", "jsonl.gz", "tar", "megatron", "synthetic", "dataset"]
GLOBAL_BATCH = 12


def tokens_of_json(sample: dict[str, Any]) -> dict[str, Any]:
    return {"tokens": np.array(json.loads(sample["json"]), dtype=np.int64)}


def make_source(kind: str, folder: Path) -> rd.Source:
    """`DOCS` in two files of several fragments."""
    folder.mkdir(parents=True, exist_ok=True)
    if kind == "synthetic":
        return rd.SyntheticSource(200, length=(1, 11))
    if kind == "dataset":
        return rd.DatasetSource([{"tokens": np.array(doc)} for doc in DOCS])
    for name, docs in (("a", DOCS[:130]), ("b", DOCS[130:])):
        write_file(kind, folder / name, docs)
    if kind == "tar":
        return rd.WebDatasetSource(folder)
    if kind == "megatron":
        return rd.MegatronSource(folder)
    return {"parquet": rd.ParquetSource, "arrow": rd.ArrowSource}.get(kind, rd.JsonlSource)(folder)


def write_file(kind: str, path: Path, docs: list[list[int]]) -> None:
    table = pa.table({"tokens": pa.array(docs, pa.list_(pa.int32()))})
    if kind == "parquet":
        pq.write_table(table, f"{path}.parquet", row_group_size=17)
    elif kind == "arrow":
        with pa.ipc.new_file(f"{path}.arrow", table.schema) as writer:
            writer.write_table(table, max_chunksize=17)
    elif kind == "tar":
        write_tar(path.with_suffix(".tar"), [{"json": json.dumps(doc).encode()} for doc in docs])
    elif kind == "megatron":
        write_megatron(path, docs, "int32")
    else:
        write_jsonl(path.with_name(f"{path.name}.{kind}"), [{"tokens": doc} for doc in docs])


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(indexed, "FRAGMENT_ROWS", 17)
        patch.setattr(megatron, "FRAGMENT_ROWS", 17)
        patch.setattr(arrow, "MAX_FRAGMENT_ROWS", 17)
        folder = tmp_path_factory.mktemp("formats")
        yield {kind: make_source(kind, folder / kind) for kind in FORMATS}


def rows_of(shard: rd.Shard, source: rd.Source, kind: str, **kwargs: Any) -> rd.BaseNode[Any]:
    from torchdata.nodes import Mapper

    reader = rd.Reader(source, shard, shuffle=8, **kwargs)
    return Mapper(reader, tokens_of_json) if kind == "tar" else reader


def packed(shard: rd.Shard, source: rd.Source, kind: str) -> rd.BaseNode[Any]:
    return rd.TokenPacker(rows_of(shard, source, kind), column="tokens", seq_len=8, eos_id=7)


def loader_of(pipeline: Any, rank: int, world: int, micro: int, workers: int, **kwargs: Any) -> rd.DataLoader:
    kwargs = {"repeat": True, "num_logical_shards": 24, **kwargs}
    return rd.DataLoader(
        pipeline,
        global_batch_size=GLOBAL_BATCH,
        micro_batch_size=micro,
        dp_rank=rank,
        dp_world_size=world,
        num_workers=workers,
        **kwargs,
    )


topologies = st.lists(st.sampled_from([(1, 4, 0), (2, 3, 0), (3, 4, 0), (4, 1, 0), (6, 2, 0)]), min_size=2, max_size=4)


@pytest.mark.parametrize("kind", FORMATS)
@given(chain=topologies, num_logical_shards=st.sampled_from([12, 24, 30]))
@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_packed_samples_rescale(sources: Any, kind: str, chain: Any, num_logical_shards: int) -> None:
    pipeline = partial(packed, source=sources[kind], kind=kind)
    assert_rescalable(partial(loader_of, pipeline, num_logical_shards=num_logical_shards), chain, steps=2)


@pytest.mark.parametrize("kind", FORMATS)
@given(chain=topologies)
@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_rows_rescale_and_are_seen_once(sources: Any, kind: str, chain: Any) -> None:
    """Over an epoch's end; each of three epochs has every document once."""
    pipeline = partial(rows_of, source=sources[kind], kind=kind)
    assert_rescalable(partial(loader_of, pipeline, repeat=False, collate_fn=as_text), chain, steps=9)


MIXED = {
    "text": pa.array([f"Grüße {i} " * (i % 4) for i in range(200)]),
    "maybe": pa.array([None if i % 7 == 0 else i / 3 for i in range(200)]),
    "kind": pa.array([("a", "b", "c")[i % 3] for i in range(200)]).dictionary_encode(),
    "raw": pa.array([bytes([i]) * (i % 3) for i in range(200)]),
    "nested": pa.array([{"tags": ["x"] * (i % 3), "n": i} for i in range(200)]),
    "weights": pa.array([[i / 2] * (i % 5) for i in range(200)], pa.list_(pa.float32())),
}


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Text and whatever else a column may hold."""
    folder, table = tmp_path_factory.mktemp("mixed"), pa.table(MIXED)
    pq.write_table(table, folder / "a.parquet", row_group_size=17)
    with pa.ipc.new_file(
        folder / "a.arrow", table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")
    ) as writer:
        writer.write_table(table, max_chunksize=17)
    return {"parquet": rd.ParquetSource(folder), "arrow": rd.ArrowSource(folder)}


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
@given(chain=topologies)
@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_columns_rescale(mixed: Any, kind: str, chain: Any) -> None:
    pipeline = partial(rows_of, source=mixed[kind], kind=kind)
    assert_rescalable(partial(loader_of, pipeline, collate_fn=as_text), chain, steps=3)
    expected = as_text(pa.table(MIXED).to_pylist())
    assert as_text([mixed[kind].row(i) for i in range(200)]) == expected


def as_text(samples: list[dict[str, Any]]) -> list[str]:
    return [repr({k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in row.items()}) for row in samples]


@pytest.mark.parametrize("kind", ["jsonl.gz", "tar"])
def test_worker_processes(sources: Any, kind: str) -> None:
    pipeline = partial(packed, source=sources[kind], kind=kind)
    assert_rescalable(partial(loader_of, pipeline), [(1, 4, 2), (2, 3, 0)], steps=2)


@pytest.mark.parametrize("kind", FORMATS)
def test_state_is_small_and_the_same_in_every_format(sources: Any, kind: str) -> None:
    loader = loader_of(partial(packed, source=sources[kind], kind=kind), 0, 1, 4, 0)
    next(iter(loader))
    shards = opened(loader.state_dict())["shards"]
    assert sum(tensor.numel() * tensor.element_size() for tensor in shards.values()) <= 64 * 24
    assert all(isinstance(tensor, torch.Tensor) and len(tensor) == 24 for tensor in shards.values())


def test_the_same_corpus_in_all_formats_gives_the_same_batches(sources: Any) -> None:
    """Fragments of the same rows: what the order depends on."""
    found = []
    for kind in ("parquet", "arrow", "jsonl", "jsonl.gz", "tar", "megatron"):
        loader = loader_of(partial(packed, source=sources[kind], kind=kind), 0, 1, 4, 0)
        batches = iter(loader)
        found.append(torch.cat([next(batches)["tokens"] for _ in range(30)]))
    assert all(torch.equal(batch, found[0]) for batch in found)


def test_skipped_rows_are_counted_over_a_chain(tmp_path: Path) -> None:
    rows: list[Any] = [{"n": i} if i % 5 else [i] for i in range(100)]
    source = rd.JsonlSource(write_jsonl(tmp_path / "a.jsonl", rows))
    pipeline = partial(rows_of, source=source, kind="jsonl", on_error="skip")
    assert_rescalable(partial(loader_of, pipeline), [(1, 4, 0), (3, 2, 0), (2, 6, 0)], steps=2)
    loaders = [loader_of(pipeline, r, 2, 3, 0) for r in range(2)]
    batches = [iter(loader) for loader in loaders]
    for _ in range(2 * 2 * 5):
        [next(it) for it in batches]
    drawn = sum(loader.progress()["rows/" + source.name] for loader in loaders)
    skipped = sum(loader.progress()["skipped_rows"] for loader in loaders)
    assert drawn - skipped == 2 * 2 * 5 * 2 * 3
    assert skipped > 10
