"""What a process keeps for a mixture of many sources: little for a shard and source that nobody draws from."""

import gc
import itertools
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import rescale_data as rd
from rescale_data.sources.decoded.cache import cache
from rescale_data.sources.parquet import ParquetSource

SOURCES, SHARDS, ROWS, GROUP = 30, 32, 128, 32


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("corpora")
    for number in range(SOURCES):
        tokens = [[number * ROWS + row] * 60 for row in range(ROWS)]
        pq.write_table(pa.table({"tokens": tokens}), folder / f"{number:02d}.parquet", row_group_size=GROUP)
    return sorted(folder.iterdir())


def sources_of(paths: list[Path], **given: Any) -> dict[str, ParquetSource]:
    gc.collect()
    cache().clear()
    return {path.stem: ParquetSource(path, **given) for path in paths}


def loader(sources: dict[str, ParquetSource], packed: bool) -> rd.DataLoader:
    def pipeline(shard: rd.Shard) -> rd.BaseNode[Any]:
        readers = {name: rd.Reader(source, shard) for name, source in sources.items()}
        mixture = rd.WeightedSampler(readers, dict.fromkeys(sources, 1.0))
        return rd.TokenPacker(mixture, column="tokens", seq_len=300, eos_id=0) if packed else mixture

    return rd.DataLoader(pipeline, global_batch_size=SHARDS, num_logical_shards=SHARDS, repeat=True)


@pytest.mark.parametrize(("packed", "most"), [(False, 1000), (True, 1300)])
def test_what_a_shard_and_source_takes_beside_the_cache(corpora: list[Path], packed: bool, most: int) -> None:
    sources = sources_of(corpora, cache_bytes=2**14)
    next(iter(loader(sources, packed)))
    cache().clear()
    tracemalloc.start()
    try:
        again = loader(sources, packed)
        for _ in itertools.islice(again, 8):
            pass
        gc.collect()
        kept = tracemalloc.get_traced_memory()[0] / (SOURCES * SHARDS)
    finally:
        tracemalloc.stop()
    assert kept < most
