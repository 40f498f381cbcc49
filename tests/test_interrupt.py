"""Ctrl-C, wherever it comes within `next`: who goes on afterwards misses no row and sees none twice."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import signal
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest

import rescale_data as rd
from rescale_data.engine import threads
from rescale_data.engine.feed import InThreadFeed
from rescale_data.sources.decoded.cache import Cache, EvictionListener

BATCH, ROWS = 4, 24


class CtrlC:
    """Raises where Python looks for signals: when a function of the package begins, and when one in C has returned.

    Args:
        at: At which of these moments.
        modules: Raises before any bytecode of these files of the package, in place of that.
    """

    def __init__(self, at: int, modules: tuple[str, ...] = ()) -> None:
        self.left, self.came, self._modules = at, False, modules

    @contextmanager
    def pressed(self) -> Generator[None]:
        gc.disable()  # what it runs may not raise
        if self._modules:
            sys.settrace(self._trace)
        else:
            sys.setprofile(self._look)
        try:
            yield
        finally:
            sys.setprofile(None)
            sys.settrace(None)
            gc.enable()

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        del argument
        if event == "call":
            frame.f_trace_opcodes = frame.f_code.co_filename.endswith(self._modules)
            return self._trace if frame.f_trace_opcodes else None
        if event == "opcode":
            self._count()
        return self._trace

    def _look(self, frame: FrameType, event: str, argument: Any) -> None:
        del argument
        if (
            event not in ("call", "c_return")
            or frame.f_globals.get("__package__", "").partition(".")[0] != "rescale_data"
        ):
            return
        self._count()

    def _count(self) -> None:
        self.left -= 1
        if self.left == 0:
            self.came = True
            raise KeyboardInterrupt


DOCUMENTS = rd.DatasetSource([{"tokens": [i] * (1 + i % 7)} for i in range(84)], name="documents")
SOURCE = rd.DatasetSource(range(ROWS), name="numbers")
TWICE = rd.DatasetSource(range(2 * ROWS), name="twice as many")


def odd(row: int) -> bool:
    return row % 2 == 1


def known() -> rd.DataLoader:
    return rd.DataLoader(SOURCE, global_batch_size=BATCH, num_logical_shards=BATCH)


def only_reading_tells() -> rd.DataLoader:
    return rd.DataLoader(
        lambda shard: rd.Filter(rd.Reader(TWICE, shard), odd), global_batch_size=BATCH, num_logical_shards=BATCH
    )


def epochs_of_steps() -> rd.DataLoader:
    return rd.DataLoader(SOURCE, global_batch_size=BATCH, num_logical_shards=BATCH, repeat=True, steps_per_epoch=3)


def in_a_thread() -> rd.DataLoader:
    return rd.DataLoader(SOURCE, global_batch_size=BATCH, num_logical_shards=BATCH, prefetch=2)


def packed() -> rd.DataLoader:
    """Documents whose tokens are cached."""

    def pipeline(shard: rd.Shard) -> rd.BaseNode[Any]:
        return rd.TokenPacker(rd.Reader(DOCUMENTS, shard), column="tokens", seq_len=16, eos_id=0)

    sizes = {"global_batch_size": BATCH, "num_logical_shards": 2}
    return rd.DataLoader(pipeline, **sizes, prefetch=0, transfer=lambda batch: batch["tokens"])


def go_on_after(ctrl_c: CtrlC, loader: rd.DataLoader, number: int) -> tuple[list[list[int]], int]:
    """The batches of an epoch, Ctrl-C within a `next`; and how many had been counted when it came and did not arrive."""
    batches, batch_iterator = [], iter(loader)
    for _ in range(number):
        batches.append(next(batch_iterator).tolist())
    lost = 0
    try:
        with ctrl_c.pressed():
            batch = next(batch_iterator)
        batches.append(batch.tolist())
    except KeyboardInterrupt:
        lost = loader.step - len(batches)
    while True:
        try:
            batches.extend(batch.tolist() for batch in batch_iterator)
        except KeyboardInterrupt:  # it waited until a batch had arrived
            continue
        return batches, lost


FIRST, WITHIN, LAST = 0, 2, -1
CURSOR = ("engine/stream.py", "engine/cursor.py", "engine/micro_batch.py")
"""Files before any bytecode of which it comes: it leaves the old cursor, or the new one."""
NEXT = ("engine/base_loader.py", "engine/feed.py", "engine/transfer.py", "engine/watch.py")
"""Files of what ``next`` does besides: it leaves nothing that refuses the next one."""
CASES = [
    *itertools.product((known, only_reading_tells, in_a_thread), (FIRST, WITHIN, LAST), [()]),
    (packed, WITHIN, ()),
    *itertools.product((known, only_reading_tells, epochs_of_steps), (1, LAST), [CURSOR]),
    *itertools.product((known, in_a_thread), (FIRST, WITHIN), [NEXT]),
]


@pytest.mark.parametrize(("make_loader", "number", "modules"), CASES)
def test_ctrl_c_loses_and_repeats_nothing(
    make_loader: Callable[[], rd.DataLoader], number: int, modules: tuple[str, ...]
) -> None:
    whole = [batch.tolist() for batch in make_loader()]
    ctrl_c, at, num_lost, number = CtrlC(0), 0, 0, number % len(whole)
    while (
        ctrl_c.came or at < 2
    ):  # it comes from 1 on: CPython 3.12 traces bytecodes only of code that was traced before
        ctrl_c = CtrlC(at, modules)
        with make_loader() as loader:
            batches, lost = go_on_after(ctrl_c, loader, number)
            assert (loader.epoch, loader.step) == (1, len(whole))
        assert batches == whole[:number] + whole[number + lost :]
        num_lost, at = num_lost + lost, at + 1
    assert at > (100 if modules else 20)
    assert modules or num_lost < 15  # on its way out of `next`, as if it had come right behind


class Budget:
    cache_bytes = 100


class Part(EvictionListener):
    nbytes = 40

    def handle_eviction(self) -> None:
        pass


@pytest.mark.parametrize("call", [lambda lru: lru.put((1, "b"), Part()), lambda lru: lru.forget((1, "a"))])
def test_ctrl_c_within_the_cache_leaves_its_bytes_counted(call: Callable[[Cache], None]) -> None:
    at, ctrl_c = 1, CtrlC(1)
    while ctrl_c.came or at == 1:
        ctrl_c, lru, source = CtrlC(at), Cache(), Budget()
        lru.register(source)
        for key in ((0, "a"), (1, "a")):
            lru.put(key, Part())
        with contextlib.suppress(KeyboardInterrupt), ctrl_c.pressed():
            call(lru)
        lru.put((2, "a"), Part())
        keys = [(i, name) for i in range(3) for name in "ab"]
        assert lru.nbytes == 40 * sum(lru.get(key) is not None for key in keys) <= 100
        for key in keys:
            lru.forget(key)
        assert lru.nbytes == 0
        at += 1
    assert at > 5


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # it came as a generator was closed
@pytest.mark.parametrize("modules", [(), ("engine/base_loader.py", "engine/peers.py", "rescale_data/loader.py")])
@pytest.mark.parametrize("with_state", [False, True])
def test_ctrl_c_within_reopen_leaves_a_stream_that_the_arguments_describe(
    with_state: bool, modules: tuple[str, ...]
) -> None:
    for at in itertools.count(1):
        loader, ctrl_c = known(), CtrlC(at, modules)
        state = loader.state_dict() if with_state else None
        with contextlib.suppress(KeyboardInterrupt), ctrl_c.pressed():
            loader.reopen(state, micro_batch_size=2)
        assert len(next(iter(loader))) == (loader.options.micro_batch_size or BATCH)
        if not ctrl_c.came:
            break


def test_ctrl_c_within_close_moves_nothing() -> None:
    whole = [batch.tolist() for batch in in_a_thread()]
    ctrl_c, at = CtrlC(1), 1
    while ctrl_c.came or at == 1:
        ctrl_c = CtrlC(at)
        with in_a_thread() as loader:
            batches = [next(iter(loader)).tolist()]
            try:
                with ctrl_c.pressed():
                    loader.close()
            except KeyboardInterrupt:
                pass
            assert batches + [batch.tolist() for batch in loader] == whole
        at += 1
    assert at > 10


class Held:
    """Rows, of which one is held.

    Its reader presses Ctrl-C while the main thread waits for the reader, and goes on when the main thread waits again.

    Args:
        row: The one that is held.
    """

    def __init__(self, row: int) -> None:
        self.row, self.interrupted = row, False
        self.reading = self.most_reading = 0
        self.entered = threading.Event()

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> int:
        self.reading += 1
        self.most_reading = max(self.most_reading, self.reading)
        if row == self.row and not self.interrupted:
            self.entered.set()
            self._until(self._main_waits)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
            self._until(lambda: self.interrupted)
            self._until(lambda: self._main_waits() or self.most_reading > 1)
        self.reading -= 1
        return row

    def _main_waits(self) -> bool:
        frame = sys._current_frames()[threading.main_thread().ident or 0]
        while frame is not None and frame.f_code.co_filename in (threading.__file__, threads.__file__):
            frame = frame.f_back
        return frame is not None and frame.f_code is InThreadFeed.stop.__code__

    def _until(self, happens: Callable[[], bool]) -> None:
        while not happens():
            os.sched_yield()


@pytest.mark.skipif(threading.current_thread() is not threading.main_thread(), reason="signals come to the main thread")
def test_ctrl_c_while_a_thread_is_waited_for() -> None:
    """Two threads never read at once, although Python takes a thread for ended where Ctrl-C came into `Thread.join`."""

    def press(*_: Any) -> None:
        raise KeyboardInterrupt

    whole = [batch.tolist() for batch in in_a_thread()]
    rows = Held(whole[2][0])
    handler = signal.signal(signal.SIGUSR1, press)
    try:
        loader = rd.DataLoader(
            rd.DatasetSource(rows, name="numbers"), global_batch_size=BATCH, num_logical_shards=BATCH, prefetch=2
        )
        batches = [next(iter(loader)).tolist()]
        rows.entered.wait()
        with pytest.raises(KeyboardInterrupt):
            loader.close()
        rows.interrupted = True
        batches += [batch.tolist() for batch in loader]
    finally:
        signal.signal(signal.SIGUSR1, handler)
    assert rows.most_reading == 1
    assert batches == whole
