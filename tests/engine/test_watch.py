"""What is told of waits: counters, how ranks differ, and one warning where a batch takes long."""

import functools
import logging
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import rescale_data as rd
from rescale_data import loader as loader_module
from rescale_data.engine.report import NAMES, report
from rescale_data.engine.watch import Watch
from rescale_data.sources.counts import counts


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Blocks:
    """A function that waits until it may go on."""

    def __init__(self) -> None:
        self.entered, self.go_on = threading.Event(), threading.Event()

    def __call__(self, sample: Any) -> Any:
        self.entered.set()
        assert self.go_on.wait(60)
        return sample


class Dataset:
    """Rows that block."""

    def __init__(self, blocks: Blocks) -> None:
        self.blocks = blocks

    def __len__(self) -> int:
        return 8

    def __getitem__(self, row: int) -> Any:
        return self.blocks(row)


def write(folder: Path, rows: int = 64) -> None:
    pq.write_table(pa.table({"row": np.arange(rows)}), folder / "rows.parquet", row_group_size=8)


def mapped(source: Any, fn: Any, shard: rd.Shard) -> Any:
    return rd.Map(rd.Reader(source, shard, shuffle=False), fn)


def said_of(loader: rd.DataLoader, blocks: Blocks, caplog: pytest.LogCaptureFixture) -> list[str]:
    """What is logged while a thread waits for a batch, by a clock that is wound on."""
    clock, watch = Clock(), loader._watch
    watch._clock = clock
    thread = threading.Thread(target=lambda: next(iter(loader)))
    thread.start()
    assert blocks.entered.wait(60)
    with caplog.at_level(logging.WARNING, "rescale_data"):
        for clock.now in (0.0, 9.0, 11.0, 12.0, 500.0):  # type: ignore[misc]
            watch.began = watch.began and 0.5
            watch.look()
    blocks.go_on.set()
    thread.join(60)
    assert watch.began is None
    clock.now = 1e9
    watch.look()  # nothing is waited for
    loader.close()
    return [record.getMessage() for record in caplog.records if "has waited" in record.getMessage()]


def test_a_function_of_the_users_is_named_once_with_shard_and_row(tmp_path: Path, caplog: Any) -> None:
    write(tmp_path)
    blocks = Blocks()
    pipeline = functools.partial(mapped, rd.ParquetSource(tmp_path), blocks)
    sizes = {"global_batch_size": 4, "num_logical_shards": 4}
    loader = rd.DataLoader(pipeline, micro_batch_size=2, **sizes, dp_rank=1, dp_world_size=2)
    (said,) = said_of(loader, blocks, caplog)
    assert "Rank 1 has waited 10 s for a batch" in said  # at 11.0, since 0.5
    assert "in a function of the user's, Blocks.__call__ (" in said
    assert "test_watch.py, line" in said
    assert "logical shard 2" in said
    assert f"{tmp_path}/rows.parquet, row 32" in said


def test_reading_is_named_with_its_file(tmp_path: Path, caplog: Any, monkeypatch: Any) -> None:
    write(tmp_path)
    blocks, source = Blocks(), rd.ParquetSource(tmp_path)
    load = rd.ParquetSource._load
    monkeypatch.setattr(rd.ParquetSource, "_load", lambda self, fragment: load(self, blocks(fragment)))
    (said,) = said_of(rd.DataLoader(source, global_batch_size=4), blocks, caplog)
    assert f"reading {tmp_path}/rows.parquet, logical shard 0" in said


def test_a_dataset_of_the_users_is_named(caplog: Any) -> None:
    blocks = Blocks()
    (said,) = said_of(rd.DataLoader(Dataset(blocks), global_batch_size=4), blocks, caplog)
    assert "reading, Dataset.__getitem__ (" in said


def until_exists(file: str, sample: Any) -> Any:
    while not Path(file).exists():
        time.sleep(0.01)
    return sample


