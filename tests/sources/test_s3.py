"""An S3 server on loopback."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import rescale_data as rd
from rescale_data.testing import assert_rescalable
from tests.sources.test_rescalable import loader_of, make_source, packed

pytest.importorskip("s3fs")
moto = pytest.importorskip("moto.server")


@pytest.fixture(scope="module")
def options() -> Iterator[dict[str, Any]]:
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield {
        "key": "test",
        "secret": "test",
        "client_kwargs": {"endpoint_url": f"http://{host}:{port}", "region_name": "eu-west-1"},
    }
    server.stop()


@pytest.mark.parametrize("kind", ["parquet", "arrow", "jsonl", "tar", "megatron"])
def test_files_in_a_bucket(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    import s3fs

    bucket = s3fs.S3FileSystem(**options)
    local = make_source(kind, tmp_path / kind)
    bucket.mkdirs(f"s3://{kind}", exist_ok=True)
    for path in (tmp_path / kind).iterdir():
        if not path.name.startswith("."):
            bucket.put_file(str(path), f"s3://{kind}/{path.name}")
    index = {"index_dir": tmp_path / "index"} if kind in ("jsonl", "tar") else {}
    source: Any = type(local)(f"s3://{kind}", storage_options=options, **index)
    assert source.unfold(source.manifest()) == local.manifest()
    assert_rescalable(partial(loader_of, partial(packed, source=source, kind=kind)), [(1, 4, 0), (2, 3, 0)], steps=1)


def test_what_is_not_there(options: dict[str, Any]) -> None:
    with pytest.raises(FileNotFoundError, match="s3://nothing"):
        rd.ParquetSource("s3://nothing/here", storage_options=options)


def test_what_has_changed_since_this_process_listed_it(options: dict[str, Any], tmp_path: Path) -> None:
    """s3fs keeps listings; another process, or a filesystem with other options, has written in between."""
    import s3fs

    bucket = s3fs.S3FileSystem(**options, use_listings_cache=False)
    bucket.mkdirs("s3://changing", exist_ok=True)

    def rows(given: str) -> list[int]:
        source = rd.JsonlSource(f"s3://changing{given}", storage_options=options, index_dir=tmp_path)
        return [source.row(i)["x"] for i in range(source.num_rows)]

    for given in ("/*.jsonl", "", "/**/*.jsonl", "/a.jsonl"):
        bucket.pipe_file("s3://changing/a.jsonl", b'{"x": 1}\n{"x": 2222}\n')
        assert rows("/*.jsonl") == rows(given) == [1, 2222]
        bucket.pipe_file("s3://changing/a.jsonl", b'{"x": 3333}\n{"x": 4}\n')
        bucket.pipe_file("s3://changing/b.jsonl", b'{"x": 5}\n')
        assert rows(given) == [3333, 4, 5][: 2 if "a" in given else 3]
        bucket.rm_file("s3://changing/b.jsonl")


def test_names_are_taken_as_they_are(options: dict[str, Any], tmp_path: Path) -> None:
    import s3fs

    bucket = s3fs.S3FileSystem(**options)
    bucket.mkdirs("s3://names", exist_ok=True)
    names = ["a/x.jsonl", "a//x.jsonl", "a/./x.jsonl", "a/[1].jsonl", "a/#.jsonl", "a/%20 +&.jsonl", "a/ü.jsonl"]
    for i, name in enumerate(names):
        bucket.pipe_file(f"s3://names/{name}", b'{"x": %d}\n' % i)
    for given in (["a"], names, *([name] for name in names)):
        urls = [f"s3://names/{name}" for name in given]
        source = rd.JsonlSource(urls, storage_options=options, index_dir=tmp_path)
        expected = {*range(len(names))} if given == ["a"] else {names.index(name) for name in given}
        assert {source.row(i)["x"] for i in range(source.num_rows)} == expected
