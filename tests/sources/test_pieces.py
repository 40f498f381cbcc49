"""One process that serves many shards of large fragments: each is decoded once an epoch, within the bounds."""

import gc
from contextlib import nullcontext

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

import rescale_data as rd
from rescale_data.sources.decoded import cache_demand
from rescale_data.sources.decoded.cache import Cache, cache, owner_id
from rescale_data.sources.decoded.cache_demand import num_sources_and_shards, record_served_shards, served_shards
from tests.formats import write_table

pytestmark = pytest.mark.usefixtures("own_cache")

NUM_ROWS, GROUP = 1200, 300


@pytest.fixture(autouse=True)
def no_other_budget(monkeypatch):
    monkeypatch.setattr(Cache, "budget", 40_000)


def tokens_of(row):
    return list(range(row, row + row % 9 + 90))


@pytest.fixture
def corpus(tmp_path):
    rows = [{"tokens": tokens_of(i), "text": f"row {i}", "d": "ab"[i % 2]} for i in range(NUM_ROWS)]
    table = pa.Table.from_pylist(rows)
    write_table(tmp_path / "corpus" / "a.parquet", table.slice(0, 700), GROUP)
    with pq.ParquetWriter(tmp_path / "corpus" / "ab.parquet", table.schema) as writer:
        writer.write_table(table[:0])  # a fragment without rows
    write_table(tmp_path / "corpus" / "b.parquet", table.slice(700), GROUP)
    return tmp_path / "corpus"


def small(corpus, **kwargs):
    gc.collect()
    cache().clear()
    return rd.ParquetSource(corpus, cache_bytes=40_000, **kwargs)


def in_turn(nodes):
    live = list(nodes)
    while live:
        for node in list(live):
            try:
                yield next(node)
            except StopIteration:
                live.remove(node)


def readers_of(source, shuffle=True, shards=range(50)):
    return [rd.Reader(source, rd.Shard(i, 50), shuffle=shuffle) for i in shards]


def packed(readers):
    nodes = [rd.TokenPacker(reader, column="tokens", seq_len=64, eos_id=0) for reader in readers]
    return [sample["tokens"].tolist() for sample in in_turn(nodes)]


@pytest.mark.parametrize("shuffle", [False, 16])
def test_rows_are_the_same_and_fragments_decoded_once(shuffle, corpus, decoded, tmp_path):
    source = small(corpus, cache_dir=tmp_path / "cache")
    for epoch in range(2):
        readers = readers_of(source, shuffle)
        for reader in readers:
            reader.reset({"epoch": epoch, "row": 0, "skipped": 0})
        found = [(row["text"], row["tokens"].tolist()) for row in in_turn(readers)]
        assert sorted(found) == sorted((f"row {i}", tokens_of(i)) for i in range(NUM_ROWS))
        assert max(decoded.values()) <= 1 + epoch * bool(shuffle)  # unshuffled pieces are the same
        assert cache().nbytes <= 40_000
    pieces, whole = (in_turn(readers_of(each, shuffle)) for each in (source, rd.ParquetSource(corpus)))
    assert [row["text"] for row in pieces] == [row["text"] for row in whole]


def test_tokens_are_the_same_and_fragments_decoded_once(corpus, decoded, tmp_path):
    found = packed(readers_of(small(corpus, cache_dir=tmp_path / "cache")))
    assert set(decoded.values()) == {1}
    assert found == packed(readers_of(rd.ParquetSource(corpus)))


@pytest.mark.parametrize("shuffle", [False, 16, 1024])
def test_without_a_folder_tokens_are_decoded_as_often_as_the_cache_has_room_for_copies(
    shuffle, corpus, decoded, monkeypatch
):
    monkeypatch.setattr(cache_demand, "_MIN_BLOCK_BYTES", 2**10)
    monkeypatch.setattr(Cache, "budget", 400_000)

    def found(source):
        record_served_shards(source, [source], range(8))
        return packed([rd.Reader(source, rd.Shard(i, 8), shuffle=shuffle) for i in range(8)])

    gc.collect()
    cache().clear()
    expected = found(rd.ParquetSource(corpus, cache_bytes=400_000))
    assert cache().nbytes <= 400_000
    assert sum(decoded.values()) <= 8 * 2 * 2  # two blocks a shard, each of rows of two fragments at the most
    assert expected == found(rd.ParquetSource(corpus))


def test_only_what_this_process_serves_is_cut(corpus, tmp_path):
    source = small(corpus, cache_dir=tmp_path / "cache")
    record_served_shards(source, [source], range(10, 16))
    readers = readers_of(source, 16, range(10, 16))
    [reader.reset(None) for reader in readers]
    rows = list(in_turn(readers))
    assert len(rows) == 6 * 24
    kept = sum(path.stat().st_size for path in (tmp_path / "cache").rglob("*") if path.is_file())
    assert kept < 6 * 24 * 600 + 40_000


class Loader:
    """Whoever reads sources."""


class EndsOthers(list[int]):
    """Shards of a reader that are counted while the collector ends other readers."""

    def __init__(self, shards, others):
        super().__init__(shards)
        self.others = others

    def __bool__(self):
        self.others.clear()
        return True


