"""Files of servers, by S3 and by http: names, what has changed, and what cannot be answered. Whatever fails: laws 5 and 6."""

import functools
import http.server
import io
import json
import os
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import rescale_data as rd
from rescale_data.sources.files import remote
from rescale_data.sources.files.remote import RemoteError
from tests.checkpoint.object_server import BUCKET, serving
from tests.formats import write_megatron, write_table

pytest.importorskip("s3fs")
pytest.importorskip("moto.server")

CHANGING = f"s3://{BUCKET}/changing"


@pytest.fixture(scope="module")
def options() -> Iterator[dict[str, Any]]:
    with serving() as server:
        yield server.options


def test_a_bucket_that_is_not_there_is_named(options: dict[str, Any]) -> None:
    with pytest.raises(FileNotFoundError, match="s3://nothing"):
        rd.ParquetSource("s3://nothing/here", storage_options=options)


def test_what_has_changed_since_this_process_listed_it(options: dict[str, Any], tmp_path: Path) -> None:
    """s3fs keeps listings; another process, or a filesystem with other options, has written in between."""
    import s3fs

    bucket = s3fs.S3FileSystem(**options, use_listings_cache=False)

    def rows(given: str) -> list[int]:
        source = rd.JsonlSource(f"{CHANGING}{given}", storage_options=options, index_dir=tmp_path)
        return [source.row(i)["x"] for i in range(source.num_rows)]

    for given in ("/*.jsonl", "", "/**/*.jsonl", "/a.jsonl"):
        bucket.pipe_file(f"{CHANGING}/a.jsonl", b'{"x": 1}\n{"x": 2222}\n')
        assert rows("/*.jsonl") == rows(given) == [1, 2222]
        bucket.pipe_file(f"{CHANGING}/a.jsonl", b'{"x": 3333}\n{"x": 4}\n')
        bucket.pipe_file(f"{CHANGING}/b.jsonl", b'{"x": 5}\n')
        assert rows(given) == [3333, 4, 5][: 2 if "a" in given else 3]
        bucket.rm_file(f"{CHANGING}/b.jsonl")


def test_names_are_taken_as_they_are(options: dict[str, Any], tmp_path: Path) -> None:
    import s3fs

    bucket = s3fs.S3FileSystem(**options)
    names = ["a/x.jsonl", "a//x.jsonl", "a/./x.jsonl", "a/[1].jsonl", "a/#.jsonl", "a/%20 +&.jsonl", "a/ü.jsonl"]
    for i, name in enumerate(names):
        bucket.pipe_file(f"s3://{BUCKET}/names/{name}", b'{"x": %d}\n' % i)
    for given in (["a"], names, *([name] for name in names)):
        urls = [f"s3://{BUCKET}/names/{name}" for name in given]
        source = rd.JsonlSource(urls, storage_options=options, index_dir=tmp_path)
        expected = {*range(len(names))} if given == ["a"] else {names.index(name) for name in given}
        assert {source.row(i)["x"] for i in range(source.num_rows)} == expected


pytest.importorskip("aiohttp")


class Handler(http.server.SimpleHTTPRequestHandler):
    """Lists folders and answers ranges; ``fails`` gives the status of a path that fails."""

    fails: Callable[[str], int] = staticmethod(lambda path: 0)

    def send_head(self) -> Any:
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

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(remote, "_FIRST_PAUSE_SECONDS", 0.001)
    for i, name in enumerate(("a", "b", "more/c")):
        write_table(tmp_path / f"data/{name}.parquet", {"x": range(10 * i, 10 * i + 10)})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(tmp_path)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/data"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("given", "num_files"),
    [("/a.parquet", 1), ("", 3), ("/", 3), ("/*.parquet", 2), ("/**/*.parquet", 3), ("/a.parquet?key=1&more=a/b", 1)],
)
def test_by_plain_url(url: str, given: str, num_files: int) -> None:
    source = rd.ParquetSource(url + given)
    assert [source.row(i)["x"] for i in range(source.num_rows)] == list(range(10 * num_files))
    assert source.locate(3) == f"{url}/{given[1:] if 'a' in given.partition('.')[0] else 'a.parquet'}, row 3"


def test_a_file_that_has_changed_by_its_time(url: str, tmp_path: Path) -> None:
    """The server has no ETag, and the file is as long as before."""
    for i, lines in enumerate(('{"x": 1}\n{"x": 2222}\n', '{"x": 3333}\n{"x": 4}\n')):
        path = tmp_path / "data" / "a.jsonl"
        path.write_text(lines)
        os.utime(path, (10**9 + i, 10**9 + i))
        source = rd.JsonlSource(f"{url}/a.jsonl", index_dir=tmp_path / "index")
        assert [f"{source.row(row)}" for row in range(2)] == [f"{json.loads(line)}" for line in lines.splitlines()]


def test_what_is_not_there(url: str) -> None:
    with pytest.raises(FileNotFoundError, match=r"none\.parquet"):
        rd.ParquetSource(f"{url}/none.parquet")


def test_an_index_that_cannot_be_asked_for_is_never_absent(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_megatron(tmp_path / "data" / "docs", [[1, 2], [3]])
    monkeypatch.setattr(Handler, "fails", staticmethod(lambda asked: 503 * asked.endswith(".idx")))
    with pytest.raises(RemoteError, match=rf"{url}/docs\.idx.*503"):
        rd.MegatronSource(f"{url}/docs.bin", remote=rd.Remote(retries=1))


@pytest.mark.parametrize("status", [403, 503])
@pytest.mark.parametrize(
    ("given", "path"), [("/a.parquet", "a.parquet"), ("", "more"), ("/**/*.parquet", "more"), ("", "b.parquet")]
)
def test_what_cannot_be_asked_for_is_never_absent(
    url: str, given: str, path: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of any answer but 200 fsspec says that there is no such file, and of a folder that fails that it has none."""
    monkeypatch.setattr(Handler, "fails", staticmethod(lambda asked: status * asked.rstrip("/").endswith(path)))
    with pytest.raises(RemoteError, match=rf"{url}.*{status}"):
        rd.ParquetSource(url + given, remote=rd.Remote(retries=1))
