"""Files from globs, folders, lists and URLs, in the same order everywhere, and of servers, by S3 and http. Faults: law 6."""

import errno
import functools
import http.server
import io
import json
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFile

import rescale_data as rd
from rescale_data.sources.files import remote
from rescale_data.sources.files.paths import find_matching_files
from rescale_data.sources.files.remote import RemoteError
from tests.checkpoint.object_server import BUCKET, serving
from tests.formats import write_megatron, write_table

CHANGING = f"s3://{BUCKET}/changing"
NAMES = ("b/2.parquet", "b/10.parquet", "a.parquet", "B.parquet", "notes.txt", "_tmp/x.parquet", ".hidden.parquet")


@pytest.fixture
def folder(tmp_path):
    for name in NAMES:
        path = tmp_path / "corpus" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * len(name))
    return tmp_path / "corpus"


def names(paths):
    return list(find_matching_files(paths, (".parquet",)).names)


@pytest.mark.parametrize("place", ["", "file://", "memory:/"])
def test_folders_globs_and_lists(place, folder):
    if place == "memory:/":
        fsspec.filesystem("memory").put(str(folder), str(folder), recursive=True)
    root = f"{place}{folder}"
    whole = ["B.parquet", "a.parquet", "b/10.parquet", "b/2.parquet"]
    assert names(root) == names(f"{root}/") == whole
    assert names(f"{root}/?.parquet") == ["B.parquet", "a.parquet"]
    assert names(f"{root}/*.txt") == ["notes.txt"]
    assert names(f"{root}/b/*") == ["10.parquet", "2.parquet"]
    assert names(f"{root}/**/?.parquet") == sorted([*whole[:2], "_tmp/x.parquet", "b/2.parquet"])
    assert names(f"{root}/**/*.parquet") == sorted([*whole, "_tmp/x.parquet"])
    assert names(f"{root}/.*.parquet") == [".hidden.parquet"]
    assert names(f"{root}/a.parquet") == ["a.parquet"]
    assert names([f"{root}/b/2.parquet", f"{root}/a.parquet", f"{root}/b"]) == ["a.parquet", *whole[2:]]
    files = find_matching_files(root, (".parquet",))
    assert files.sizes == (9, 9, 12, 11)
    assert files.path(3).endswith(f"{folder}/b/2.parquet")
    with files.open(1) as file:
        assert file.read() == b"x" * 9


def test_a_folder_that_cannot_be_listed_is_no_empty_one(folder, monkeypatch):
    scan = os.scandir

    def refuse(path):
        if os.path.basename(path) in ("b", "_tmp"):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(PermissionError, match="corpus/b'"):
        names(folder)


class TestLinks:
    def test_to_a_folder_are_followed(self, folder, tmp_path):
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "part").symlink_to(folder / "b")
        assert names(tmp_path / "run") == ["part/10.parquet", "part/2.parquet"]

    @pytest.mark.parametrize(("link", "to"), [("b/up", ".."), ("b/itself", "itself"), ("b/out", "../../outside")])
    def test_that_lead_in_a_circle_are_named(self, link, to, folder):
        (folder.parent / "outside").mkdir()
        (folder.parent / "outside" / "back").symlink_to(folder)
        (folder / link).symlink_to(to)
        with pytest.raises(ValueError, match=f"{link}.* is a symbolic link that leads in a circle.*give a glob"):
            names(folder)

    def test_to_nothing_are_not_left_out(self, folder):
        (folder / "c.parquet").symlink_to("nowhere")
        for given in (f"{folder}/*.parquet", folder):
            with pytest.raises(FileNotFoundError, match=r"c\.parquet"):
                names(given)


