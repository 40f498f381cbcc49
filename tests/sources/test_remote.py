"""Files behind URLs: slow, failing, kept on disk, and read ahead."""

import errno
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import Mock

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.local import LocalFileSystem

import rescale_data as rd
from rescale_data.nodes.reading.rows import ShardRows
from rescale_data.sources.decoded import cache as decoded
from rescale_data.sources.decoded.ahead import fetch_runner
from rescale_data.sources.decoded.cache import Cache, OpenFileCache, cache
from rescale_data.sources.files import local_store, remote
from rescale_data.sources.files.local_store import LocalStore
from rescale_data.sources.files.paths import find_matching_files
from rescale_data.sources.files.remote import RemoteError, RemoteFile
from tests.formats import write_megatron
from tests.sources.test_rescalable import DOCS, make_source

pytestmark = pytest.mark.usefixtures("own_cache")

FORMATS = ["parquet", "arrow", "jsonl", "tar", "megatron"]


class Flaky(LocalFileSystem):
    """Local files, as if they were far away: requests may wait for each other, and some fail."""

    protocol = "flaky"
    cachable = False
    together: ClassVar[int] = 1  # so many requests are answered together, if so many come
    failures: ClassVar[list[Exception]] = []
    requests: ClassVar[int] = 0
    at_once: ClassVar[int] = 0
    most_at_once: ClassVar[int] = 0
    lock: ClassVar[threading.Condition] = threading.Condition()

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        kind = type(self)
        with kind.lock:
            kind.requests += 1
            kind.at_once += 1
            kind.most_at_once = max(kind.at_once, kind.most_at_once)
            failure = kind.failures.pop(0) if kind.failures else None
            kind.lock.notify_all()
            kind.lock.wait_for(lambda: kind.most_at_once >= kind.together, timeout=60)
            kind.at_once -= 1
        if failure is not None:
            raise failure
        return super().cat_file(path, start, end, **kwargs)


