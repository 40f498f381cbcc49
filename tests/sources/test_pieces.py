"""One process that serves many shards of large fragments: each is decoded once an epoch, within the bounds."""

import fcntl
import gc
import itertools
import os
import resource
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rescale_data as rd
from rescale_data.nodes.reading.share import ShardShare
from rescale_data.sources.decoded import interest
from rescale_data.sources.decoded import spill as spilling
from rescale_data.sources.decoded.cache import Cache, cache, owner_of
from rescale_data.sources.decoded.interest import beside, needed_with, serve, shards_of
from rescale_data.sources.decoded.spill import Spill
from rescale_data.sources.parquet import ParquetSource
from tests.corpus import fragment_order

pytestmark = pytest.mark.usefixtures("own_cache")

NUM_ROWS, GROUP = 1200, 300


@pytest.fixture(autouse=True)
def no_other_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever sources of other tests are still alive."""
    monkeypatch.setattr(Cache, "budget", 40_000)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    rows = [{"tokens": np.arange(i, i + i % 9 + 90), "text": f"row {i}", "d": "ab"[i % 2]} for i in range(NUM_ROWS)]
    table = pa.Table.from_pylist(
        rows, pa.schema([("tokens", pa.list_(pa.int32())), ("text", pa.string()), ("d", pa.string())])
    )
    (tmp_path / "corpus").mkdir()
    pq.write_table(table.slice(0, 700), tmp_path / "corpus" / "a.parquet", row_group_size=GROUP)
    pq.write_table(table.slice(700), tmp_path / "corpus" / "b.parquet", row_group_size=GROUP)
    return tmp_path / "corpus"


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """How often each fragment is decoded."""
    counts: Counter[int] = Counter()
    decode = ParquetSource._decode

    def count(self: Any, fragment: int, columns: Any) -> Any:
        counts[fragment] += 1
        return decode(self, fragment, columns)

    monkeypatch.setattr(ParquetSource, "_decode", count)
    return counts


def small(corpus: Path, **kwargs: Any) -> ParquetSource:
    gc.collect()
    cache().clear()
    return ParquetSource(corpus, cache_bytes=40_000, **kwargs)


def in_turn(nodes: list[Any]) -> Any:
    """One sample of each until all have ended."""
    live = list(nodes)
    while live:
        for node in list(live):
            try:
                yield next(node)
            except StopIteration:
                live.remove(node)


@pytest.mark.parametrize("shuffle", [False, 16])
def test_rows_are_the_same_and_fragments_decoded_once(
    shuffle: bool | int, corpus: Path, decoded: Counter[int], tmp_path: Path
) -> None:
    source = small(corpus, spill_dir=tmp_path / "spill")
    for epoch in range(2):
        readers = [rd.Reader(source, rd.Shard(i, 50), shuffle=shuffle) for i in range(50)]
        for reader in readers:
            reader.reset({"epoch": epoch, "row": 0, "skipped": 0})
        found = [(row["text"], row["tokens"].tolist()) for row in in_turn(readers)]
        assert sorted(found) == sorted((f"row {i}", list(range(i, i + i % 9 + 90))) for i in range(NUM_ROWS))
        assert set(decoded.values()) == {epoch + 1}
        assert cache().nbytes <= 40_000
    whole = ParquetSource(corpus)
    expected = [row["text"] for row in in_turn([rd.Reader(whole, rd.Shard(i, 50), shuffle=shuffle) for i in range(50)])]
    again = [row["text"] for row in in_turn([rd.Reader(source, rd.Shard(i, 50), shuffle=shuffle) for i in range(50)])]
    assert again == expected


def test_tokens_are_the_same_and_fragments_decoded_once(corpus: Path, decoded: Counter[int], tmp_path: Path) -> None:
    def packed(source: Any) -> list[list[int]]:
        nodes = [
            rd.TokenPacker(rd.Reader(source, rd.Shard(i, 50)), column="tokens", seq_len=64, eos_id=0) for i in range(50)
        ]
        return [sample["tokens"].tolist() for sample in in_turn(nodes)]

    found = packed(small(corpus, spill_dir=tmp_path / "spill"))
    assert set(decoded.values()) == {1}
    assert found == packed(ParquetSource(corpus))


@pytest.mark.parametrize("shuffle", [False, 16, 1024])
def test_without_a_folder_tokens_are_decoded_as_often_as_the_cache_has_room_for_copies(
    shuffle: bool | int, corpus: Path, decoded: Counter[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interest, "_LEAST_BLOCK", 2**10)
    monkeypatch.setattr(Cache, "budget", 400_000)

    def packed(source: Any) -> list[list[int]]:
        serve(source, [source], range(8))
        readers = [rd.Reader(source, rd.Shard(i, 8), shuffle=shuffle) for i in range(8)]
        nodes = [rd.TokenPacker(reader, column="tokens", seq_len=64, eos_id=0) for reader in readers]
        return [sample["tokens"].tolist() for sample in in_turn(nodes)]

    gc.collect()
    cache().clear()
    found = packed(ParquetSource(corpus, cache_bytes=400_000))
    assert cache().nbytes <= 400_000
    assert sum(decoded.values()) <= 8 * 2 * 2  # two blocks a shard, each of rows of two fragments at the most
    assert found == packed(ParquetSource(corpus))


def test_without_a_folder_they_are_decoded_again(corpus: Path, decoded: Counter[int]) -> None:
    source = small(corpus)
    readers = [rd.Reader(source, rd.Shard(i, 50), shuffle=16) for i in range(50)]
    assert Counter(row["text"] for row in in_turn(readers)) == Counter(f"row {i}" for i in range(NUM_ROWS))
    assert min(decoded.values()) > 1


def test_only_what_this_process_serves_is_cut(corpus: Path, tmp_path: Path) -> None:
    source = small(corpus, spill_dir=tmp_path / "spill")
    serve(source, [source], range(10, 16))
    readers = [rd.Reader(source, rd.Shard(i, 50), shuffle=16) for i in range(10, 16)]
    [reader.reset(None) for reader in readers]
    rows = list(in_turn(readers))
    assert len(rows) == 6 * 24
    kept = spilling._spills[str(tmp_path / "spill")].nbytes + cache().nbytes
    assert kept < 6 * 24 * 600 + 40_000


class Loader:
    """Whoever reads sources."""


def test_two_loaders_of_one_source_share_the_cache_out(corpus: Path) -> None:
    """Neither overwrites what the other has said, and with a loader its interest goes."""
    sources, loaders = [ParquetSource(corpus), ParquetSource(corpus)], [Loader(), Loader()]
    owner, needed = owner_of(sources[0]), sources[0].fragment_bytes
    assert (beside(owner), list(shards_of(owner, 3))) == ((1, 1), [0, 1, 2])
    serve(loaders[0], sources[:1], range(4))
    serve(loaders[1], sources, range(2))
    assert (beside(owner), sorted(shards_of(owner, 9))) == ((2, 6), [0, 0, 1, 1, 2, 3])
    assert needed_with(sources[0], 1) == (4 + 2 * 2) * needed
    serve(loaders[0], sources[:1], [7])
    assert (beside(owner), sorted(shards_of(owner, 9))) == ((2, 3), [0, 1, 7])
    del loaders[1]
    gc.collect()
    assert (beside(owner), list(shards_of(owner, 9))) == ((1, 1), [7])


def test_few_shards_and_large_caches_keep_whole_fragments(corpus: Path) -> None:
    for source, shards in ((ParquetSource(corpus), 50), (small(corpus), 1)):
        reader = rd.Reader(source, rd.Shard(0, shards))
        reader.reset(None)
        assert reader.share(0) is None


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(any),
    st.integers(1, 12),
    st.booleans(),
    st.integers(0, 3),
)
@settings(max_examples=60)
def test_cuts_are_what_the_shards_read(lengths: list[int], num_shards: int, permuted: bool, epoch: int) -> None:
    fragments = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    order = fragment_order(fragments, 3, epoch) if permuted else None
    source = rd.SyntheticSource(max(1, int(fragments[-1])))
    drawn: dict[Any, set[int]] = {}
    for i in range(num_shards):
        virtual = np.arange(i * fragments[-1] // num_shards, (i + 1) * fragments[-1] // num_shards)
        rows = virtual if order is None else order.rows(virtual)
        share = ShardShare(rd.Shard(i, num_shards, 3), epoch, fragments, order, id(source), i, 0)
        drawn[share.key] = set(rows.tolist())
        for fragment in range(len(lengths)):
            for cut in share.cuts(fragment):
                if cut.key == share.key:
                    assert share.start(fragment) == cut.start
    share = ShardShare(rd.Shard(0, num_shards, 3), epoch, fragments, order, id(source), i, 0)
    found: dict[Any, set[int]] = {key: set() for key in drawn}
    for fragment in range(len(lengths)):
        for cut in share.cuts(fragment):
            found[cut.key] |= set(range(int(fragments[fragment]) + cut.start, int(fragments[fragment]) + cut.stop))
    assert found == drawn


class TestSpill:
    def test_stays_within_its_bound(self, tmp_path: Path) -> None:
        spill = Spill(str(tmp_path), 100)
        for i in range(20):
            spill.put((1, i), pa.py_buffer(bytes([i]) * 30))
            files = [path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()]
            assert sum(files) == spill.nbytes <= 100
        assert [i for i in range(20) if spill.get((1, i)) is not None] == [17, 18, 19]
        assert spill.get((1, 18)).to_pybytes() == bytes([18]) * 30
        spill.put("large", pa.py_buffer(bytes(101)))
        assert spill.get("large") is None

    def test_another_process_may_sweep_before_the_folder_is_locked(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        lock, swept = fcntl.flock, []

        def sweep_first(fd: int, how: int) -> None:
            if how == fcntl.LOCK_EX and not swept:
                swept.append(fd)
                spilling._sweep(str(tmp_path))
            lock(fd, how)

        monkeypatch.setattr(spilling.fcntl, "flock", sweep_first)
        spill = Spill(str(tmp_path), 100)
        spill.put(0, pa.py_buffer(b"abc"))
        assert spill.get(0).to_pybytes() == b"abc"
        assert swept

    def test_what_is_mapped_outlives_its_deletion(self, tmp_path: Path) -> None:
        spill = Spill(str(tmp_path), 100)
        spill.put(0, pa.py_buffer(b"x" * 80))
        data = spill.get(0)
        spill.put(1, pa.py_buffer(b"y" * 80))
        assert spill.get(0) is None
        assert data.to_pybytes() == b"x" * 80

    def test_without_space_it_goes_on_without_and_says_where(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        spill = Spill(str(tmp_path), 2**20)
        spill.put("before", pa.py_buffer(b"x" * 100))
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))  # a larger file fails as on a full disk
        try:
            spill.put("too much", pa.py_buffer(bytes(5000)))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        spill.put("after", pa.py_buffer(b"y" * 100))
        assert spill.get("before").to_pybytes() == b"x" * 100
        assert spill.get("too much") is None
        assert spill.get("after") is None
        assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) == 100
        assert [str(tmp_path) in record.message for record in caplog.records] == [True]

    def test_goes_with_the_process(self, tmp_path: Path) -> None:
        code = f"""