def test_relative_to_where_we_are(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(folder)
    assert names("b/*.parquet") == ["10.parquet", "2.parquet"]
    assert names(".") == names(folder)
    folder.rename(tmp_path / "run[1]")
    monkeypatch.chdir(tmp_path / "run[1]")
    assert names("*.parquet") == names("../run[[]1]/*.parquet") == ["B.parquet", "a.parquet"]


@pytest.mark.parametrize("place", ["", "file://"])
@pytest.mark.parametrize("again", ["b/./2.parquet", "b//2.parquet", "b/../b/2.parquet", "b//*.parquet", "./b"])
def test_one_file_spelled_in_two_ways_is_read_once(place, again, folder):
    root = f"{place}{folder}"
    assert names([f"{root}/a.parquet", f"{root}/b", f"{root}/{again}"]) == ["a.parquet", "b/10.parquet", "b/2.parquet"]


def test_a_name_with_brackets_is_a_file_first(tmp_path):
    (tmp_path / "part[1].parquet").write_bytes(b"x")
    fsspec.filesystem("memory").pipe("/brackets/part[1].parquet", b"x")
    for folder in (tmp_path, "memory://brackets"):
        assert names(f"{folder}/part[1].parquet") == ["part[1].parquet"]
        with pytest.raises(FileNotFoundError, match="matches no file"):
            names(f"{folder}/part[2].parquet")


@pytest.mark.parametrize("below", ["s/", "s//", "s/../"])
def test_keys_stay_as_they_are(below):
    """In a bucket a//b, a/./b, a/../b and a/b are four objects."""
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    keys = [below + key for key in ("a//b.parquet", "a/b.parquet", "a/./b.parquet", "a/../b.parquet", "/c/b.parquet")]
    for key in keys:
        memory.store[f"/{key}"] = MemoryFile(memory, f"/{key}", key.encode())
    for given in (keys, *([key] for key in keys)):
        files = find_matching_files([f"memory://{key}" for key in given], (".parquet",))
        found = [files.reader_of(file).read(0, 99).to_pybytes().decode() for file in range(len(files.names))]
        assert sorted(found) == sorted(given)


def test_a_row_s_file_is_found_by_its_name():
    """As `exclude=` does. A name that only a disk takes for the same is found if no file has it."""
    memory, table = fsspec.filesystem("memory"), pa.table({"x": [1, 2]})
    keys = ("rows/a//b.parquet", "rows/a/b.parquet", "rows/c.parquet")
    for key in keys:
        with memory.open(f"/{key}", "wb") as file:
            pq.write_table(table, file)
    source = rd.ParquetSource([f"memory://{key}" for key in keys])
    for row in range(source.num_rows):
        name, row_in_file = source.file_row(row)
        for given in (name, f"memory://rows/{name}"):
            assert source.rows_of_file(given)[row_in_file] == row
    assert source.rows_of_file("./c.parquet") == source.rows_of_file("c.parquet")


@pytest.fixture(scope="module")
def options():
    pytest.importorskip("s3fs")
    pytest.importorskip("moto.server")
    with serving() as server:
        yield server.options


@pytest.fixture
def bucket(options):
    return fsspec.filesystem("s3", **options, use_listings_cache=False)


def test_a_bucket_that_is_not_there_is_named(options):
    with pytest.raises(FileNotFoundError, match="s3://nothing"):
        rd.ParquetSource("s3://nothing/here", storage_options=options)


def test_what_has_changed_since_this_process_listed_it(bucket, options, tmp_path):
    """s3fs keeps listings; another process, or a filesystem with other options, has written in between."""

    def rows(given):
        source = rd.JsonlSource(f"{CHANGING}{given}", storage_options=options, index_dir=tmp_path)
        return [source.row(i)["x"] for i in range(source.num_rows)]

    for given in ("/*.jsonl", "", "/**/*.jsonl", "/a.jsonl"):
        bucket.pipe_file(f"{CHANGING}/a.jsonl", b'{"x": 1}\n{"x": 2222}\n')
        assert rows("/*.jsonl") == rows(given) == [1, 2222]
        bucket.pipe_file(f"{CHANGING}/a.jsonl", b'{"x": 3333}\n{"x": 4}\n')
        bucket.pipe_file(f"{CHANGING}/b.jsonl", b'{"x": 5}\n')
        assert rows(given) == [3333, 4, 5][: 2 if "a" in given else 3]
        bucket.rm_file(f"{CHANGING}/b.jsonl")


def test_names_are_taken_as_they_are(bucket, options, tmp_path):
    names = ["a/x.jsonl", "a//x.jsonl", "a/./x.jsonl", "a/[1].jsonl", "a/#.jsonl", "a/%20 +&.jsonl", "a/ü.jsonl"]
    for i, name in enumerate(names):
        bucket.pipe_file(f"s3://{BUCKET}/names/{name}", b'{"x": %d}\n' % i)
    for given in (["a"], names, *([name] for name in names)):
        urls = [f"s3://{BUCKET}/names/{name}" for name in given]
        source = rd.JsonlSource(urls, storage_options=options, index_dir=tmp_path)
        expected = {*range(len(names))} if given == ["a"] else {names.index(name) for name in given}
        assert {source.row(i)["x"] for i in range(source.num_rows)} == expected


class Handler(http.server.SimpleHTTPRequestHandler):
    """Lists folders and answers ranges; ``fails`` gives the status of a path that fails."""

    fails: Callable[[str], int] = staticmethod(lambda path: 0)

    def send_head(self):
        if status := type(self).fails(self.path):
            self.send_error(status)
            return None
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or "")
        if asked is None:
            return super().send_head()
        data = Path(self.translate_path(self.path)).read_bytes()[int(asked[1]) : int(asked[2]) + 1]
        self.send_response(206)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        return io.BytesIO(data)

    def log_message(self, format, *args): ...


