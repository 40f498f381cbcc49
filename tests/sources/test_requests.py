"""Each attempt of a request has a time of its own; what stalls is made again; a process makes so many at once."""

import errno
import multiprocessing
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from unittest.mock import Mock

import pytest

import rescale_data as rd
from rescale_data.sources.counts import REQUESTS, RETRIES, read_counters
from rescale_data.sources.decoded.ahead import fetch_runner
from rescale_data.sources.files import remote
from rescale_data.sources.files.remote import RemoteError, RequestLimit, RequestTimes, attempt


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """No pauses between attempts, and nothing known of how long answers take but that they are soon there."""
    monkeypatch.setattr(remote, "_MIN_ANSWERS_FOR_LIMIT", 100)
    times = RequestTimes()
    for _ in range(100):
        times.add_answer(0, 1e-3)
    monkeypatch.setattr(remote, "_request_times", lambda host: times)
    monkeypatch.setattr(remote, "_FIRST_PAUSE_SECONDS", 0.001)
    remote._request_limit.cache_clear()


class Stalls:
    """Every ``period``-th request waits until it is told to go on."""

    def __init__(self, period):
        self.period, self.made, self.go_on, self.lock = period, 0, threading.Event(), threading.Lock()

    def __call__(self):
        with self.lock:
            self.made += 1
            stalls = self.made % self.period == 0
        if stalls:
            self.go_on.wait(60)
        return 7


def tried(request, num_bytes=0, detail="", **options):
    return attempt(rd.Remote(**options), "s3://bucket/x", request, num_bytes, detail)


def in_a_fork(work, *args):
    """Return the exit code of a forked child, or None if it does not end."""
    child = multiprocessing.get_context("fork").Process(target=work, args=args, daemon=True)
    child.start()
    child.join(60)
    return child.exitcode


@pytest.mark.parametrize(("period", "count"), [(1000, 2000), (2, 20)])
def test_those_that_stall_are_made_again_and_few_others(period, count):
    """However many they are, as where connections die."""
    request, before = Stalls(period), read_counters().values.copy()
    assert [tried(request) for _ in range(count)] == [7] * count
    request.go_on.set()
    num_stalled = (count - 1) // (period - 1)
    assert num_stalled <= request.made - count <= num_stalled + count // 50
    told = read_counters().values - before
    assert told[REQUESTS] == request.made
    assert told[RETRIES] == request.made - count


def test_it_is_late_when_nearly_all_others_were_far_faster():
    pace, mb = RequestTimes(), 2**20
    assert pace.limit_seconds(0) == 5.0
    assert pace.limit_seconds(60 * mb) == 65.0
    for _ in range(995):
        pace.add_answer(mb, 0.4)
    for _ in range(5):
        pace.add_answer(mb, 100.0)
    assert pace.limit_seconds(mb) == pytest.approx(1.6)
    assert pace.limit_seconds(9 * mb) == pytest.approx(8.0)  # large ones have more time
    for _ in range(1000):
        pace.add_answer(0, 3.0)
    assert pace.limit_seconds(0) == pytest.approx(12.0)  # a slow network is no stall


def test_each_attempt_has_a_time_and_the_error_says_all(monkeypatch):
    request = Stalls(1)
    words = r"^s3://bucket/x, bytes 3 to 4 could not be read in 4 attempts .*no answer in 0\.1 s"
    with pytest.raises(RemoteError, match=words):
        tried(request, 2, ", bytes 3 to 4", timeout=0.1, retries=3)
    while request.made < 4:  # the last may not have begun
        time.sleep(0.001)
    request.go_on.set()


def test_a_later_attempt_has_more_time(monkeypatch):
    given = []
    monkeypatch.setattr(remote, "_first_answer", lambda answers, seconds: given.append(seconds) or answers[-1].result())
    for num_bytes in (0, None):
        with pytest.raises(RemoteError, match="reset"):
            tried(Mock(side_effect=OSError("reset")), num_bytes, timeout=5.0, retries=4)
    assert given == [0.05, 0.2, 0.8, 3.2, 5.0] + [50.0] * 5


def test_a_slow_answer_that_comes_after_all_is_taken():
    """A link that is slower than what was learnt: attempts that were given up go on, and the first whole answer counts."""
    made, go_on, never = [], threading.Event(), threading.Event()

    def request():
        made.append(number := len(made))
        if number:
            go_on.set()
            never.wait(60)
        go_on.wait(60)
        return number

    assert tried(request, timeout=30.0, retries=1) == 0
    never.set()
    assert len(made) == 2
    # as long as the first took, not the second
    assert max(remote._request_times("s3://bucket")._seconds_per_byte) >= 0.05 / 2**20


def test_an_error_of_an_attempt_that_was_given_up_slows_down():
    asked, refused = [], threading.Event()

    def request():
        asked.append(number := len(asked))
        if number == 0:
            refused.wait(60)
            raise OSError("503 SlowDown")
        refused.set()
        while remote._request_limit(8, "s3://bucket").num_allowed_requests > 4:
            time.sleep(0.001)
        return number

    assert tried(request, timeout=30.0, retries=1, max_requests=8) == 1, "it does not count as a failure"


