"""Names in a bucket, and what has changed there. That rows are those of the files, whatever the server does: laws 5 and 6."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rescale_data as rd
from tests.checkpoint.object_server import BUCKET, serving

pytest.importorskip("s3fs")
pytest.importorskip("moto.server")

CHANGING = f"s3://{BUCKET}/changing"


@pytest.fixture(scope="module")
def options() -> Iterator[dict[str, Any]]:
    with serving() as server:
        yield server.options


def test_what_is_not_there(options: dict[str, Any]) -> None:
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
