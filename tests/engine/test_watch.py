"""What is told of waits: counters, how ranks differ, and one warning where a batch takes long."""

import functools
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import rescale_data as rd
from rescale_data.engine import base_loader, workers
from rescale_data.engine.report import COUNTER_NAMES, report_over_ranks
from rescale_data.engine.watch import Watchdog
from rescale_data.sources.counts import read_counters


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Blocks:
    """A function that waits until it may go on; as a dataset, its rows do."""

    def __init__(self) -> None:
        self.entered, self.go_on = threading.Event(), threading.Event()

    def __call__(self, sample: Any) -> Any:
        self.entered.set()
        assert self.go_on.wait(60)
        return sample

    def __len__(self) -> int:
        return 8

    def __getitem__(self, row: int) -> Any:
        return self(row)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    pq.write_table(pa.table({"row": np.arange(64)}), tmp_path / "data" / "rows.parquet", row_group_size=8)
    return tmp_path / "data"


def mapped(source: Any, fn: Any, shard: rd.Shard) -> Any:
    return rd.Map(rd.Reader(source, shard, shuffle=False), fn)


def with_a_map(folder: Path, blocks: Blocks) -> rd.DataLoader:
    pipeline = functools.partial(mapped, rd.ParquetSource(folder), blocks)
    sizes = {"global_batch_size": 4, "micro_batch_size": 2, "num_logical_shards": 4}
    return rd.DataLoader(pipeline, **sizes, dp_rank=1, dp_world_size=2)


def with_a_slow_disk(folder: Path, blocks: Blocks) -> rd.DataLoader:
    class Source(rd.ParquetSource):
        def _load(self, fragment: Any) -> Any:
            return super()._load(blocks(fragment))

    return rd.DataLoader(Source(folder), global_batch_size=4)


WAITS: dict[str, tuple[Callable[[Path, Blocks], rd.DataLoader], list[str]]] = {
    "a function": (
        with_a_map,
        [
            "Rank 1 has waited 10 s for a batch",  # at 11.0, since 0.5
            "in a function of the user's, Blocks.__call__ (",
            "test_watch.py, line",
            "logical shard 2",
            "/rows.parquet, row 32",
        ],
    ),
    "a file": (with_a_slow_disk, ["reading /", "/rows.parquet, logical shard 0"]),
    "a dataset": (lambda folder, blocks: rd.DataLoader(blocks, global_batch_size=4), ["reading, Blocks.__getitem__ ("]),
    "the thread ahead": (
        lambda folder, blocks: rd.DataLoader(blocks, global_batch_size=4, prefetch=2),
        ["waiting for the thread ahead, reading, Blocks.__getitem__ ("],
    ),
}