@pytest.mark.parametrize("error", [TimeoutError("the server's"), OSError(errno.ETIMEDOUT, "connection")])
def test_a_time_out_of_the_filesystem_is_a_failure_with_a_pause(error, monkeypatch):
    pauses = []
    monkeypatch.setattr(random, "uniform", lambda low, high: pauses.append(high) or 0.0)
    with pytest.raises(RemoteError, match="in 3 attempts"):
        tried(Mock(side_effect=error), retries=2)
    assert pauses == [0.001, 0.002]


def test_each_bucket_has_times_of_its_own(monkeypatch):
    monkeypatch.undo()
    remote._request_times.cache_clear()
    attempt(rd.Remote(), "s3://near/x", lambda: 7, 0)
    assert len(remote._request_times("s3://near")._seconds_per_byte) == 1
    assert not remote._request_times("s3://far")._seconds_per_byte
    remote._request_times.cache_clear()


@pytest.mark.parametrize("kind", [FileNotFoundError, PermissionError, KeyError])
def test_what_does_not_pass_is_raised_at_once_and_names_the_file(kind):
    request = Mock(side_effect=kind("Forbidden"))
    with pytest.raises(kind) as found:
        tried(request, 0, ", bytes 3 to 4")
    assert request.call_count == 1
    said = [str(found.value), *getattr(found.value, "__notes__", [])]
    assert "s3://bucket/x, bytes 3 to 4" in " ".join(said)


def test_a_process_makes_so_many_at_once():
    request_limit, inside, counts = RequestLimit(3), set(), []

    def work(number):
        with request_limit.hold_request_slot():
            inside.add(number)
            counts.append(len(inside))
            time.sleep(0.002)
            inside.remove(number)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(40)))
    assert 1 <= max(counts) <= 3


def test_fewer_after_slow_down_and_more_again_later(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(remote.time, "monotonic", lambda: now[0])
    request_limit = RequestLimit(64)
    assert request_limit.num_allowed_requests == 64
    request_limit.slow_down(now[0])
    assert request_limit.num_allowed_requests == 32
    request_limit.slow_down(now[0] - 1)  # it was under way when that happened, and counts with it
    assert request_limit.num_allowed_requests == 32
    request_limit.slow_down(now[0])
    assert request_limit.num_allowed_requests == 16
    limits = []
    for seconds in (30, 15, 15, 10**9):
        now[0] += seconds
        limits.append(request_limit.num_allowed_requests)
    assert limits == [32, 45, 64, 64]
    for _ in range(20):
        request_limit.slow_down(now[0])
    assert request_limit.num_allowed_requests == 1


def test_an_answer_that_asks_to_slow_down_is_heard():
    answers = [OSError("An error occurred (SlowDown): Please reduce your request rate."), 3]
    assert tried(Mock(side_effect=answers), max_requests=8) == 3
    assert remote._request_limit(8, "s3://bucket").num_allowed_requests == 4
    assert remote._request_limit(8, "s3://other").num_allowed_requests == 8


def test_nothing_is_held_over_a_fork():
    """A child that is forked while the only slot is taken, and the lock of a range, makes requests of its own."""
    inside, go_on = threading.Event(), threading.Event()

    def request():
        inside.set()
        go_on.wait(60)
        return 1

    options = {"max_requests": 1, "timeout": 60.0}
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(tried, request, 2**40, **options)
        inside.wait()
        exit_code = in_a_fork(partial(tried, int, **options))
        go_on.set()
        assert answer.result() == 1
    assert exit_code == 0


@pytest.mark.parametrize("lock", [remote.exit_event._cond, read_counters()._lock, fetch_runner._lock])
def test_a_child_that_is_forked_while_a_lock_is_held_pauses_counts_and_fetches_by_itself(lock):
    """It has none of the threads either."""

    def fetch():
        answers = []
        fetch_runner.begin("x", lambda: answers.append(tried(Mock(side_effect=[OSError("503"), 7]))))
        fetch_runner.wait("x")
        assert answers == [7]

    fetch()
    with lock:
        assert in_a_fork(fetch) == 0


def test_ranks_do_not_begin_together(monkeypatch):
    """Once for listing and once for reading, however many sources and threads: each thread waits for the same moment."""
    waits = []
    monkeypatch.setattr(remote, "_start_times", {})
    monkeypatch.setattr(remote.exit_event, "wait", waits.append)
    monkeypatch.setattr(remote.random, "uniform", lambda low, high: high)
    monkeypatch.setenv("WORLD_SIZE", "2000")
    for _ in range(60):
        remote.wait_random_time("listing")
    assert 4.5 < waits[0] <= 5.0
    monkeypatch.setattr(remote.time, "monotonic", lambda: 10**9)  # later
    remote.wait_random_time("listing")
    assert waits[-1] == 0.0
    monkeypatch.setenv("WORLD_SIZE", "1000000")
    remote.wait_random_time("reading")
    assert waits[-1] == 10.0
    monkeypatch.delenv("WORLD_SIZE")
    remote.wait_random_time("another")
    assert waits[-1] == 0.0
