"""R1 to R7 for every source: chains of topologies, aligned and not, with each batch compared to an uninterrupted run."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import rescale_data as rd
from rescale_data.sources import arrow, indexed, megatron
from rescale_data.testing import assert_rescalable
from tests.formats import write_jsonl, write_megatron, write_table, write_tar
from tests.nodes.resume import plain

DOCS = [[1000 * i + j for j in range(i % 11 + 1)] for i in range(200)]
FORMATS = ["parquet", "arrow", "jsonl", "jsonl.gz", "tar", "megatron", "synthetic", "dataset"]
GLOBAL_BATCH = 12


def tokens_of_json(sample: dict[str, Any]) -> dict[str, Any]:
    return {"tokens": np.array(json.loads(sample["json"]), dtype=np.int64)}


def make_source(kind: str, folder: Path) -> rd.Source:
    """`DOCS` in two files of several fragments."""
    if kind == "synthetic":
        return rd.SyntheticSource(200, length=(1, 11))
    if kind == "dataset":
        return rd.DatasetSource([{"tokens": np.array(doc)} for doc in DOCS])
    for name, docs in (("a", DOCS[:130]), ("b", DOCS[130:])):
        path = folder / f"{name}.{kind}"
        if kind in ("parquet", "arrow"):
            write_table(path, {"tokens": pa.array(docs, pa.list_(pa.int32()))}, 17)
        elif kind == "tar":
            write_tar(path, [{"json": json.dumps(doc).encode()} for doc in docs])
        elif kind == "megatron":
            write_megatron(folder / name, docs, "int32")
        else:
            write_jsonl(path, [{"tokens": doc} for doc in docs])
    kinds: dict[str, Any] = {
        "parquet": rd.ParquetSource,
        "arrow": rd.ArrowSource,
        "tar": rd.WebDatasetSource,
        "megatron": rd.MegatronSource,
    }
    source: rd.Source = kinds.get(kind, rd.JsonlSource)(folder)
    return source


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


def as_text(samples: list[dict[str, Any]]) -> list[str]:
    return [repr(plain(row)) for row in samples]


def test_the_same_corpus_in_all_formats_gives_the_same_batches(sources: Any) -> None:
    """Fragments of the same rows: what the order depends on."""
    found = []
    for kind in ("parquet", "arrow", "jsonl", "jsonl.gz", "tar", "megatron"):
        loader = loader_of(partial(packed, source=sources[kind], kind=kind), 0, 1, 4, 0)
        batches = iter(loader)
        found.append(torch.cat([next(batches)["tokens"] for _ in range(30)]))
    assert all(torch.equal(batch, found[0]) for batch in found)