def test_a_worker_is_named_and_what_it_is_about(tmp_path: Path, caplog: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(loader_module, "SLOW_AFTER", 0.2)
    (tmp_path / "data").mkdir()
    write(tmp_path / "data")
    go_on = tmp_path / "go_on"
    pipeline = functools.partial(
        mapped, rd.ParquetSource(tmp_path / "data"), functools.partial(until_exists, str(go_on))
    )
    loader = rd.DataLoader(pipeline, global_batch_size=4, num_logical_shards=8, num_workers=2)
    logger, lines, heard = logging.getLogger("rescale_data"), [], threading.Event()

    class Hears(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())
            heard.set()

    hears = Hears(logging.WARNING)
    logger.addHandler(hears)
    try:
        loader.start()
        deadline = time.monotonic() + 60
        while "until_exists" not in loader._stream.feed._crew.board.read(0):  # type: ignore[union-attr]
            assert time.monotonic() < deadline
        release = threading.Thread(target=lambda: heard.wait(60) and go_on.touch())
        release.start()
        next(iter(loader))
        release.join(60)
    finally:
        logger.removeHandler(hears)
        go_on.touch()
    assert len(lines) == 1
    assert "waiting for worker 0, in a function of the user's, until_exists (" in lines[0]
    assert "logical shard 0, last row drawn" in lines[0]
    list(loader)
    assert loader._stream.feed._crew.board.read(0) == ""  # type: ignore[union-attr]
    told = loader.progress()
    assert told["transform_seconds"] > 0
    assert told["batches_ready"] == 0
    loader.close()


def test_what_workers_have_read_is_counted_and_what_they_have_ready(tmp_path: Path) -> None:
    write(tmp_path)
    before = counts().values.copy()
    with rd.DataLoader(rd.ParquetSource(tmp_path), global_batch_size=4, num_workers=1) as loader:
        batches = iter(loader)
        next(batches)
        told, deadline = loader.progress(), time.monotonic() + 60
        while told["batches_ready"] < 1 and time.monotonic() < deadline:
            told = loader.progress()
        assert told["batches_ready"] >= 1
        list(batches)
        told = loader.progress()
    assert 64 * 8 <= told["read_bytes"] - before[0] < 2 * 64 * 8
    assert told["read_seconds"] > 0
    assert told["batches_ready"] == 0
    next(iter(loader))  # by other workers
    after = loader.progress()
    loader.close()
    assert after["read_bytes"] - before[0] > 64 * 8
    assert after["transform_seconds"] + after["read_seconds"] > told["transform_seconds"] + told["read_seconds"]
    assert loader.progress()["read_bytes"] >= after["read_bytes"]
    assert loader.progress()["batches_ready"] == 0


def test_requests_and_what_they_brought_are_counted(tmp_path: Path) -> None:
    write(tmp_path)
    before = counts().values.copy()
    source = rd.ParquetSource(f"file://{tmp_path}", remote=rd.Remote(read_ahead=False))
    loader = rd.DataLoader(source, global_batch_size=4)
    told = loader.progress()
    list(loader)
    after = loader.progress()
    assert told["requests"] - before[1] >= 2  # the list, and a footer
    assert after["requests"] > told["requests"]
    assert after["request_bytes"] > told["request_bytes"]
    assert after["retries"] == told["retries"]
    assert after["wait_seconds"] >= after["wait_p99_seconds"] >= after["wait_p50_seconds"] > 0


def test_the_worst_rank_is_named() -> None:
    values = np.tile(np.arange(len(NAMES), dtype=float), (3, 1))
    values[1, NAMES.index("wait_p99_seconds")] = 7.5
    values[2, NAMES.index("batches_ready")] = 1.0
    found = report(NAMES, values)
    assert found["wait_p99_seconds"] == (2.0, 2.0, 7.5, 1)
    assert found["batches_ready"] == (1.0, 3.0, 3.0, 2)
    assert "wait_p99_seconds 2 / 2 / 7.5 (rank 1), batches_ready 1 / 3 / 3 (rank 2)" in str(found)


def test_a_rank_whose_others_are_simulated_reports_itself() -> None:
    loader = rd.DataLoader(range(8), global_batch_size=4, micro_batch_size=2, dp_rank=1, dp_world_size=2)
    assert {spread.worst for spread in loader.report().values()} == {1}


def test_a_loader_that_nobody_holds_is_gone_at_once() -> None:
    loader = rd.DataLoader(range(8), global_batch_size=4)
    next(iter(loader))
    watch = loader._watch
    del loader
    watch.began = -1e9
    watch.look()  # there is nobody to tell


def test_nothing_is_said_of_what_is_not_long() -> None:
    said: list[float] = []
    clock = Clock()
    watch = Watch(10.0, lambda seconds, frame: said.append(seconds), clock)
    for clock.now in range(0, 100, 5):  # type: ignore[misc]
        watch.began = clock.now - 6.0
        watch.look()
    assert said == []


def test_the_thread_of_prefetch_is_looked_at(caplog: Any) -> None:
    blocks = Blocks()
    (said,) = said_of(rd.DataLoader(Dataset(blocks), global_batch_size=4, prefetch=2), blocks, caplog)
    assert "waiting for the thread ahead, reading, Dataset.__getitem__ (" in said


def test_a_watch_that_ctrl_c_kept_from_starting_can_be_stopped_and_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(thread: threading.Thread) -> None:
        raise KeyboardInterrupt

    watch = Watch(1.0, lambda *_: None)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            watch.start()
    watch.stop()
    watch.start()
    assert watch.thread_id == threading.get_ident()
    watch.stop()
