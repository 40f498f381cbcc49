"""Files behind URLs: slow, failing, and read ahead."""

import pickle
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pyarrow as pa
import pytest

import rescale_data as rd
from rescale_data.sources.decoded import cache as decoded
from rescale_data.sources.decoded.ahead import decode_runner, fetch_runner
from rescale_data.sources.decoded.cache import Cache, OpenFileCache, cache
from rescale_data.sources.files import remote
from rescale_data.sources.files.paths import find_matching_files
from rescale_data.sources.files.remote import RemoteFile
from tests.formats import write_megatron, write_table
from tests.sources.far import Far

pytestmark = pytest.mark.usefixtures("own_cache", "far")


@pytest.mark.parametrize("given", ["data", "data/**", "data/*/*.bin", "data/[ab]/x.bin"])
@pytest.mark.parametrize("end", ["data", "data/b", "x.bin"])
def test_what_cannot_be_listed_is_asked_for_again_and_never_left_out(given, end, tmp_path):
    for name in ("a", "b"):
        (tmp_path / "data" / name).mkdir(parents=True)
        (tmp_path / "data" / name / "x.bin").write_bytes(b"x")
    Far.unknown = [end]
    found = find_matching_files(f"far://{tmp_path}/{given}", ("bin",), None, rd.Remote())
    assert found.names == ("a/x.bin", "b/x.bin")


def test_small_reads_near_each_other_are_one_request(tmp_path):
    (tmp_path / "x").write_bytes(bytes(range(256)) * 1000)
    file = RemoteFile(Far(), str(tmp_path / "x"), rd.Remote(), 256_000)
    assert [file.read(i * 100, 50).size for i in range(300)] == [50] * 300
    assert Far.requests() == 1
    assert file.read(255_990, 50).size == 10


@pytest.fixture
def sixteen(tmp_path):
    for number in range(4):
        rows = [[number * 1000 + i] * 50 for i in range(400)]
        columns = {"tokens": pa.array(rows, pa.list_(pa.int32()))}
        write_table(tmp_path / "data" / f"{number}.parquet", columns, 100)
    return f"far://{tmp_path}/data"


def _rows(shard, source):
    return rd.Reader(source, shard, shuffle=64)


def _packed(shard, source):
    return rd.TokenPacker(_rows(shard, source), column="tokens", seq_len=50, eos_id=None)


class TestAhead:
    def test_nothing_is_fetched_ahead_if_that_is_not_wanted(self, sixteen):
        """Nor decoded ahead, which a packer asks for: it takes the bytes from the same place."""
        source = rd.ParquetSource(sixteen, remote=rd.Remote(read_ahead=False))
        num_requests = Far.requests()
        for fragment in range(16):
            source.prefetch("tokens", fragment)
            source.decode_ahead("tokens", fragment)
            for runner in (fetch_runner, decode_runner):
                runner.wait(source._cache_key(fragment, "tokens"))
        assert Far.requests() == num_requests

    @pytest.mark.parametrize("pipeline", [_rows, _packed])
    def test_many_requests_are_under_way(self, pipeline, sixteen):
        source = rd.ParquetSource(sixteen, remote=rd.Remote())
        assert Far.requests() == 4
        Far.together, Far.most_at_once = 6, 0
        loader = rd.DataLoader(partial(pipeline, source=source), global_batch_size=8, num_logical_shards=8)
        seen = [batch["tokens"] for batch in loader]
        assert Far.most_at_once >= 6
        assert Far.requests() == 4 + 16  # the footers are there since the source was opened
        assert len(seen) >= 190

    @pytest.mark.parametrize("read_ahead", [True, False])
    def test_footers_are_asked_for_once_however_few_files_stay_open(self, read_ahead, sixteen, tmp_path, monkeypatch):
        """Logical shards take turns, and more files than stay open with them: a row group costs one request."""
        source = rd.ParquetSource(sixteen, index_dir=tmp_path / "index", remote=rd.Remote(read_ahead=read_ahead))
        for opened in (source, pickle.loads(pickle.dumps(source))):
            cache().clear()
            monkeypatch.setattr(decoded, "_handles", OpenFileCache(max_files=1))
            monkeypatch.setattr(remote, "_SMALL_READ", 1)  # else the footer comes with what is before it
            Far.forget()
            assert len(list(rd.DataLoader(opened, global_batch_size=8, num_logical_shards=8, collate_fn=list))) == 200
            assert Far.requests() == 4 + 16
            assert read_ahead or Far.most_at_once == 1


