"""Requests that stall are made again, and are bounded on a machine; past the deadline there is an error."""

import multiprocessing
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.local import LocalFileSystem

import rescale_data as rd
from rescale_data.sources.counts import HEDGES, REQUESTS, RETRIES, counts
from rescale_data.sources.files import remote
from rescale_data.sources.files.disk_cache import DiskCache
from rescale_data.sources.files.gate import Gate, recovered
from rescale_data.sources.files.hedge import Hedge
from rescale_data.sources.files.remote import RemoteError, attempt


class Stalls:
    """Every ``period``-th request waits until it is told to go on."""

    def __init__(self, period: int) -> None:
        self.period, self.made, self.go_on, self.lock = period, 0, threading.Event(), threading.Lock()

    def __call__(self) -> int:
        with self.lock:
            self.made += 1
            stalls = self.made % self.period == 0
        if stalls:
            self.go_on.wait(60)
        return 7


def test_one_that_stalls_is_made_again_and_few_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, request, before = Gate(4, "", str(tmp_path)), Stalls(1000), counts().values.copy()
    monkeypatch.setattr(remote, "_gate", lambda limit, asked: gate)
    monkeypatch.setattr(remote, "_hedge", Hedge())
    took = []
    for _ in range(2000):
        started = time.monotonic()
        assert attempt(rd.Remote(), "s3://bucket/x", request, 0.2) == 7
        took.append(time.monotonic() - started)
    request.go_on.set()
    assert max(took) < 30  # the stall would be 60
    assert request.made <= 2000 * 1.02 + 1
    told = counts().values - before
    assert told[REQUESTS] == request.made
    assert told[HEDGES] == request.made - 2000 >= 2
    assert told[RETRIES] == 0


class Far(LocalFileSystem):
    """Local files, whose requests for ranges go through a proxy that stalls."""

    protocol = "stalling"
    cachable = False
    proxy: ClassVar[Callable[[], int]] = int

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        type(self).proxy()
        return super().cat_file(path, start, end, **kwargs)


def test_no_batch_of_a_source_waits_for_a_request_that_stalls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proxy, before = Stalls(150), counts().values.copy()
    monkeypatch.setattr(Far, "proxy", proxy)
    monkeypatch.setattr(remote, "_gate", partial(Gate, folder=str(tmp_path / "gate")))
    monkeypatch.setattr(remote, "_hedge", Hedge())
    monkeypatch.setattr(remote, "_SMALL", 1)  # else neighbouring row groups are one request
    fsspec.register_implementation("stalling", Far, clobber=True)
    pq.write_table(pa.table({"x": list(range(800))}), tmp_path / "x.parquet", row_group_size=2)
    options = rd.Remote(hedge_after=0.2, read_ahead=False, max_requests=8)
    source = rd.ParquetSource(f"stalling://{tmp_path}/x.parquet", remote=options)
    loader = rd.DataLoader(source, shuffle=False, global_batch_size=8, collate_fn=list)
    rows, waits = [], []
    batches = iter(loader)
    for _ in range(100):
        started = time.monotonic()
        rows += [int(sample["x"]) for sample in next(batches)]
        waits.append(time.monotonic() - started)
    proxy.go_on.set()
    told = counts().values - before
    assert rows == list(range(800))
    assert max(waits) < 30  # the stall would be 60
    assert proxy.made // 150 >= 2
    assert proxy.made // 150 <= told[HEDGES] <= 1 + proxy.made * 0.02
    assert told[RETRIES] == 0


def test_it_is_late_when_nearly_all_others_were_faster() -> None:
    hedge = Hedge()
    assert hedge.delay(3.0) == 3.0
    hedge._took.extend([0.1] * 995 + [9.0] * 5)
    assert hedge.delay(3.0) == 0.1
    hedge._took.extend([2.0] * 1000)
    assert hedge.delay(0.5) == 2.0  # a slow network is no stall


def test_without_a_second_request_the_deadline_holds() -> None:
    request = Stalls(1)
    given = rd.Remote(deadline_seconds=0.3, hedge_after=None, retries=9)
    with pytest.raises(RemoteError, match=r"s3://bucket/x could not be read in 1 attempts over 0\.\d s.*no answer"):
        attempt(given, "s3://bucket/x", request)
    request.go_on.set()


def test_errors_of_both_are_errors() -> None:
    def fails() -> int:
        raise FileNotFoundError("gone")

    with pytest.raises(FileNotFoundError, match="gone"):
        Hedge().call(fails, 0.1, 5.0)


