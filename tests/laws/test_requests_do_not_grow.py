"""Reading does not grow, at the server: requests and bytes of an epoch do not depend on the number of ranks or workers."""

from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import rescale_data as rd
from rescale_data.sources.decoded.cache import cache
from tests.checkpoint.object_server import BUCKET, Request, Server, serving
from tests.laws.pairs import Case, cases, name_of
from tests.laws.tables import FILES, write

pytest.importorskip("moto.server")
s3fs = pytest.importorskip("s3fs")

NUM_SHARDS, PER_SHARD = 8, 24
ROWS = NUM_SHARDS * PER_SHARD


def table_of(rows: np.ndarray[Any, Any]) -> pa.Table:
    lists = [np.random.default_rng(int(i)).integers(0, 60000, 3000).astype(np.uint16) for i in rows]
    return pa.table({"id": rows, "tokens": pa.array(lists, pa.list_(pa.uint16()))})


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serve files of one fragment, each of one logical shard in an epoch: what two processes share they both read."""
    folder = tmp_path_factory.mktemp("corpora")
    with serving() as made:
        bucket: Any = s3fs.S3FileSystem(**made.options)
        for kind in FILES:
            (folder / kind).mkdir()
            for number, rows in enumerate(np.split(np.arange(ROWS), NUM_SHARDS)):
                write(kind, folder / kind / f"{number}", table_of(rows), PER_SHARD)
            for file in (folder / kind).iterdir():
                bucket.put_file(str(file), f"{BUCKET}/requests/{kind}/{file.name}")
        yield made


def read(source: Any, shard: rd.Shard) -> rd.Reader:
    """Read rows in windows; in their own order where the next epoch's are read ahead, so that these are the same."""
    return rd.Reader(source, shard, shuffle=False if source.reads_ahead else 8)


def shuffled(source: Any, shard: rd.Shard) -> Any:
    return rd.Shuffle(read(source, shard), 3)


def mapped(source: Any, shard: rd.Shard) -> Any:
    return rd.Map(read(source, shard), as_it_is)


def as_it_is(row: Any) -> Any:
    return row


PIPELINES = {"rows": read, "shuffled": shuffled, "mapped": mapped}
DIMENSIONS: dict[str, list[Any]] = {
    "kind": list(FILES),
    "pipeline": list(PIPELINES),
    "num_workers": [1, 2, 4],
    "num_ranks": [1, 2],
    "read_ahead": [True, False],
    "cache_bytes": [2**30, 2**23],
}


ONCE: Any = {"retries": 0, "timeout": 200.0}
"""A slow answer is waited for: on a busy machine it would be asked for once more."""


def requests_of_an_epoch(
    case: Case, server: Server, index: Path, cache_dir: Path | None = None
) -> tuple[Counter[Request], int]:
    """Return what all ranks and workers request for the rows of an epoch, and the bytes that come, once files are indexed."""
    found: Counter[Request] = Counter()
    num_bytes = 0
    for rank in range(case["num_ranks"]):
        source: Any = FILES[case["kind"]][0](
            f"s3://{BUCKET}/requests/{case['kind']}",
            storage_options={**server.options, "use_listings_cache": False},
            index_dir=index,
            cache_bytes=case["cache_bytes"],
            cache_dir=cache_dir,
            remote=rd.Remote(read_ahead=case["read_ahead"], **ONCE),
        )
        sizes = {"global_batch_size": 8, "micro_batch_size": 1, "num_logical_shards": NUM_SHARDS}
        where = {"dp_rank": rank, "dp_world_size": case["num_ranks"], "num_workers": case["num_workers"]}
        loader = rd.DataLoader(partial(PIPELINES[case["pipeline"]], source), **sizes, **where, collate_fn=list)
        cache().clear()
        before = server.sent_bytes
        with server.recording() as requests:
            assert sum(1 for _ in loader) == ROWS // case["num_ranks"]
            loader.close()
        found.update(requests)
        num_bytes += server.sent_bytes - before
    return found, num_bytes


@pytest.mark.parametrize("case", cases(DIMENSIONS), ids=name_of)
def test_an_epoch_is_requested_once_by_any_number_of_ranks_and_workers(
    case: Case, server: Server, tmp_path: Path
) -> None:
    alone = {**case, "num_workers": 0, "num_ranks": 1}
    requests_of_an_epoch(alone, server, tmp_path)  # makes the index
    expected, num_bytes = requests_of_an_epoch(alone, server, tmp_path)
    found, bytes_here = requests_of_an_epoch(case, server, tmp_path)
    assert found == expected
    assert set(found.values()) == {1}
    assert bytes_here == num_bytes


@pytest.mark.parametrize("kind", list(FILES))
def test_a_restart_on_other_ranks_fetches_nothing_of_what_lies_on_the_local_disk(
    kind: str, server: Server, tmp_path: Path
) -> None:
    alone = {
        "kind": kind,
        "pipeline": "rows",
        "num_workers": 0,
        "num_ranks": 1,
        "read_ahead": True,
        "cache_bytes": 2**23,
    }
    requests_of_an_epoch(alone, server, tmp_path / "index")  # makes the index
    first, _ = requests_of_an_epoch(alone, server, tmp_path / "index", tmp_path / "cache")
    again, num_bytes = requests_of_an_epoch(
        {**alone, "num_workers": 2, "num_ranks": 2}, server, tmp_path / "index", tmp_path / "cache"
    )
    assert sum(first.values()) >= NUM_SHARDS
    assert num_bytes == 0
    assert {request.method for request in again} <= {"HEAD"}  # the size of an .idx is asked for when it is opened