@pytest.fixture
def url(tmp_path, monkeypatch):
    pytest.importorskip("aiohttp")
    monkeypatch.setattr(remote, "_FIRST_PAUSE_SECONDS", 0.001)
    for i, name in enumerate(("a", "b", "more/c")):
        write_table(tmp_path / f"data/{name}.parquet", {"x": range(10 * i, 10 * i + 10)})
    write_megatron(tmp_path / "data" / "a", [[1, 2], [3]])
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(tmp_path)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/data"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("given", "num_files"),
    [("/a.parquet", 1), ("", 3), ("/", 3), ("/*.parquet", 2), ("/**/*.parquet", 3), ("/a.parquet?key=1&more=a/b", 1)],
)
def test_by_plain_url(url, given, num_files):
    source = rd.ParquetSource(url + given)
    assert [source.row(i)["x"] for i in range(source.num_rows)] == list(range(10 * num_files))
    assert source.locate(3) == f"{url}/{given[1:] if 'a' in given.partition('.')[0] else 'a.parquet'}, row 3"


def test_a_file_that_has_changed_by_its_time(url, tmp_path):
    """The server has no ETag, and the file is as long as before."""
    for i, lines in enumerate(('{"x": 1}\n{"x": 2222}\n', '{"x": 3333}\n{"x": 4}\n')):
        path = tmp_path / "data" / "a.jsonl"
        path.write_text(lines)
        os.utime(path, (10**9 + i, 10**9 + i))
        source = rd.JsonlSource(f"{url}/a.jsonl", index_dir=tmp_path / "index")
        assert [f"{source.row(row)}" for row in range(2)] == [f"{json.loads(line)}" for line in lines.splitlines()]


def test_what_is_not_there(url):
    with pytest.raises(FileNotFoundError, match=r"none\.parquet"):
        rd.ParquetSource(f"{url}/none.parquet")


@pytest.mark.parametrize("status", [403, 503])
@pytest.mark.parametrize(
    ("given", "path"),
    [("/a.parquet", "a.parquet"), ("", "more"), ("/**/*.parquet", "more"), ("", "b.parquet"), ("/a.bin", "a.idx")],
)
def test_what_cannot_be_asked_for_is_never_absent(url, given, path, status, monkeypatch):
    """Of any answer but 200 fsspec says that there is no such file, and of a folder that fails that it has none."""
    monkeypatch.setattr(Handler, "fails", staticmethod(lambda asked: status * asked.rstrip("/").endswith(path)))
    with pytest.raises(RemoteError, match=rf"{url}.*{status}"):
        (rd.MegatronSource if "bin" in given else rd.ParquetSource)(url + given, remote=rd.Remote(retries=1))
