"""``shuffle=False``: rows in the order of the dataset, each once, on any aligned topology and over resumes within the epoch."""

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rescale_data as rd
from tests.histories.books import Books
from tests.histories.crew import in_threads
from tests.histories.ranks import Seats, Top
from tests.pipelines import as_samples

pytestmark = pytest.mark.usefixtures("own_cache")


def order_of(seats: Seats, stop: int | None = None) -> list[int]:
    """The real rows of the global batches up to a step, or to the epoch's end, in rank order."""
    books = Books()
    while (stop is None or seats.lead.loader.step < stop) and seats.next(books) is not None:
        pass
    return [row for batch, _ in books.batches for _, row, is_real in batch if is_real]


@st.composite
def evaluations(draw: st.DrawFn) -> dict[str, Any]:
    o = draw(st.sampled_from([1, 4, 6, 12]))
    n = draw(st.sampled_from([k * o for k in (1, 2, 3, 4)] + [d for d in (o // 2, o // 3) if d and o % d == 0]))
    aligned = [Top(p.dp_world_size, p.micro_batch_size, o) for p in rd.plan(o, num_logical_shards=n, num_workers=[0])]
    segments = draw(st.lists(st.sampled_from(aligned), min_size=1, max_size=3))
    rows = draw(st.integers(max(1, o // 2), 5 * o + 3))
    return {"o": o, "n": n, "segments": segments, "rows": rows, "tail": draw(st.sampled_from(["drop", "pad"]))}


@given(evaluations(), st.data())
def test_rows_are_in_the_order_of_the_dataset(run: dict[str, Any], data: st.DataObject) -> None:
    o, num_rows = run["o"], run["rows"]
    if run["tail"] == "drop" and num_rows < o:
        return
    steps = num_rows // o if run["tail"] == "drop" else -(-num_rows // o)
    num_stops = len(run["segments"]) - 1
    stops = sorted(data.draw(st.lists(st.integers(0, steps), min_size=num_stops, max_size=num_stops)))

    def make(top: Top) -> rd.DataLoader:
        sizes = {"global_batch_size": o, "micro_batch_size": top.b, "num_logical_shards": run["n"]}
        how = {"tail": run["tail"], "verify": True, "collate_fn": as_samples}
        return rd.DataLoader(range(num_rows), shuffle=False, **sizes, **how)

    rows, state = list[int](), None
    with in_threads():
        for top, stop in zip(run["segments"], [*stops, None], strict=True):
            seats = Seats(make, top)
            if state is not None:
                seats.load(state)
            rows += order_of(seats, stop)
            state = seats.state()
        assert rows == list(range(num_rows if run["tail"] == "pad" else num_rows // o * o))
        assert order_of(seats) == rows, "the second epoch"


@pytest.mark.parametrize("num_workers", [1, 2])
def test_workers(num_workers: int) -> None:
    """Without an N given it fits the workers."""
    kwargs = {"global_batch_size": 4, "num_workers": num_workers, "multiprocessing_context": "fork"}
    with rd.DataLoader(range(30), shuffle=False, tail="pad", **kwargs) as loader:
        assert loader._stream.layout.num_logical_shards == 4 * num_workers
        assert [batch.tolist()[: loader.last_batch_samples] for batch in loader] == [
            list(range(i, min(i + 4, 30))) for i in range(0, 30, 4)
        ]


@pytest.mark.parametrize("global_batch_size", [8, 600])
def test_a_fragment_is_decoded_once(global_batch_size: int, decoded: Counter[int], tmp_path: Path) -> None:
    """Also where the cache holds no more than two, and a global batch is larger than one or far smaller."""
    pq.write_table(
        pa.table({"row": np.arange(6000), "pad": ["x" * 400] * 6000}), tmp_path / "a.parquet", row_group_size=300
    )
    source = rd.ParquetSource(tmp_path, cache_bytes=300_000)
    kwargs = {"global_batch_size": global_batch_size, "num_logical_shards": 2 * global_batch_size}
    for rank in range(2):
        decoded.clear()
        loader = rd.DataLoader(source, shuffle=False, dp_rank=rank, dp_world_size=2, **kwargs)
        rows = list(itertools.chain.from_iterable(batch["row"].tolist() for batch in loader))
        half = global_batch_size // 2
        assert rows == [row for row in range(6000) if row // half % 2 == rank]
        assert sum(decoded.values()) <= 1.1 * 20


def test_sources_of_one_name_are_told_apart() -> None:
    def pipeline(shard: rd.Shard) -> rd.BaseNode[Any]:
        readers = {name: rd.Reader(source, shard) for name, source in sources.items()}
        return rd.WeightedSampler(readers, {"a": 3, "b": 1}, stop="all")

    sources = {"a": rd.DatasetSource(range(90), "web"), "b": rd.DatasetSource(range(90, 120), "web")}
    loader = rd.DataLoader(pipeline, global_batch_size=4, num_logical_shards=4, repeat=True)
    for _ in itertools.islice(loader, 4):
        pass
    progress = loader.progress()
    assert (progress["rows/web (a)"], progress["rows/web (b)"]) == (12.0, 4.0)
