"""What is kept on the local disk (`cache_dir=`): within its bound, right, and shared by all processes of a machine."""

import errno
import fcntl
import multiprocessing
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pytest

import rescale_data as rd
from rescale_data.sources.files import local_store
from rescale_data.sources.files.local_store import LocalStore
from tests.sources.corpora import DOCS, make_source

pytestmark = pytest.mark.usefixtures("own_cache", "far")


def files_in(folder):
    return [path for path in folder.rglob("*") if path.is_file()]


def num_bytes_in(folder):
    return sum(path.stat().st_size for path in files_in(folder))


def source_with(tmp_path, **kwargs):
    make_source("parquet", tmp_path / "parquet")
    return rd.ParquetSource(f"far://{tmp_path}/parquet", **kwargs)


class TestBound:
    def test_entries_go_and_files_of_the_user_stay(self, tmp_path):
        (tmp_path / "model.pt").write_bytes(bytes(20_000))
        os.utime(tmp_path / "model.pt", (1, 1))
        store = LocalStore(str(tmp_path), 10_000)
        for i in range(200):
            assert store.read(str(i), lambda: bytes(500)) == pa.py_buffer(bytes(500))
            assert num_bytes_in(tmp_path) <= 20_000 + 10_000
        fetched = []
        store.read("199", lambda: fetched.append(1) or bytes(500))
        assert not fetched
        store.read("large", lambda: bytes(5000))
        assert not any(path.stat().st_size == 5000 for path in files_in(tmp_path))
        assert (tmp_path / "model.pt").exists()

    def test_the_largest_one_holds_for_all_sources_of_a_folder(self, tmp_path):
        folder = tmp_path / "cache"
        source_with(tmp_path, cache_dir=folder, cache_dir_bytes=100_000)
        store = local_store.local_store_for(str(folder), 50_000)
        source_with(tmp_path, cache_dir=folder, cache_dir_bytes=1000)
        for i in range(60):
            store.put(str(i), pa.py_buffer(bytes(1000)))
        assert 50_000 < num_bytes_in(folder) <= 100_000

    def test_entries_that_were_not_used_for_longest_go_first(self, tmp_path):
        store = LocalStore(str(tmp_path), 10_000)
        for i in range(6):
            store.put(str(i), pa.py_buffer(bytes(1000)))
            (path,) = [path for path in files_in(tmp_path) if path.stat().st_atime > 100]
            os.utime(path, (i, i))  # last used in the order of their numbers
        store.get("0")
        again = LocalStore(str(tmp_path), 6500)
        again.put("6", pa.py_buffer(b""))
        assert [i for i in range(6) if again.get(str(i)) is not None] == [0, 3, 4, 5]

    def test_what_is_mapped_outlives_its_deletion(self, tmp_path):
        store = LocalStore(str(tmp_path), 1000)
        store.put("a", pa.py_buffer(b"x" * 100))
        data = store.get("a")
        [store.put(str(i), pa.py_buffer(b"y" * 100)) for i in range(20)]
        assert store.get("a") is None
        assert data is not None
        assert data.to_pybytes() == b"x" * 100


class TestFolders:
    def test_one_that_cannot_be(self, tmp_path, caplog):
        (tmp_path / "file").touch()
        source = source_with(tmp_path, cache_dir=tmp_path / "file")
        assert source.row(3)["tokens"].tolist() == DOCS[3]
        assert [record.getMessage().count("Not a directory") for record in caplog.records] == [1]

    def test_one_of_another_user_is_left_alone_with_one_warning(self, tmp_path, monkeypatch, caplog):
        LocalStore(str(tmp_path), 10_000).put("a", pa.py_buffer(b"theirs"))
        before = sorted(tmp_path.rglob("*"))
        monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
        store = LocalStore(str(tmp_path), 10_000)
        store.put("b", pa.py_buffer(b"mine"))
        assert store.get("a") is None
        assert [store.read("a", lambda: b"mine") for _ in range(2)] == [pa.py_buffer(b"mine")] * 2
        assert sorted(tmp_path.rglob("*")) == before
        assert [record.getMessage().count("another user has made") for record in caplog.records] == [1]

    def test_one_that_hosts_share_is_refused(self, tmp_path, monkeypatch):
        mounts = tmp_path / "mounts"
        mounts.write_text(f"disk / ext4 rw 0 0\nhost:/x {tmp_path} nfs4 rw 0 0\n/dev/y {tmp_path}/local ext4 rw 0 0\n")
        monkeypatch.setattr(local_store, "_MOUNTS", str(mounts))
        LocalStore(str(tmp_path / "local" / "a"), 100)
        with pytest.raises(ValueError, match="is on nfs4, which hosts share"):
            source_with(tmp_path, cache_dir=tmp_path / "a")

    @pytest.mark.parametrize("full", [True, False])
    def test_where_nothing_can_be_kept_everything_is_fetched(self, full, tmp_path, monkeypatch, caplog):
        """A full disk is told once; that another process has deleted the file aside is not."""
        rename = os.replace

        def cannot(aside, path):
            if full:
                raise OSError(errno.ENOSPC, "No space left on device")
            os.unlink(aside)
            rename(aside, path)

        store = LocalStore(str(tmp_path), 10_000)
        monkeypatch.setattr(os, "replace", cannot)
        assert [store.read(name, lambda: bytes(500)) for name in "aab"] == [pa.py_buffer(bytes(500))] * 3
        assert [record.getMessage().count("No space left") for record in caplog.records] == [1] * full
        assert not files_in(tmp_path)