import os, pyarrow as pa
from rescale_data.sources.decoded.spill import spill_in
from tests.corpus import fragment_order
spill_in({str(tmp_path)!r}, 1000).put(0, pa.py_buffer(b"x"))
if os.fork() == 0:
    spill_in({str(tmp_path)!r}, 1000).put(0, pa.py_buffer(b"y"))
    os._exit(1)
os.wait()
"""
        subprocess.run([sys.executable, "-c", code], check=True)
        (left,) = tmp_path.iterdir()  # of the child, which was killed
        assert any(left.iterdir())
        Spill(str(tmp_path), 10)
        assert not left.exists()

    def test_of_others_that_live_stays(self, tmp_path: Path) -> None:
        first = Spill(str(tmp_path), 10)
        second = Spill(str(tmp_path), 10)
        assert len(os.listdir(tmp_path)) == 2
        del first, second
        gc.collect()
        assert not os.listdir(tmp_path)


def test_order_of_pieces_does_not_matter(corpus: Path, tmp_path: Path) -> None:
    """Shards may be at any positions, as after a rescale."""
    source, whole = small(corpus, spill_dir=tmp_path / "spill"), ParquetSource(corpus)
    rng = np.random.default_rng(0)
    for shard, row in itertools.islice(zip(rng.integers(0, 50, 99), rng.integers(0, 24, 99), strict=True), 99):
        state = {"epoch": int(row) % 3, "row": int(row), "skipped": 0}
        nodes = [rd.Reader(s, rd.Shard(int(shard), 50)) for s in (source, whole)]
        rows = []
        for node in nodes:
            node.reset(state)
            rows.append(next(node)["text"])
        assert rows[0] == rows[1]
