"""An S3 server on loopback."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import rescale_data as rd
from rescale_data.testing import assert_rescalable
from tests.sources.test_rescalable import DOCS, loader_of, make_source, packed

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
    assert source.num_rows == len(DOCS)
    assert_rescalable(partial(loader_of, partial(packed, source=source, kind=kind)), [(1, 4, 0), (2, 3, 0)], steps=1)


def test_what_is_not_there(options: dict[str, Any]) -> None:
    with pytest.raises(FileNotFoundError, match="s3://nothing"):
        rd.ParquetSource("s3://nothing/here", storage_options=options)