def test_where_there_are_no_locks_it_is_kept_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    store, fetch = LocalStore(str(tmp_path), 10_000), Mock(return_value=b"abc")
    assert [store.read("a", fetch) for _ in range(2)] == [pa.py_buffer(b"abc")] * 2
    fetch.assert_called_once()


def cut_to(num_bytes, path):
    path.chmod(0o600)
    os.truncate(path, num_bytes)


def write_into(path):
    modified = path.stat().st_mtime_ns
    path.chmod(0o600)
    path.write_bytes(b"?" + path.read_bytes()[1:])
    os.utime(path, ns=(modified, modified + 1))


def replace(path):
    info, other = path.stat(), path.with_name("other")
    other.write_bytes(b"?" + path.read_bytes()[1:])
    os.utime(other, ns=(info.st_atime_ns, info.st_mtime_ns))
    os.replace(other, path)


class TestDamage:
    @pytest.mark.parametrize("was_read", [True, False])
    @pytest.mark.parametrize("damage", [*(partial(cut_to, n) for n in (0, 3, 60, 103)), write_into, replace])
    def test_a_damaged_entry_is_fetched_again(self, damage, was_read, tmp_path):
        """As a disk may leave it that lost its power; also under the eyes of a process that has read it."""
        store = LocalStore(str(tmp_path), 10_000)
        for letter in (b"x", b"y"):
            store.put("a", pa.py_buffer(letter * 100))
            if was_read:
                assert store.get("a") == pa.py_buffer(letter * 100)
            (path,) = files_in(tmp_path)
            assert path.stat().st_mode & 0o222 == 0
            damage(path)
            assert store.get("a") is None
        assert store.read("a", lambda: b"z" * 100) == pa.py_buffer(b"z" * 100)

    def test_processes_that_use_an_entry_in_turn_compute_its_checksum_once_each(self, tmp_path, monkeypatch):
        LocalStore(str(tmp_path), 10_000).put("a", pa.py_buffer(bytes(100)))
        stores = [LocalStore(str(tmp_path), 10_000) for _ in range(2)]
        checked = Mock(side_effect=local_store._has_valid_checksum)
        monkeypatch.setattr(local_store, "_has_valid_checksum", checked)
        assert [store.get("a") for store in stores * 3] == [pa.py_buffer(bytes(100))] * 6
        assert checked.call_count == 2

    def test_what_it_knows_of_entries_has_a_bound(self, tmp_path, monkeypatch):
        monkeypatch.setattr(local_store, "_MAX_VERIFIED_ENTRIES", 5)
        store = LocalStore(str(tmp_path), 2**20)
        for name in [*map(str, range(20))] * 2:
            assert store.read(name, name.encode) == pa.py_buffer(name.encode())
            assert len(store._verified) <= 5


def use(folder, seed):
    store = LocalStore(folder, 20_000)
    for number in np.random.default_rng(seed).integers(0, 60, 300).tolist():
        data = store.read(str(number), lambda number=number: bytes([number]) * 500)
        assert data == pa.py_buffer(bytes([number]) * 500)


def miss(folder, fetched):
    def fetch():
        with fetched.get_lock():
            fetched.value += 1
        time.sleep(0.2)
        return b"x" * 100

    assert LocalStore(folder, 2**20).read("range", fetch) == pa.py_buffer(b"x" * 100)


class TestProcesses:
    def run(self, work, arguments):
        context = multiprocessing.get_context("fork")
        processes = [context.Process(target=work, args=each) for each in arguments]
        [process.start() for process in processes]
        [process.join() for process in processes]
        assert [process.exitcode for process in processes] == [0] * len(arguments)

    def test_many_share_it(self, tmp_path):
        self.run(use, [(str(tmp_path), seed) for seed in range(4)])
        assert num_bytes_in(tmp_path) <= 20_000

    def test_those_that_miss_a_range_together_fetch_it_once(self, tmp_path):
        fetched = multiprocessing.get_context("fork").Value("i", 0)
        self.run(miss, [(str(tmp_path), fetched)] * 6)
        assert fetched.value == 1

    def test_a_childs_life_does_not_lengthen_a_lock(self, tmp_path):
        """Forked while a range is fetched: the parent's lock is its own, and gone with the request."""
        store, inside, go_on = LocalStore(str(tmp_path), 2**20), threading.Event(), threading.Event()

        def fetch():
            inside.set()
            go_on.wait(60)
            return b"abc"

        reader, writer = os.pipe()
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(store.read, "range", fetch)
            inside.wait()
            child = os.fork()
            if not child:
                os.close(writer)
                os.read(reader, 1)  # until the test has ended
                os._exit(0)
            os.close(reader)
            go_on.set()
            assert answer.result() == pa.py_buffer(b"abc")
        with store._hold_lock(store._path("range")):  # the child would hold it
            pass
        os.close(writer)
        os.waitpid(child, 0)