@pytest.fixture(autouse=True)
def flaky(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    fsspec.register_implementation("flaky", Flaky, clobber=True)
    monkeypatch.setattr(remote, "_FIRST_PAUSE_SECONDS", 0.001)
    remote._request_limit.cache_clear()
    Flaky.together, Flaky.failures, Flaky.requests, Flaky.most_at_once = 1, [], 0, 0
    yield
    Flaky.together, Flaky.failures = 1, []


def far(kind: str, folder: Path, **kwargs: Any) -> Any:
    """The source of a local folder, read through URLs."""
    local = type(make_source(kind, folder / kind))
    index = {"index_dir": folder / "index"} if kind in ("jsonl", "tar") else {}
    return local(f"flaky://{folder / kind}", **index, **kwargs)


@pytest.mark.parametrize("kind", FORMATS)
def test_what_was_brought_is_kept_once(kind: str, tmp_path: Path) -> None:
    source = far(kind, tmp_path)
    source.row(0)  # the file is open from now on
    taken: list[int] = []
    for prepare in (False, True):
        cache().clear()
        if prepare:
            source.prepare(None, 0)
        source.row(0)
        taken.append(cache().nbytes)
    assert taken[0] == taken[1] > 0


@pytest.mark.parametrize("kind", FORMATS)
def test_a_row_is_not_left_out_because_a_request_failed(kind: str, tmp_path: Path) -> None:
    source = far(kind, tmp_path, remote=rd.Remote(retries=0, read_ahead=False))
    reader = rd.Reader(source, rd.Shard(), on_error="skip")
    for failure, expected in ((ConnectionResetError(), RemoteError), (PermissionError("expired"), PermissionError)):
        cache().clear()
        Flaky.failures = [failure] * 9
        with pytest.raises(expected):
            next(reader)
    Flaky.failures = []
    assert len(list(reader)) == 200
    assert reader.position[2] == 0


def test_an_id_is_not_looked_for_in_vain_because_a_request_failed(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": ["a", "b"]}), tmp_path / "rows.parquet")
    source = rd.ParquetSource(f"flaky://{tmp_path}", remote=rd.Remote(retries=0))
    Flaky.failures = [ConnectionResetError()] * 9
    with pytest.raises(RemoteError):
        rd.find_rows(source, ["a"])


@pytest.mark.parametrize("kind", FORMATS)
def test_requests_that_fail_are_made_again(kind: str, tmp_path: Path) -> None:
    remote = rd.Remote(retries=2, read_ahead=False)
    Flaky.failures = [ConnectionResetError("reset by peer"), TimeoutError()]
    source = far(kind, tmp_path, remote=remote)
    cache().clear()
    for index in (0, 150, 40):
        Flaky.failures = [OSError("503 slow down"), TimeoutError()]
        assert source.row(index)
        cache().clear()


class TestListing:
    """What cannot be listed is asked for again, and never left out."""

    @pytest.fixture
    def failing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """Ends of the folders and files that cannot be asked for, once each."""
        for name in ("a", "b"):
            (tmp_path / "data" / name).mkdir(parents=True)
            (tmp_path / "data" / name / "x.bin").write_bytes(b"x")
        ends: list[str] = []

        def fail(method: str) -> None:
            asked = getattr(LocalFileSystem, method)

            def ask(self: Any, path: str, *args: Any, **kwargs: Any) -> Any:
                found = next((end for end in ends if os.fspath(path).rstrip("/").endswith(end)), None)
                if found is not None:
                    ends.remove(found)
                    raise OSError("503 slow down")
                return asked(self, path, *args, **kwargs)

            monkeypatch.setattr(Flaky, method, ask, raising=False)

        fail("ls")
        fail("info")
        return ends

    @pytest.mark.parametrize("given", ["data", "data/**", "data/*/*.bin", "data/[ab]/x.bin"])
    @pytest.mark.parametrize("end", ["data", "data/b", "x.bin"])
    def test_is_tried_again(self, failing: list[str], tmp_path: Path, given: str, end: str) -> None:
        failing.append(end)
        found = find_matching_files(f"flaky://{tmp_path}/{given}", ("bin",), None, rd.Remote())
        assert found.names == ("a/x.bin", "b/x.bin")

    def test_a_glob_goes_no_deeper_than_it_says(self, failing: list[str], tmp_path: Path) -> None:
        (tmp_path / "data" / "top.bin").write_bytes(b"x")
        assert find_matching_files(f"flaky://{tmp_path}/data/*.bin", ("bin",), None, None).names == ("top.bin",)
        assert find_matching_files(f"flaky://{tmp_path}/data/a/x.bin", ("bin",), None, None).names == ("x.bin",)

    def test_urls_of_different_filesystems(self, failing: list[str], tmp_path: Path) -> None:
        urls = [f"flaky://{tmp_path}/data/a/x.bin", f"file://{tmp_path}/data/b/x.bin"]
        with pytest.raises(ValueError, match="different filesystems"):
            find_matching_files(urls, ("bin",), None, None)


@pytest.mark.parametrize("kind", FORMATS)
def test_the_error_when_retries_are_spent(kind: str, tmp_path: Path) -> None:
    source = far(kind, tmp_path, remote=rd.Remote(retries=2))
    cache().clear()
    Flaky.failures = [OSError("503 slow down")] * 50
    with pytest.raises(
        RemoteError, match=r"flaky://.*/b\..* in 3 attempts over .*: OSError: 503 slow down.*rd\.Remote"
    ):
        source.row(150)
    Flaky.failures = []
    assert source.row(150)


def test_what_does_not_help_is_not_tried_again(tmp_path: Path) -> None:
    source = far("parquet", tmp_path)
    cache().clear()
    before = Flaky.requests
    Flaky.failures = [PermissionError("403 forbidden")]
    with pytest.raises(PermissionError, match="403"):
        source.row(0)
    assert Flaky.requests == before + 1
    Flaky.failures = []
    (tmp_path / "parquet" / "a.parquet").unlink()
    with pytest.raises(FileNotFoundError):
        source.row(0)


def test_a_short_answer_is_asked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x").write_bytes(bytes(range(100)))
    answers = [b"too short", bytes(range(10, 100))]
    monkeypatch.setattr(Flaky, "cat_file", lambda *_, **__: answers.pop(0))
    file = RemoteFile(Flaky(), str(tmp_path / "x"), rd.Remote(), 100)
    assert file.read(10, 5).to_pybytes() == bytes(range(10, 15))
    assert not answers


def test_small_reads_near_each_other_are_one_request(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(bytes(range(256)) * 1000)
    file = RemoteFile(Flaky(), str(tmp_path / "x"), rd.Remote(), 256_000)
    assert [file.read(i * 100, 50).size for i in range(300)] == [50] * 300
    assert Flaky.requests == 1
    assert file.read(255_990, 50).size == 10


@pytest.mark.parametrize("bad", [{"retries": -1}, {"timeout": 0.0}, {"timeout": float("inf")}, {"max_requests": 0}])
def test_options_out_of_range(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        rd.Remote(**bad)


class TestAhead:
    """Sixteen row groups, and a server that likes to answer several requests together."""

    def write(self, folder: Path, groups: int = 16) -> None:
        folder.mkdir()
        for number in range(4):
            rows = [[number * 1000 + i] * 50 for i in range(groups // 4 * 100)]
            table = pa.table({"tokens": pa.array(rows, pa.list_(pa.int32()))})
            pq.write_table(table, folder / f"{number}.parquet", row_group_size=100)

    @pytest.mark.parametrize("pack", [False, True])
    def test_many_requests_are_under_way(self, pack: bool, tmp_path: Path) -> None:
        self.write(tmp_path / "data")
        source = rd.ParquetSource(f"flaky://{tmp_path}/data", remote=rd.Remote())
        assert Flaky.requests == 4
        Flaky.together, Flaky.most_at_once = 6, 0
        pipeline = partial(_packed if pack else _rows, source=source)
        loader = rd.DataLoader(pipeline, global_batch_size=8, num_logical_shards=8)
        seen = [batch["tokens"] for batch in loader]
        assert Flaky.most_at_once >= 6
        assert Flaky.requests == 4 + 16  # the footers are there since the source was opened
        assert len(seen) >= 190

    @pytest.mark.parametrize("read_ahead", [True, False])
    def test_footers_are_asked_for_once_however_few_files_stay_open(
        self, read_ahead: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Logical shards take turns, and more files than stay open with them: a row group costs one request."""
        self.write(tmp_path / "data")
        make_index = partial(rd.ParquetSource, f"flaky://{tmp_path}/data", index_dir=tmp_path / "index")
        options = rd.Remote(read_ahead=read_ahead)
        for source, footers in (
            (make_index(remote=options), 4),
            (pickle.loads(pickle.dumps(make_index(remote=options))), 4),
        ):
            cache().clear()
            monkeypatch.setattr(decoded, "_handles", OpenFileCache(max_files=1))
            monkeypatch.setattr(remote, "_SMALL_READ", 1)  # else the footer comes with what is before it
            Flaky.requests = 0
            assert len(list(rd.DataLoader(source, global_batch_size=8, num_logical_shards=8, collate_fn=list))) == 200
            assert Flaky.requests == footers + 16

    def test_may_be_switched_off(self, tmp_path: Path) -> None:
        self.write(tmp_path / "data")
        source = rd.ParquetSource(f"flaky://{tmp_path}/data", remote=rd.Remote(read_ahead=False))
        Flaky.most_at_once = 0
        list(rd.DataLoader(source, global_batch_size=8, num_logical_shards=8))
        assert Flaky.most_at_once == 1

    def test_does_not_exceed_the_cache(self, tmp_path: Path) -> None:
        self.write(tmp_path / "data")
        source = rd.ParquetSource(f"flaky://{tmp_path}/data", cache_bytes=50_000, cache_dir=tmp_path / "cache")
        loader = rd.DataLoader(source, global_batch_size=8, num_logical_shards=8)
        cache().clear()
        tokens = np.concatenate([batch["tokens"][:, 0].numpy() for batch in loader])
        assert len(set(tokens.tolist())) == 1600
        assert cache().nbytes <= max(50_000, cache().budget)


def test_data_that_passes_leaves_the_index_of_a_file_that_was_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of Megatron's files, read in turn with one open and a cache that holds all indices and the tokens of few documents."""
    for number in range(6):
        write_megatron(tmp_path / "data" / str(number), [list(range(2000))] * 4)
    source = rd.MegatronSource(
        f"flaky://{tmp_path}/data", cache_bytes=20_000, remote=rd.Remote(read_ahead=False, retries=0)
    )
    cache().clear()
    monkeypatch.setattr(decoded, "_handles", OpenFileCache(max_files=1))
    asked = Counter[str]()
    cat_file = Flaky.cat_file

    def count(flaky: Flaky, path: str, start: int | None = None, end: int | None = None) -> bytes:
        asked[path.rpartition(".")[2]] += 1
        return cat_file(flaky, path, start, end)

    monkeypatch.setattr(Flaky, "cat_file", count)
    for _ in range(3):
        assert [source.row(4 * number)["tokens"][7] for number in range(6)] == [7] * 6
    assert asked == {"idx": 6, "bin": 18}


class TestOnce:
    """Two threads find that the cache lacks the same thing, and only then does either go on."""

    @pytest.fixture
    def both_lack(self, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], list[Any]]:
        get, both, asked = Cache.get, threading.Barrier(2, timeout=60), threading.local()

        def get_nothing_first(kept: Cache, key: Any) -> Any:
            if not hasattr(asked, "before"):
                asked.before = True
                both.wait()
                return None
            return get(kept, key)

        def run(work: Callable[[], Any]) -> list[Any]:
            monkeypatch.setattr(Cache, "get", get_nothing_first)
            with ThreadPoolExecutor(2) as pool:
                return [made.result() for made in [pool.submit(work), pool.submit(work)]]

        return run

    @pytest.mark.parametrize("work", ["footer", "row", "tokens", "piece"])
    def test_two_threads_ask_for_it_once(self, work: str, both_lack: Callable[..., list[Any]], tmp_path: Path) -> None:
        TestAhead().write(tmp_path / "data")
        source = rd.ParquetSource(f"flaky://{tmp_path}/data", remote=rd.Remote())
        source.row(150)  # the footer is there
        share = ShardRows(source, rd.Shard(index=0, num_logical_shards=2), shuffle=64).share(0)
        works = {
            "footer": lambda: (cache().get("nothing"), source._tail(0).to_pybytes())[1],
            "row": lambda: source.row(3)["tokens"].tolist(),
            "tokens": lambda: source.tokens("tokens", 0).values.tolist(),
            "piece": lambda: source.tokens_of("tokens", 0, share).values.tolist(),
        }
        if work == "footer":
            cache().clear()
        Flaky.requests = 0
        first, second = both_lack(works[work])
        assert first == second
        assert Flaky.requests == 1

    @pytest.mark.parametrize("column", [None, "tokens"])
    def test_what_has_just_come_is_not_asked_for_again(
        self, column: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        TestAhead().write(tmp_path / "data")
        source = rd.ParquetSource(f"flaky://{tmp_path}/data", remote=rd.Remote())
        source.row(150)
        Flaky.requests = 0
        read = partial(source.tokens, "tokens", 0) if column else partial(source.row, 0)
        source.prepare(column, 0)
        read()
        get = Cache.get
        with monkeypatch.context() as patch:  # whoever prepares looked before it came
            patch.setattr(Cache, "get", lambda *_: patch.setattr(Cache, "get", get))
            source.prepare(column, 0)
        fetch_runner().wait(source._key(0, column))
        read()
        assert Flaky.requests == 1


def _rows(shard: rd.Shard, source: Any) -> Any:
    return rd.Reader(source, shard, shuffle=64)


def _packed(shard: rd.Shard, source: Any) -> Any:
    return rd.TokenPacker(_rows(shard, source), column="tokens", seq_len=50, eos_id=None)


def test_what_was_not_begun_is_left_when_the_process_ends(tmp_path: Path) -> None:
    """Sixteen requests are under way, which end when they are told to, and dozens wait behind them."""
    rows = pa.table({"x": range(100)})
    pq.write_table(rows, tmp_path / "x.parquet", row_group_size=1)
    script = f"""
import threading
import fsspec
from fsspec.implementations.local import LocalFileSystem
import rescale_data as rd
from rescale_data.sources.decoded.ahead import exit_event

class Slow(LocalFileSystem):
    protocol = "slow"
    def cat_file(self, path, start=None, end=None, **kwargs):
        if begun:
            print("asked", flush=True)
            one.set()
            exit_event().wait()
            raise OSError("503 slow down")
        return super().cat_file(path, start, end, **kwargs)

begun, one = False, threading.Event()
fsspec.register_implementation("slow", Slow)
source = rd.ParquetSource("slow://{tmp_path}/x.parquet")
begun = True
for fragment in range(100):
    source.prepare(None, fragment)
one.wait()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240, check=True)
    assert 1 <= done.stdout.count("asked") <= 16


class TestLocalStore:
    def test_keeps_what_was_read(self, tmp_path: Path) -> None:
        source = far("parquet", tmp_path, cache_dir=tmp_path / "cache")
        rows = [source.row(i)["tokens"].tolist() for i in range(200)]
        cache().clear()
        Flaky.requests = 0
        again = type(source)(f"flaky://{tmp_path / 'parquet'}", cache_dir=tmp_path / "cache")
        assert [again.row(i)["tokens"].tolist() for i in range(200)] == rows
        assert Flaky.requests == 0

    def test_of_a_file_that_has_changed(self, tmp_path: Path) -> None:
        store, path = LocalStore(str(tmp_path / "cache"), 10_000), tmp_path / "x"
        for text in (b"before", b"behind"):
            path.write_bytes(text)
            os.utime(path, (1, len(list(tmp_path.rglob("*")))))
            found = replace(find_matching_files(f"flaky://{path}", ("x",)), store=store)
            assert found.open(0).read() == text

    def test_has_a_bound(self, tmp_path: Path) -> None:
        kept = LocalStore(str(tmp_path), 10_000)
        for i in range(200):
            assert kept.read(str(i), lambda: bytes(500)) == pa.py_buffer(bytes(500))
            assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) <= 10_000
        fetched: list[int] = []
        kept.read("199", lambda: fetched.append(1) or bytes(500))
        assert not fetched
        kept.read("large", lambda: bytes(5000))
        assert not any(path.stat().st_size == 5000 for path in tmp_path.rglob("*"))

    def test_the_largest_bound_holds_for_all_sources_of_a_folder(self, tmp_path: Path) -> None:
        def kept_bytes() -> int:
            return sum(path.stat().st_size for path in (tmp_path / "cache").rglob("*") if path.is_file())

        far("parquet", tmp_path, cache_dir=tmp_path / "cache", cache_dir_bytes=100_000)
        store = local_store.local_store_for(str(tmp_path / "cache"), 50_000)
        far("parquet", tmp_path, cache_dir=tmp_path / "cache", cache_dir_bytes=1000)
        for i in range(60):
            store.put(str(i), pa.py_buffer(bytes(1000)))
        assert 50_000 < kept_bytes() <= 100_000

    def test_deletes_nothing_of_the_users(self, tmp_path: Path) -> None:
        (tmp_path / "model.pt").write_bytes(bytes(20_000))
        os.utime(tmp_path / "model.pt", (1, 1))
        kept = LocalStore(str(tmp_path), 10_000)
        [kept.read(str(i), lambda: bytes(500)) for i in range(50)]
        assert (tmp_path / "model.pt").exists()

    def test_where_there_can_be_no_folder(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        (tmp_path / "file").touch()
        source = far("parquet", tmp_path, cache_dir=tmp_path / "file")
        assert source.row(3)["tokens"].tolist() == DOCS[3]
        assert [record.getMessage().count("Not a directory") for record in caplog.records] == [1]

    def test_a_folder_of_another_user_is_left_alone_with_one_warning(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        LocalStore(str(tmp_path), 10_000).put("a", pa.py_buffer(b"theirs"))
        before = sorted(tmp_path.rglob("*"))
        monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
        kept = LocalStore(str(tmp_path), 10_000)
        kept.put("b", pa.py_buffer(b"mine"))
        assert kept.get("a") is None
        assert [kept.read("a", lambda: b"mine") for _ in range(2)] == [pa.py_buffer(b"mine")] * 2
        assert sorted(tmp_path.rglob("*")) == before
        assert [record.getMessage().count("another user has made") for record in caplog.records] == [1]

    def test_a_folder_that_hosts_share_is_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        mounts = tmp_path / "mounts"
        mounts.write_text(f"disk / ext4 rw 0 0\nhost:/x {tmp_path} nfs4 rw 0 0\n/dev/y {tmp_path}/local ext4 rw 0 0\n")
        monkeypatch.setattr(local_store, "_MOUNTS", str(mounts))
        LocalStore(str(tmp_path / "local" / "a"), 100)
        with pytest.raises(ValueError, match="is on nfs4, which hosts share"):
            far("parquet", tmp_path, cache_dir=tmp_path / "a")

    def test_a_damaged_file_is_fetched_again(self, tmp_path: Path) -> None:
        kept = LocalStore(str(tmp_path), 10_000)
        kept.read("a", lambda: bytes(100))
        (path,) = [path for path in tmp_path.rglob("*") if path.is_file()]
        assert path.stat().st_mode & 0o222 == 0
        path.chmod(0o600)
        path.write_bytes(b"short")
        assert kept.read("a", lambda: bytes(range(100))) == pa.py_buffer(bytes(range(100)))
        path.chmod(0o600)
        data = path.read_bytes()
        path.write_bytes(b"?" + data[1:])  # as a disk may leave it
        assert kept.get("a") is None
        assert kept.read("a", lambda: bytes(100)) == pa.py_buffer(bytes(100))

    @pytest.mark.parametrize("replaced", [True, False])
    def test_a_file_that_was_damaged_after_it_was_read_is_fetched_again(self, replaced: bool, tmp_path: Path) -> None:
        kept = LocalStore(str(tmp_path), 10_000)
        for _ in range(2):
            kept.read("a", lambda: b"x" * 100)
        (path,) = [path for path in tmp_path.rglob("*") if path.is_file()]
        info, damaged = path.stat(), tmp_path / "damaged"
        damaged.write_bytes(b"?" + path.read_bytes()[1:])
        os.utime(damaged, ns=(info.st_atime_ns, info.st_mtime_ns))
        if replaced:  # another file, as old
            os.replace(damaged, path)
        else:  # the same file, at another time
            path.chmod(0o600)
            path.write_bytes(damaged.read_bytes())
            os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns + 1))
        assert kept.read("a", lambda: b"y" * 100) == pa.py_buffer(b"y" * 100)

    def test_processes_that_use_an_entry_in_turn_compute_its_checksum_once_each(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        LocalStore(str(tmp_path), 10_000).put("a", pa.py_buffer(bytes(100)))
        stores = [LocalStore(str(tmp_path), 10_000) for _ in range(2)]
        checked = Mock(side_effect=local_store._has_valid_checksum)
        monkeypatch.setattr(local_store, "_has_valid_checksum", checked)
        assert [store.get("a") for store in stores * 3] == [pa.py_buffer(bytes(100))] * 6
        assert checked.call_count == 2

    def test_what_it_knows_of_entries_has_a_bound(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(local_store, "_MAX_VERIFIED_ENTRIES", 5)
        kept = LocalStore(str(tmp_path), 2**20)
        for name in [*map(str, range(20))] * 2:
            assert kept.read(name, name.encode) == pa.py_buffer(name.encode())
            assert len(kept._verified) <= 5

    def test_entries_that_were_not_used_for_longest_go_first(self, tmp_path: Path) -> None:
        kept = LocalStore(str(tmp_path), 10_000)
        for i in range(6):
            kept.put(str(i), pa.py_buffer(bytes(1000)))
            (path,) = [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_atime > 100]
            os.utime(path, (i, i))  # last used in the order of their numbers
        kept.get("0")
        again = LocalStore(str(tmp_path), 6500)
        again.put("6", pa.py_buffer(b""))
        assert [i for i in range(6) if again.get(str(i)) is not None] == [0, 3, 4, 5]

    def test_another_process_may_delete_the_file_aside(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        kept, rename = LocalStore(str(tmp_path), 10_000), os.replace

        def deleted_first(aside: str, path: str) -> None:
            os.unlink(aside)
            rename(aside, path)

        monkeypatch.setattr(os, "replace", deleted_first)
        assert kept.read("a", lambda: bytes(500)) == pa.py_buffer(bytes(500))
        assert not [path for path in tmp_path.rglob("*") if path.is_file()]
        assert not caplog.records

    def test_a_full_disk_ends_nothing_and_is_told_once(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def full(aside: str, path: str) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        kept = LocalStore(str(tmp_path), 10_000)
        monkeypatch.setattr(os, "replace", full)
        assert [kept.read(name, lambda: bytes(500)) for name in "aab"] == [pa.py_buffer(bytes(500))] * 3
        assert [record.getMessage().count("No space left") for record in caplog.records] == [1]
        assert not [path for path in tmp_path.rglob("*") if path.is_file()]

    def test_many_processes_share_it(self, tmp_path: Path) -> None:
        context = multiprocessing.get_context("fork")
        processes = [context.Process(target=_use, args=(str(tmp_path), seed)) for seed in range(4)]
        [process.start() for process in processes]
        [process.join() for process in processes]
        assert [process.exitcode for process in processes] == [0] * 4
        assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) <= 20_000


def _use(folder: str, seed: int) -> None:
    kept = LocalStore(folder, 20_000)
    for number in np.random.default_rng(seed).integers(0, 60, 300).tolist():
        data = kept.read(str(number), lambda number=number: bytes([number]) * 500)
        assert data == pa.py_buffer(bytes([number]) * 500)