def test_data_that_passes_leaves_the_index_of_a_file_that_was_closed(tmp_path, monkeypatch):
    """Of Megatron's files, read in turn with one open and a cache that holds all indices and the tokens of few documents."""
    for number in range(6):
        write_megatron(tmp_path / "data" / str(number), [list(range(2000))] * 4)
    options = rd.Remote(read_ahead=False, retries=0)
    source = rd.MegatronSource(f"far://{tmp_path}/data", cache_bytes=20_000, remote=options)
    cache().clear()
    monkeypatch.setattr(decoded, "_handles", OpenFileCache(max_files=1))
    Far.forget()
    for _ in range(3):
        assert [source.row(4 * number)["tokens"][7] for number in range(6)] == [7] * 6
    asked = Counter()
    for name, count in Far.asked.items():
        asked[name.rpartition(".")[2]] += count
    assert (asked["idx"], asked["bin"]) == (6, 18)


class TestOnce:
    """Two threads find that the cache lacks the same thing, and only then does either go on."""

    @pytest.fixture
    def both_lack(self, monkeypatch):
        get, both, asked = Cache.get, threading.Barrier(2, timeout=60), threading.local()

        def get_nothing_first(kept, key):
            if not hasattr(asked, "before"):
                asked.before = True
                both.wait()
                return None
            return get(kept, key)

        def run(work):
            monkeypatch.setattr(Cache, "get", get_nothing_first)
            with ThreadPoolExecutor(2) as pool:
                return [made.result() for made in [pool.submit(work), pool.submit(work)]]

        return run

    @pytest.mark.parametrize("work", ["footer", "row", "tokens", "piece"])
    def test_two_threads_ask_for_it_once(self, work, both_lack, sixteen):
        source = rd.ParquetSource(sixteen, remote=rd.Remote())
        source.row(150)  # the footer is there
        share = rd.Reader(source, rd.Shard(index=0, num_logical_shards=2), shuffle=64).rows.share(0, 0)
        works = {
            "footer": lambda: (cache().get("nothing"), source._footer_bytes(0).to_pybytes())[1],
            "row": lambda: source.row(3)["tokens"].tolist(),
            "tokens": lambda: source.tokens("tokens", 0).values.tolist(),
            "piece": lambda: source.tokens_of("tokens", 0, share).values.tolist(),
        }
        if work == "footer":
            cache().clear()
        Far.forget()
        first, second = both_lack(works[work])
        assert first == second
        assert Far.requests() == 1

    @pytest.mark.parametrize("column", [None, "tokens"])
    @pytest.mark.parametrize("is_piece", [False, True])
    def test_what_was_fetched_ahead_is_not_asked_for_again(self, column, is_piece, sixteen, monkeypatch):
        source = rd.ParquetSource(sixteen, remote=rd.Remote())
        source.row(150)
        share = rd.Reader(source, rd.Shard(0, 2), shuffle=64).rows.share(0, 0) if is_piece else None
        Far.forget()
        whole = partial(source.tokens, "tokens", 0) if column else partial(source.row, 0)
        piece = partial(source.tokens_of, "tokens", 0, share) if column else partial(source.row_of, 0, share)
        read = piece if is_piece else whole
        source.prefetch(column, 0, share)
        fetch_runner.wait(source._cache_key(0, column, share))
        assert Far.requests() == 1
        read()
        get = Cache.get
        with monkeypatch.context() as patch:  # whoever prepares looked before it came
            patch.setattr(Cache, "get", lambda *_: patch.setattr(Cache, "get", get))
            source.prefetch(column, 0, share)
        fetch_runner.wait(source._cache_key(0, column, share))
        read()
        assert Far.requests() == 1


def test_what_was_not_begun_is_left_when_the_process_ends(tmp_path):
    """Sixteen requests are under way, which end when they are told to, and dozens wait behind them."""
    write_table(tmp_path / "x.parquet", {"x": range(100)}, 1)
    script = f"""
import threading
import fsspec
import rescale_data as rd
from rescale_data.sources.decoded.ahead import exit_event
from tests.sources.far import Far

def stall():
    print("asked", flush=True)
    one.set()
    exit_event.wait()
    raise OSError("503 slow down")

one = threading.Event()
fsspec.register_implementation("far", Far)
source = rd.ParquetSource("far://{tmp_path}/x.parquet")
Far.stall = stall
for fragment in range(100):
    source.prefetch(None, fragment)
one.wait()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240, check=True)
    assert 1 <= done.stdout.count("asked") <= 16