def test_a_reader_may_end_while_the_others_are_counted(corpus):
    source, loader, others = rd.ParquetSource(corpus), Loader(), [Loader()]
    record_served_shards(others[0], [source], range(4))
    record_served_shards(loader, [source], EndsOthers([1, 2], others))
    num_sources_and_shards(owner_id(source))
    assert num_sources_and_shards(owner_id(source)) == (1, 2)


def test_two_loaders_of_one_source_share_the_cache_out(corpus):
    sources, loaders = [rd.ParquetSource(corpus), rd.ParquetSource(corpus)], [Loader(), Loader()]
    owner, needed = owner_id(sources[0]), sources[0].fragment_bytes
    assert (num_sources_and_shards(owner), list(served_shards(owner, 3))) == ((1, 1), [0, 1, 2])
    record_served_shards(loaders[0], sources[:1], range(4))
    record_served_shards(loaders[1], sources, range(2))
    assert (num_sources_and_shards(owner), sorted(served_shards(owner, 9))) == ((2, 6), [0, 0, 1, 1, 2, 3])
    assert cache_demand.bytes_needed(sources[0], 1) == (4 + 2 * 2) * needed
    record_served_shards(loaders[0], sources[:1], [7])
    assert (num_sources_and_shards(owner), sorted(served_shards(owner, 9))) == ((2, 3), [0, 1, 7])
    del loaders[1]
    gc.collect()
    assert (num_sources_and_shards(owner), list(served_shards(owner, 9))) == ((1, 1), [7])
    # Other ranks have the rest of an epoch, and this one's batch is padding.
    record_served_shards(loaders[0], sources[:1], [])
    assert (num_sources_and_shards(owner), list(served_shards(owner, 2))) == ((1, 1), [0, 1])
    assert cache_demand.room_for_block(small(corpus)) == cache_demand.room_for_block(sources[0]) == 0


def test_few_shards_and_large_caches_keep_whole_fragments(corpus):
    for source, shards in ((rd.ParquetSource(corpus), 50), (small(corpus), 1)):
        reader = rd.Reader(source, rd.Shard(0, shards))
        reader.reset(None)
        assert reader.share(0) is None


def test_another_filter_has_other_pieces(corpus, tmp_path):
    for letter in "ab":
        source = small(corpus, cache_dir=tmp_path / "cache", filter=pc.field("d") == letter)
        rows = list(in_turn(readers_of(source)))
        assert {row["d"] for row in rows} == {letter}
        assert len(rows) == NUM_ROWS // 2


def test_order_of_pieces_does_not_matter(corpus, tmp_path):
    source, whole = small(corpus, cache_dir=tmp_path / "cache"), rd.ParquetSource(corpus)
    rng = np.random.default_rng(0)
    for shard, row in zip(rng.integers(0, 50, 99).tolist(), rng.integers(0, 24, 99).tolist(), strict=True):
        readers = [rd.Reader(each, rd.Shard(shard, 50)) for each in (source, whole)]
        for reader in readers:
            reader.reset({"epoch": row % 3, "row": row, "skipped": 0})
        assert next(readers[0])["text"] == next(readers[1])["text"]


TEXT_TYPES = [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())]


@pytest.mark.parametrize("kind", TEXT_TYPES, ids=str)
@pytest.mark.parametrize("others", [False, True], ids=["alone", "beside others"])
@pytest.mark.parametrize("num_shards", [1, 50])
@pytest.mark.parametrize("null_row", [None, 1100])
def test_texts_are_read_many_at_a_time_out_of_fragments_or_pieces(
    kind, others, num_shards, null_row, tmp_path, monkeypatch
):
    """A null is an error in the turn of its row; what other columns hold is nothing to the text."""
    texts = [f"{row % 700:04d} é" * (row % 60) for row in range(NUM_ROWS)]
    column = pa.array([None if row == null_row else text for row, text in enumerate(texts)])
    column = column.dictionary_encode() if pa.types.is_dictionary(kind) else column.cast(kind)
    lists = pa.array([[null_row]] * NUM_ROWS, pa.list_(pa.int32()))  # of nulls, in which each row alone is an error
    write_table(tmp_path / "a.parquet", {"text": column, "number": range(NUM_ROWS), "lists": lists}, GROUP)
    source, num_rows_alone, found = small(tmp_path, columns=None if others else ["text"]), 0, []
    read = {name: getattr(rd.ParquetSource, name) for name in ("row", "row_of")}

    def letters(given):
        return [[1, *map(ord, text)] for text in given]

    def count(name, *given):
        nonlocal num_rows_alone
        num_rows_alone += 1
        return read[name](*given)

    for name in read:
        monkeypatch.setattr(rd.ParquetSource, name, lambda *given, name=name: count(name, *given))
    readers = [rd.Reader(source, rd.Shard(i, num_shards), shuffle=False) for i in range(num_shards)]
    tokenized = [rd.Tokenize(reader, letters, "text") for reader in readers]
    packers = [rd.WholeDocumentPacker(node, column="tokens", seq_len=1000, window=1) for node in tokenized]
    with nullcontext() if null_row is None else pytest.raises(ValueError, match="under that key a NoneType"):
        for packer in packers:
            found.extend("".join(map(chr, packed["tokens"][1:])).rstrip("\0") for packed in packer)
    assert found == texts[:null_row]
    assert num_rows_alone <= (0 if null_row is None else GROUP)
    assert readers[0].parameters()["columns"] == source.columns, "as where a row is read alone"
    assert not any(map(source.has_texts, ["number", "none"]))
