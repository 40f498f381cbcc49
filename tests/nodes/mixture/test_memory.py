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
    assert more < 700 * (SOURCES - len(few)) * SHARDS  # a reader takes 256 of these, the other half are positions


def test_a_reader_is_small_because_all_shards_share_its_core() -> None:
    sources = [rd.SyntheticSource(4096) for _ in range(20)]
    shards = [rd.Shard(index, 64) for index in range(64)]
    first = [rd.Reader(source, shards[0]) for source in sources]
    gc.collect()
    tracemalloc.start()
    try:
        readers = [[rd.Reader(source, shard) for source in sources] for shard in shards]
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert all(reader.core is one.core for row in readers for reader, one in zip(row, first, strict=True))
    assert taken < 320 * len(sources) * len(shards)


def test_readers_with_other_arguments_have_a_core_of_their_own() -> None:
    class OfAUser(rd.Reader):
        pass

    def skip(error: Exception, where: str) -> None: ...

    source, shard = rd.SyntheticSource(64), rd.Shard(0, 2)
    readers = [
        rd.Reader(source, shard),
        rd.Reader(rd.SyntheticSource(64), shard),
        rd.Reader(source, rd.Shard(1, 2, seed=1)),
        rd.Reader(source, rd.Shard(0, 3)),
        rd.Reader(source, shard, shuffle=1),
        rd.Reader(source, shard, shuffle=False),
        rd.Reader(source, shard, shuffle=False, by_global_batch=True),
        rd.Reader(source, shard, provenance=True),
        rd.Reader(source, shard, on_error="skip"),
        rd.Reader(source, shard, on_error=skip),
        rd.Reader(source, shard, exclude=()),
        OfAUser(source, shard),
    ]
    assert len({id(reader.core) for reader in readers}) == len(readers)
    assert rd.Reader(source, rd.Shard(1, 2), on_error=skip).core is readers[9].core


@pytest.mark.parametrize("cache_bytes", [2**14, 2**24])
def test_loaders_over_the_same_sources_do_not_disturb_one_another(corpora: list[Path], cache_bytes: int) -> None:
    sources = sources_of(corpora[:4], cache_bytes=cache_bytes)

    def tokens(batches: Any, num: int = 12) -> list[Any]:
        return [batch["tokens"].tolist() for batch in itertools.islice(batches, num)]

    alone = {packed: tokens(loader(sources, packed)) for packed in (False, True)}
    loaders = [(packed, iter(loader(sources, packed))) for packed in (False, True, True, False)]
    tokens(loaders[-1][1], 3)
    found: dict[int, list[Any]] = {number: [] for number in range(len(loaders))}
    for _ in range(9):
        for number, (_, batches) in enumerate(loaders):
            found[number] += tokens(batches, 1)
    for number, (packed, _) in enumerate(loaders):
        assert found[number] == alone[packed][3 * (number == 3) :][:9]


def test_what_one_reader_keeps_in_the_cache_is_not_that_of_another_of_the_same_shard() -> None:
    source = rd.SyntheticSource(4096)
    one, other = (rd.Reader(source, rd.Shard(0, 2)) for _ in range(2))
    assert one.core is other.core
    plan, other_plan = one.plan(0, 0), other.plan(3, 7)
    assert cache().get(one.cache_key("plan")) is plan
    assert cache().get(other.cache_key("plan")) is other_plan
    plan.handle_eviction()
    assert other.plan(3, 7) is other_plan
    assert one.plan(0, 0) is not plan


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
