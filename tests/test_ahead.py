"""A thread that makes batches ahead of training. What it promises over other calls: law 4, `test_histories`."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import signal
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import rescale_data as rd
from rescale_data.engine.feed import InThreadFeed
from rescale_data.engine.runner import NoSamplesLeft
from rescale_data.engine.threads import TaskThread
from rescale_data.engine.watch import stacks
from tests.states import opened

ROWS = list(range(72))


class Watched:
    """Rows, and who reads them; some cannot be read, so many times."""

    def __init__(self) -> None:
        self.threads: set[str] = set()
        self.num_read, self.enough = 0, threading.Event()
        self.broken: dict[int, int] = {}

    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, row: int) -> int:
        self.threads.add(threading.current_thread().name)
        self.num_read += 1
        if self.num_read == 12:
            self.enough.set()
        if self.broken.get(row):
            self.broken[row] -= 1
            raise OSError("corrupt")
        return row


def make(rows: Any = ROWS, ahead: int = 3, **arguments: Any) -> rd.DataLoader:
    return rd.DataLoader(rows, **{"global_batch_size": 4, "prefetch": ahead, **arguments})


def listed(batches: Any) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("rescale_data-ahead")]


def test_an_error_comes_with_its_batch_and_the_batch_comes_after_it() -> None:
    expected, rows = listed(make()), Watched()
    rows.broken = {expected[2][1]: 2}
    loader = make(rows, 5)
    batches = iter(loader)
    assert listed([next(batches), next(batches)]) == expected[:2]
    for _ in range(2):
        with pytest.raises(OSError, match="corrupt"):
            next(batches)
        assert opened(loader.state_dict())["samples"] == 8
    assert listed(batches) == expected[2:]
    assert threads() == []


class Pinned(Watched):
    """Rows of which one is not read until the test says so."""

    def __init__(self, row: int) -> None:
        super().__init__()
        self.row, self.entered, self.go_on = row, threading.Event(), threading.Event()

    def __getitem__(self, row: int) -> int:
        if row == self.row:
            self.entered.set()
            assert self.go_on.wait(60)
        return super().__getitem__(row)


def test_ctrl_c_is_heard_within_a_read(request: pytest.FixtureRequest) -> None:
    """Whoever goes on waits for that read, misses no row and sees none twice."""
    request.addfinalizer(functools.partial(signal.signal, signal.SIGINT, signal.getsignal(signal.SIGINT)))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored under `nohup` and `&`
    expected = listed(make(ahead=0))
    rows = Pinned(expected[2][1])
    with make(rows) as loader:
        batches = iter(loader)
        found = listed([next(batches), next(batches)])
        interrupt = threading.Thread(target=lambda: rows.entered.wait(60) and os.kill(os.getpid(), signal.SIGINT))

        def is_interrupted() -> None:
            interrupt.start()
            next(batches)

        with pytest.raises(KeyboardInterrupt):
            is_interrupted()
        interrupt.join()
        rows.go_on.set()
        assert found + listed(batches) == expected
    assert rows.num_read <= len(ROWS) + 4, "the batch at work is read to its end, and no other one behind it"


class FailsOnceAwaited(Watched):
    """Its first read fails, once the main thread waits for the end of the thread that reads."""

    def __getitem__(self, row: int) -> int:
        if not self.num_read:
            self.num_read = 1
            self.enough.set()
            while not is_awaited():
                os.sched_yield()
            raise OSError("a read of before")
        return super().__getitem__(row)


def is_awaited() -> bool:
    frame = stacks().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_code is not TaskThread.end.__code__:
        frame = frame.f_back
    return frame is not None


def test_a_read_that_ctrl_c_gave_up_fails_nothing_when_it_ends() -> None:
    rows = FailsOnceAwaited()
    with make(rows) as loader:
        loader.start()
        assert rows.enough.wait(60)
        loader._stream.rewind(wait=False)  # as Ctrl-C within `next` does
        assert listed(loader) == listed(make(ahead=0))


def test_who_waits_for_a_batch_is_not_left_waiting_by_a_stop() -> None:
    """The thread of balanced steps waits for the thread ahead while Ctrl-C stops both: a later stop waits for it."""
    with make(prefetch=1) as loader:
        loader.start()
        feed, task_begins, go_on, waits = loader._stream.feed, *(threading.Event() for _ in range(3))
        assert isinstance(feed, InThreadFeed)
        feed._thread.put(lambda: task_begins.set() or go_on.wait(60))  # type: ignore[union-attr]
        assert task_begins.wait(60)
        feed.next()
        waiting = threading.Thread(target=lambda: [waits.set(), suppressing(feed.next)], daemon=True)
        waiting.start()
        assert waits.wait(60)
        while stacks()[waiting.ident or 0].f_code.co_name != "next":
            pass
        feed.stop(wait=False)
        go_on.set()
        waiting.join(60)
        assert not waiting.is_alive()


def suppressing(call: Callable[[], object]) -> None:
    with contextlib.suppress(NoSamplesLeft):
        call()


def test_a_closed_loader_has_no_batches() -> None:
    made: list[Any] = []

    def ones(samples: list[int]) -> torch.Tensor:
        batch = torch.tensor(samples)
        made.append(weakref.ref(batch))
        return batch

    with make(prefetch=3, collate_fn=ones) as loader:
        next(iter(loader))
        loader.close()
        gc.collect()
        assert loader.progress()["batches_ready"] == 0
        assert not any(batch() is not None for batch in made)


@pytest.mark.parametrize("end", ["close", "epoch", "error", "garbage"])
def test_no_thread_is_left_behind(end: str) -> None:
    """Nor by what changes the position: law 9."""
    gc.collect()
    assert threads() == []
    rows = Watched()
    loader = make(rows, repeat=end == "error")
    batches = iter(loader)
    next(batches)
    assert len(threads()) == 1
    if end == "epoch":
        list(batches)
    elif end == "error":
        rows.broken = dict.fromkeys(ROWS, 1)
        with pytest.raises(OSError, match="corrupt"):
            list(batches)
    elif end == "garbage":
        (thread,) = [thread for thread in threading.enumerate() if thread.name.startswith("rescale_data-ahead")]
        del loader, batches
        gc.collect()
        thread.join(60)
    else:
        loader.close()
    assert threads() == []


def test_a_batch_that_cannot_be_sent_is_sent_again() -> None:
    failures = iter([None, OSError("device is busy"), *[None] * 99])

    def send(batch: Any) -> Any:
        assert threading.current_thread().name.startswith("rescale_data-ahead")
        if (error := next(failures)) is not None:
            raise error
        return batch.tolist()

    loader, expected = make(ahead=2, transfer=send), listed(make(ahead=0))
    batches = iter(loader)
    found = [next(batches)]
    with pytest.raises(OSError, match="device is busy"):
        next(batches)
    assert opened(loader.state_dict())["samples"] == 4
    assert [*found, *batches] == expected


def test_tensors_of_a_batch_come_to_a_device() -> None:
    def collate(rows: list[int]) -> Any:
        return {"rows": torch.tensor(rows), "more": [torch.zeros(2), "text", (torch.zeros(1), 3)]}

    batch = next(iter(rd.DataLoader(ROWS, global_batch_size=4, collate_fn=collate, transfer="meta")))
    assert batch["rows"].device.type == batch["more"][0].device.type == batch["more"][2][0].device.type == "meta"
    assert (batch["more"][1], batch["more"][2][1]) == ("text", 3)


@pytest.mark.parametrize("how", [{}, {"prefetch": 2}, {"num_workers": 2}], ids=str)
@pytest.mark.parametrize("way", ["go on", "begin", "load", "close"])
def test_a_fork_takes_nothing_of_what_its_parent_reads_ahead(how: dict[str, Any], way: str) -> None:
    """It is told to build a loader; where nothing is ahead it goes on by itself."""
    with rd.DataLoader(ROWS, global_batch_size=4, num_logical_shards=8, **how) as loader:
        batches = iter(loader)
        expected = [list(batch) for batch in rd.DataLoader(ROWS, global_batch_size=4, num_logical_shards=8)]
        found = [list(next(batches))]
        child = os.fork()
        if child == 0:
            code = 1
            try:
                if way == "load":
                    loader.load_state_dict(loader.state_dict())
                if way == "close":
                    loader.close()
                    gc.collect()
                    os._exit(0)
                next(batches if way == "go on" else iter(loader))
                code = 2 * bool(how)
            except RuntimeError as error:
                code = 0 if "of which this one is a fork" in str(error) else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        found += map(list, batches)
    assert found == expected
