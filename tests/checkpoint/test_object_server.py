"""The proxy before the test's S3 server: it fails in each way, each time, the request that it is told to fail."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.checkpoint.object_server import BUCKET, FAULTS, Server, serving

pytest.importorskip("moto.server")
s3fs = pytest.importorskip("s3fs")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as made:
        yield made


@pytest.mark.parametrize("fault", FAULTS)
def test_one_request_fails_and_no_other(fault: str, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    config = {"retries": {"total_max_attempts": 1}, "read_timeout": 3 if fault == "stall" else 60}
    bucket: Any = s3fs.S3FileSystem(**{**server.options, "config_kwargs": config}, skip_instance_cache=True)
    for name in "ab":
        bucket.pipe(f"{BUCKET}/{name}", name.encode() * 100)
    with server.recording() as requests:
        assert bucket.cat_file(f"{BUCKET}/a", start=10, end=20) == b"a" * 10
    (request,) = requests
    assert (request.method, request.path, request.range) == ("GET", f"/{BUCKET}/a", "bytes=10-19")
    errors = {"403": PermissionError, "404": FileNotFoundError}
    with server.failing(request, fault):
        assert bucket.cat_file(f"{BUCKET}/b", start=10, end=20) == b"b" * 10
        assert bucket.cat_file(f"{BUCKET}/a", start=10, end=30) == b"a" * 20
        for _ in range(2):
            with pytest.raises(errors.get(fault, Exception)):
                bucket.cat_file(f"{BUCKET}/a", start=10, end=20)
    assert bucket.cat_file(f"{BUCKET}/a", start=10, end=20) == b"a" * 10
    with server.failing(request, fault, after=1):
        assert bucket.cat_file(f"{BUCKET}/a", start=10, end=20) == b"a" * 10
        with pytest.raises(errors.get(fault, Exception)):
            bucket.cat_file(f"{BUCKET}/a", start=10, end=20)