def test_the_second_may_succeed_where_the_first_fails_late() -> None:
    begun, lock = [0], threading.Lock()
    second_has_begun = threading.Event()

    def work() -> int:
        with lock:
            begun[0] += 1
            mine = begun[0]
        if mine == 1:
            second_has_begun.wait(10)
            raise OSError("reset")
        second_has_begun.set()
        time.sleep(0.05)
        return mine

    assert Hedge().call(work, 0.01, 10.0) == 2


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"hedge_after": 5.0, "deadline_seconds": 4.0}, r"hedge_after=5\.0, deadline_seconds=4\.0"),
        ({"hedge_after": 0.0}, r"hedge_after=0\.0"),
        ({"deadline_seconds": 0.0}, r"deadline_seconds=0\.0"),
        ({"max_requests": 0}, "max_requests=0"),
    ],
)
def test_bad_values(given: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        rd.Remote(**given)


def enter(folder: str, at_once: Any, most: Any) -> None:
    gate = Gate(3, folder)
    for _ in range(10):
        with gate.enter():
            with at_once.get_lock():
                at_once.value += 1
                most.value = max(most.value, at_once.value)
            time.sleep(0.002)
            with at_once.get_lock():
                at_once.value -= 1


def test_a_machine_makes_so_many_at_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    at_once, most = context.Value("i", 0), context.Value("i", 0)
    processes = [context.Process(target=enter, args=(str(tmp_path), at_once, most)) for _ in range(8)]
    [process.start() for process in processes]
    [process.join() for process in processes]
    assert [process.exitcode for process in processes] == [0] * 8
    assert 1 <= most.value <= 3


def test_fewer_after_slow_down_and_more_again_later(tmp_path: Path) -> None:
    gate, other = (Gate(64, "s3://a", str(tmp_path)) for _ in range(2))
    assert other.limit == 64
    gate.slow_down(time.time())
    assert other.limit == 32
    gate.slow_down(time.time())
    assert other.limit == 16
    assert [recovered(16, 64, seconds) for seconds in (0, 30, 45, 60, 10**9)] == [16, 32, 45, 64, 64]
    assert recovered(16, 64, -5) == 16  # a clock that went back


def test_requests_that_are_refused_together_count_once(tmp_path: Path) -> None:
    gate = Gate(64, "s3://a", str(tmp_path))
    with gate.enter() as one, gate.enter() as two, gate.enter() as three:
        for since in (two, one, three):
            gate.slow_down(since)
    assert gate.limit == 32


def test_a_bucket_that_asks_to_slow_down_slows_no_other(tmp_path: Path) -> None:
    Gate(64, "s3://a", str(tmp_path)).slow_down(time.time())
    assert Gate(64, "s3://b", str(tmp_path)).limit == 64
    assert Gate(16, "s3://a", str(tmp_path)).limit == 16


def test_an_answer_that_asks_to_slow_down_is_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_gate", partial(Gate, folder=str(tmp_path)))
    answers: list[Any] = [OSError("An error occurred (SlowDown): Please reduce your request rate."), None]

    def work() -> int:
        answer = answers.pop(0)
        if answer is not None:
            raise answer
        return 3

    assert attempt(rd.Remote(backoff_seconds=0.0, max_requests=8), "s3://bucket/x", work) == 3
    assert Gate(8, "s3://bucket", str(tmp_path)).limit == 4
    assert Gate(8, "s3://other", str(tmp_path)).limit == 8


def test_ranks_do_not_begin_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for listing and once for reading, however many sources and threads: each thread waits for the same moment."""
    waits: list[float] = []
    monkeypatch.setattr(remote, "_begin", {})
    monkeypatch.setattr(remote.leaving, "wait", waits.append)
    monkeypatch.setattr(remote.random, "uniform", lambda low, high: high)
    monkeypatch.setenv("WORLD_SIZE", "2000")
    for _ in range(60):
        remote.spread_out("listing")
    assert 4.5 < waits[0] <= 5.0
    monkeypatch.setattr(remote.time, "monotonic", lambda: 10**9)  # later
    remote.spread_out("listing")
    assert waits[-1] == 0.0
    monkeypatch.setenv("WORLD_SIZE", "1000000")
    remote.spread_out("reading")
    assert waits[-1] == 10.0
    monkeypatch.delenv("WORLD_SIZE")
    remote.spread_out("another")
    assert waits[-1] == 0.0


def miss(folder: str, fetched: Any) -> None:
    def fetch() -> bytes:
        with fetched.get_lock():
            fetched.value += 1
        time.sleep(0.2)
        return b"x" * 100

    assert DiskCache(folder, 2**20).read("range", 100, fetch) == b"x" * 100


def test_ranks_of_a_machine_that_miss_a_range_fetch_it_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    fetched = context.Value("i", 0)
    processes = [context.Process(target=miss, args=(str(tmp_path), fetched)) for _ in range(6)]
    [process.start() for process in processes]
    [process.join() for process in processes]
    assert [process.exitcode for process in processes] == [0] * 6
    assert fetched.value == 1
