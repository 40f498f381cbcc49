"""What a process keeps for a mixture of many sources: little for a shard and source that nobody draws from."""

import gc
import itertools
import logging
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import rescale_data as rd
from rescale_data.nodes.reading.fragment_documents import FragmentDocuments
from rescale_data.sources.decoded.cache import cache
from rescale_data.sources.parquet import ParquetSource

pytestmark = pytest.mark.usefixtures("own_cache")

SOURCES, SHARDS, ROWS, GROUP = 18, 32, 128, 32


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("corpora")
    for number in range(SOURCES):
        tokens = [[number * ROWS + row] * 60 for row in range(ROWS)]
        pq.write_table(pa.table({"tokens": tokens}), folder / f"{number:02d}.parquet", row_group_size=GROUP)
    return sorted(folder.iterdir())


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[str, int]]:
    counts: Counter[tuple[str, int]] = Counter()
    decode = ParquetSource._decode

    def count(self: Any, fragment: int, columns: Any) -> Any:
        counts[self._files.path(0), fragment] += 1
        return decode(self, fragment, columns)

    monkeypatch.setattr(ParquetSource, "_decode", count)
    return counts


def sources_of(paths: list[Path], **given: Any) -> dict[str, ParquetSource]:
    gc.collect()
    cache().clear()
    return {path.stem: ParquetSource(path, **given) for path in paths}


class OneMore(rd.Reader):
    """A user's own, which no other reader stands in for."""

    open_documents = open_texts = skip = epoch_end = None  # type: ignore[assignment]

    def next(self) -> Any:
        sample = super().next()
        return {**sample, "tokens": sample["tokens"] + 1}


def loader(sources: dict[str, ParquetSource], packed: bool, stop: Any = "never") -> rd.DataLoader:
    def pipeline(shard: rd.Shard) -> rd.BaseNode[Any]:
        readers = {name: rd.Reader(source, shard) for name, source in sources.items()}
        mixture = rd.WeightedSampler(readers, dict.fromkeys(sources, 1.0), stop=stop)
        return rd.TokenPacker(mixture, column="tokens", seq_len=300, eos_id=0) if packed else mixture

    return rd.DataLoader(
        pipeline, global_batch_size=SHARDS, num_logical_shards=SHARDS, repeat=stop == "never", verify=stop == "all"
    )


def kept(sources: dict[str, ParquetSource], packed: bool) -> int:
    """Bytes of Python when all shards have drawn from all sources."""
    cache().clear()
    gc.collect()
    tracemalloc.start()
    try:
        again = loader(sources, packed)
        for _ in itertools.islice(again, 2 if packed else SOURCES):
            pass
        gc.collect()
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("packed", [False, True])
def test_what_a_shard_and_source_takes_beside_the_cache(corpora: list[Path], packed: bool) -> None:
    sources = sources_of(corpora, cache_bytes=2**17)
    next(iter(loader(sources, packed)))
    few = dict(list(sources.items())[: SOURCES // 3])
    more = kept(sources, packed) - kept(few, packed)
    assert more < 400 * (SOURCES - len(few)) * SHARDS  # half of these are positions


@pytest.mark.parametrize(("unit", "packed"), [("samples", False), ("tokens", True)])
def test_what_shards_have_of_one_another_changes_no_sample(
    corpora: list[Path], unit: Any, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = sources_of(corpora[:4], cache_bytes=2**22)
    unlike, own = [*sources][:2]

    def pipeline(shard: rd.Shard) -> rd.BaseNode[Any]:
        nodes = {name: rd.Reader(source, shard) for name, source in sources.items()}
        nodes[unlike] = rd.Reader(sources[unlike], shard, shuffle=4 + shard.index % 2)
        nodes[own] = OneMore(sources[own], shard)
        by = {"unit": unit, "column": "tokens" if unit == "tokens" else None}
        mixture = rd.WeightedSampler(nodes, dict.fromkeys(nodes, 1.0), **by)
        return rd.TokenPacker(mixture, column="tokens", seq_len=300, eos_id=0) if packed else mixture

    def batches() -> list[Any]:
        cache().clear()
        made = rd.DataLoader(pipeline, global_batch_size=16, num_logical_shards=8, repeat=True)
        return [batch["tokens"].tolist() for batch in itertools.islice(made, 20)]

    found = batches()
    monkeypatch.setattr(rd.WeightedSampler, "share_memory_with", lambda *_: None)
    assert found == batches()


def test_fragments_that_shards_share_count_once(
    corpora: list[Path], decoded: Counter[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    copies: list[Any] = []
    monkeypatch.setattr(FragmentDocuments, "_copy", lambda self, *given: copies.append(given))  # pyright: ignore
    bytes_of_all = SOURCES * ROWS * 61 * 8  # a quarter of what they are were each shard's its own
    for _ in itertools.islice(loader(sources_of(corpora, cache_bytes=6 * bytes_of_all), packed=True), 60):
        pass
    assert not copies
    assert set(decoded.values()) == {1}


def test_spilling_decodes_each_fragment_once_for_all_shards_of_all_sources(
    corpora: list[Path], decoded: Counter[tuple[str, int]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def rows(**given: Any) -> list[list[int]]:
        decoded.clear()
        return [batch["tokens"][:, 0].tolist() for batch in loader(sources_of(corpora, **given), False, "all")]

    with caplog.at_level(logging.WARNING, "rescale_data"):
        whole = rows()
    assert Counter(itertools.chain(*whole)) == Counter(range(SOURCES * ROWS))
    assert set(decoded.values()) == {1}
    with caplog.at_level(logging.WARNING, "rescale_data"):
        assert rows(cache_bytes=2**15) == whole
    assert min(decoded.values()) > 1
    (warned,) = [message for message in caplog.messages if "decoded again" in message]
    assert f"{SOURCES} sources" in warned
    assert rows(cache_bytes=2**15, cache_dir=tmp_path / "cache") == whole
    assert set(decoded.values()) == {1}
    enough = int(warned.split("Give cache_bytes=")[1].split(",")[0])
    assert rows(cache_bytes=enough) == whole
    assert set(decoded.values()) == {1}