@pytest.mark.parametrize("what", WAITS)
def test_what_is_waited_for_is_named_once(what: str, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """While a thread waits for a batch, by a clock that is wound on."""
    blocks = Blocks()
    open_loader, words = WAITS[what]
    loader = open_loader(folder, blocks)
    clock, watch = Clock(), loader._watch
    watch._clock = clock
    thread = threading.Thread(target=lambda: next(iter(loader)))
    thread.start()
    assert blocks.entered.wait(60)
    with caplog.at_level(logging.WARNING, "rescale_data"):
        for clock.now in (0.0, 9.0, 11.0, 12.0, 500.0):  # type: ignore[misc]
            watch.start_time = watch.start_time and 0.5
            watch.report_if_slow()
    blocks.go_on.set()
    thread.join(60)
    clock.now = 1e9
    watch.report_if_slow()  # nothing is waited for
    loader.close()
    (text,) = [record.getMessage() for record in caplog.records if "has waited" in record.getMessage()]
    assert [part for part in words if part not in text] == []


def until_exists(file: Path, sample: Any) -> Any:
    while not file.exists():
        time.sleep(0.01)
    return sample


def test_a_worker_is_named_and_what_it_is_about(folder: Path, tmp_path: Path, monkeypatch: Any) -> None:
    for module in (base_loader, workers):
        monkeypatch.setattr(module, "SLOW_SECONDS", 0.2)
    read_counters().values[:] = 0  # earlier tests of this process may have read without making batches
    go_on = tmp_path / "go_on"
    pipeline = functools.partial(mapped, rd.ParquetSource(folder), functools.partial(until_exists, go_on))
    lines: list[str] = []

    class GoesOn(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())
            go_on.touch()

    handler, logger = GoesOn(logging.WARNING), logging.getLogger("rescale_data")
    with rd.DataLoader(pipeline, global_batch_size=4, num_logical_shards=8, num_workers=2) as loader:
        loader.start()
        status = loader._stream.feed._processes.status  # type: ignore[union-attr]
        deadline = time.monotonic() + 60
        while "until_exists" not in status.read_activity(0):
            assert time.monotonic() < deadline
        logger.addHandler(handler)
        try:
            next(iter(loader))
        finally:
            logger.removeHandler(handler)
        assert len(lines) == 1
        assert "waiting for worker 0, in a function of the user's, until_exists (" in lines[0]
        assert "logical shard 0, last row drawn" in lines[0]
        list(loader)
        assert status.read_activity(0) == ""
        assert loader.progress()["transform_seconds"] > 0


def test_what_workers_have_read_is_counted_and_what_they_have_ready(folder: Path) -> None:
    before = read_counters().values[0]
    loader = rd.DataLoader(rd.ParquetSource(folder), global_batch_size=4, num_workers=1)
    batches = iter(loader)
    next(batches)
    deadline = time.monotonic() + 60
    while loader.progress()["batches_ready"] < 1:
        assert time.monotonic() < deadline
    list(batches)
    told = loader.progress()
    assert 64 * 8 <= told["read_bytes"] - before < 2 * 64 * 8
    assert told["read_seconds"] > 0
    assert told["batches_ready"] == 0
    loader.close()
    next(iter(loader))  # by other workers
    after = loader.progress()
    loader.close()
    assert after["read_bytes"] > told["read_bytes"]
    assert after["transform_seconds"] + after["read_seconds"] > told["transform_seconds"] + told["read_seconds"]
    assert loader.progress()["read_bytes"] >= after["read_bytes"]
    assert loader.progress()["batches_ready"] == 0


def test_requests_and_what_they_brought_are_counted(folder: Path) -> None:
    before = read_counters().values[1]
    source = rd.ParquetSource(f"file://{folder}", remote=rd.Remote(read_ahead=False))
    loader = rd.DataLoader(source, global_batch_size=4)
    told = loader.progress()
    list(loader)
    after = loader.progress()
    assert told["requests"] - before >= 2  # the list, and a footer
    assert after["requests"] > told["requests"]
    assert after["request_bytes"] > told["request_bytes"]
    assert after["retries"] == told["retries"]
    assert after["wait_seconds"] >= after["wait_p99_seconds"] >= after["wait_p50_seconds"] > 0


def test_the_worst_rank_is_named() -> None:
    values = np.tile(np.arange(len(COUNTER_NAMES), dtype=float), (3, 1))
    values[1, COUNTER_NAMES.index("wait_p99_seconds")] = 7.5
    values[2, COUNTER_NAMES.index("batches_ready")] = 1.0
    found = report_over_ranks(values)
    assert found["wait_p99_seconds"] == (2.0, 2.0, 7.5, 1)
    assert found["batches_ready"] == (1.0, 3.0, 3.0, 2)
    assert "wait_p99_seconds 2 / 2 / 7.5 (rank 1), batches_ready 1 / 3 / 3 (rank 2)" in str(found)
    simulated = rd.DataLoader(range(8), global_batch_size=4, micro_batch_size=2, dp_rank=1, dp_world_size=2)
    assert {spread.worst for spread in simulated.report().values()} == {1}, "of ranks that are simulated, itself"


def test_nothing_is_said_of_what_is_not_long_nor_of_a_loader_that_nobody_holds(caplog: Any) -> None:
    loader = rd.DataLoader(range(8), global_batch_size=4)
    next(iter(loader))
    watch, clock = loader._watch, Clock()
    watch._clock = clock
    for clock.now in range(0, 100, 5):  # type: ignore[misc]
        watch.start_time = clock.now - 6.0
        watch.report_if_slow()
    del loader
    watch.start_time = -1e9
    watch.report_if_slow()
    assert "has waited" not in caplog.text


def test_a_watch_that_ctrl_c_kept_from_starting_can_be_stopped_and_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(thread: threading.Thread) -> None:
        raise KeyboardInterrupt

    watch = Watchdog(1.0, lambda *_: None)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            watch.start()
    watch.stop()
    watch.start()
    assert watch._watcher is not None
    assert watch._watcher.is_alive()
    watch.stop()
