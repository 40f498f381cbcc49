"""Micro batches from real worker processes: the same as without them, and a state that is exact however far they are ahead.

What two calls of a trainer do at any moment of the workers is asked by law 4 (`tests.laws.test_calls_at_any_moment`).
"""

import functools
import gc
import itertools
import multiprocessing.forkserver
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import get_worker_info
from torchdata.nodes import Mapper

import rescale_data as rd
from rescale_data.engine.message import MAX_MESSAGE_VALUES, Inbox, PackedValue, Slabs
from rescale_data.engine.processes import WorkerRun
from rescale_data.engine.segment import EpochSegment
from rescale_data.engine.watch import stacks, waits_for_batches
from rescale_data.engine.workers import BeginCommand
from tests.corpus import Hooked, unreadable
from tests.pipelines import Rows, as_samples, data_for, pipeline_of, plain
from tests.states import opened
from tests.test_state import exact, tensors

make = functools.partial(rd.DataLoader, global_batch_size=12, micro_batch_size=4, num_logical_shards=24)
"""A = 3; with N = 24, K = 1, 2, 3 are aligned."""


def loader_of(kind: str = "rows", k: int = 0, **kwargs: Any) -> rd.DataLoader:
    return make(pipeline_of(kind, data_for(kind, 130)), num_workers=k, **{"collate_fn": as_samples, **kwargs})


def plainly(batches: Any) -> list[Any]:
    return [plain(batch) for batch in batches]


def row_numbers(batches: Any) -> list[list[int]]:
    return [batch["row"].tolist() for batch in batches]


def test_many_small_micro_batches_share_a_message_and_keep_their_order() -> None:
    found = []
    for k in (2, 0):
        sizes = {"global_batch_size": 2, "num_logical_shards": 8, "collate_fn": as_samples}
        with rd.DataLoader(pipeline_of("rows", Rows(40_000)), num_workers=k, **sizes) as loader:
            found.append(plainly(itertools.islice(loader, 3000)))
            assert opened(loader.state_dict())["samples"] == 6000
    assert found[0] == found[1]


_read_here: list[int] = []
"""Rows that this process has read."""


class Noted(Rows):
    def __getitem__(self, index: int) -> dict[str, Any]:
        _read_here.append(index)
        return super().__getitem__(index)


def is_late(row: dict[str, Any]) -> bool:
    return row["row"] > 180 or row["row"] % 4 == 0


def mostly_late(rows: Noted, shard: rd.Shard) -> rd.BaseNode:
    return rd.Filter(rd.Reader(rows, shard, shuffle=False), is_late, version=1)


@pytest.mark.parametrize("k", [1, 2])
def test_workers_alone_read_rows_also_to_find_the_end_of_an_epoch(k: int) -> None:
    """Else all ranks wait for one process while K are idle. The last logical shards have most rows that are kept."""
    _read_here.clear()
    found = []
    for num_workers in (k, 0):
        sizes = {"global_batch_size": 4, "micro_batch_size": 2, "num_logical_shards": 8, "tail": "pad"}
        with rd.DataLoader(functools.partial(mostly_late, Noted(240)), num_workers=num_workers, **sizes) as loader:
            found.append([batch["row"].tolist() for _ in range(2) for batch in loader])
        assert bool(_read_here) == (num_workers == 0)
    assert found[0] == found[1]


def test_a_pipe_carries_less_than_4_kb_each_way() -> None:
    """However much there is to say: else the sender of one side waits for the other, which waits for it."""
    segment = EpochSegment(loader_of()._stream.layout, 0, None)
    begin = BeginCommand(2**40, segment, 2**40, 3, np.zeros((24, 20_000), dtype=np.int64))
    message = Slabs().pack(3, [PackedValue((torch.zeros(10_000), "x" * 100_000))] * MAX_MESSAGE_VALUES)
    assert len(ForkingPickler.dumps(WorkerRun(begin, 2).packed_command)) < 4096
    assert len(ForkingPickler.dumps((2**40, message))) < 4096


def pid_pipeline(shard: rd.Shard) -> rd.BaseNode:
    return Mapper(rd.Reader(list(range(96)), shard), _pid)


def _pid(_: int) -> int:
    return os.getpid()


class TestProcesses:
    def test_the_fork_server_starts_early_and_imports_what_pipelines_are_made_of(self, monkeypatch: Any) -> None:
        """While a model is built, and once for all workers: each would else import pyarrow to unpickle its source."""
        of_sources = {rd.ParquetSource.__module__, rd.TokenPacker.__module__}  # imported by now
        started: list[bool] = []
        preloaded: list[str] = []
        monkeypatch.setattr(multiprocessing.forkserver, "ensure_running", lambda: started.append(True))
        monkeypatch.setattr(multiprocessing, "set_forkserver_preload", preloaded.extend)
        loader_of()
        assert not started
        loader_of(k=1).close()
        assert started == [True]
        assert {*of_sources, "rescale_data.engine.workers", "__main__"} <= set(preloaded)
        assert not [name for name in preloaded if name.startswith("rescale_data.integrations")]

    def test_batches_come_from_k_processes_in_turn_and_close_ends_them(self) -> None:
        loader = make(pid_pipeline, num_workers=3)
        pids = [batch.unique().tolist() for batch in itertools.islice(loader, 6)]
        assert pids[:3] == pids[3:]
        flat = [pid for batch in pids[:3] for pid in batch]
        assert len(set(flat)) == len(flat) == 3
        assert os.getpid() not in flat
        assert {child.pid for child in multiprocessing.active_children()} >= set(flat)
        loader.close()
        assert not {child.pid for child in multiprocessing.active_children()} & set(flat)

    def test_a_loader_that_is_forgotten_ends_its_processes(self) -> None:
        before = set(multiprocessing.active_children())
        loader = loader_of(k=1)
        next(iter(loader))
        assert set(multiprocessing.active_children()) > before
        del loader
        gc.collect()
        for child in set(multiprocessing.active_children()) - before:
            child.join(60)
        assert set(multiprocessing.active_children()) <= before


ROWS = [{"row": row} for row in range(96)]


def end_at_row_60(end: Callable[[int], object], index: int) -> None:
    if index == 60:
        end(3)


def wait_while_exists(flag: Path, _: int) -> None:
    while flag.exists():
        time.sleep(0.01)


def fail(number: int) -> None:
    raise OSError(f"no scratch disk for {number}")


def unsendable(samples: list[Any]) -> Any:
    return lambda: samples


def collect(batches: Any, into: list[Any]) -> None:
    """Put batches into a list until an error ends them."""
    for batch in batches:
        into.append(batch)


class TestFailures:
    """The iteration ends with the worker's traceback, the state says what was received, and it can go on from there."""

    def test_a_worker_that_raises(self) -> None:
        """What follows, and the state, are asked by law 4."""
        with make(unreadable(ROWS, [60]), num_workers=1) as loader, pytest.raises(ValueError, match="row 60") as raised:
            list(loader)
        assert "in __getitem__" in "".join(raised.value.__notes__), "the traceback of the worker"

    def test_a_worker_that_waits_for_ever(self, tmp_path: Path) -> None:
        data = Hooked(ROWS, functools.partial(wait_while_exists, tmp_path))
        loader = make(data, num_workers=1, timeout=5)
        with loader, pytest.raises(TimeoutError, match=r"no batch within timeout=5 s\. Give a longer one"):
            next(iter(loader))

    @pytest.mark.parametrize("end", [os._exit, sys.exit])
    def test_a_worker_that_ends_is_noticed_long_before_the_timeout(self, end: Any) -> None:
        """With nothing on its way, so that nothing but its end tells."""
        loader = make(Hooked(ROWS, functools.partial(end_at_row_60, end)), num_workers=1, timeout=3600)
        with loader, pytest.raises(RuntimeError, match="A worker process exited unexpectedly"):
            list(loader)

    def test_a_worker_that_dies(self) -> None:
        """Of an endless stream, so that workers cannot have made all of it before they die."""
        whole = plainly(itertools.islice(loader_of(repeat=True), 300))
        loader = loader_of(k=2, repeat=True)
        batches = iter(loader)
        found = plainly(itertools.islice(batches, 5))
        for child in multiprocessing.active_children():
            os.kill(child.pid or 0, signal.SIGKILL)
        with pytest.raises(RuntimeError, match=r"A worker process exited unexpectedly .*__main__"):
            collect(map(plain, batches), found)
        assert found == whole[: len(found)]
        state = loader.state_dict()
        assert opened(state)["samples"] == 4 * len(found)
        other = loader_of(repeat=True)
        other.load_state_dict(state)
        with loader:
            for each in (loader, other):
                assert plainly(itertools.islice(each, 20)) == whole[len(found) : len(found) + 20]

    @pytest.mark.parametrize(
        ("kwargs", "error", "words"),
        [
            ({"worker_init_fn": fail}, RuntimeError, r"(?s)fail.*no scratch disk for 0"),
            ({"collate_fn": unsendable}, Exception, r"pickle.*lambda"),
        ],
    )
    def test_what_a_worker_cannot_do_is_an_error(self, kwargs: Any, error: type[Exception], words: str) -> None:
        with loader_of(k=1, **kwargs) as loader, pytest.raises(error, match=words):
            next(iter(loader))


class TestHeldReads:
    @pytest.mark.parametrize("begins_anew", [False, True])
    def test_ctrl_c_while_it_waits_for_a_worker(self, tmp_path: Path, begins_anew: bool, request: Any) -> None:
        """As in a notebook, where the next cell goes on: with the batch after the last one."""
        request.addfinalizer(functools.partial(signal.signal, signal.SIGINT, signal.getsignal(signal.SIGINT)))
        signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored under `nohup` and `&`
        flag = tmp_path / "held"
        whole = row_numbers(itertools.islice(make(Rows(96), repeat=True), 90))
        with make(Hooked(ROWS, functools.partial(wait_while_exists, flag)), repeat=True, num_workers=1) as loader:
            batches = iter(loader)
            found = [next(batches)]
            flag.touch()
            if begins_anew:  # the worker is within a batch of the segment before
                loader.load_state_dict(loader.state_dict())
                batches = iter(loader)

            def interrupt() -> None:
                os.kill(os.getpid(), signal.SIGINT)
                flag.unlink()

            def go_on() -> None:
                threading.Timer(0.5, interrupt).start()
                collect(batches, found)

            with pytest.raises(KeyboardInterrupt):
                go_on()
            found += itertools.islice(batches, 90 - len(found))
        assert row_numbers(found) == whole

    def test_ctrl_c_while_workers_start(self, monkeypatch: pytest.MonkeyPatch, request: Any) -> None:
        """They start once, and the next batch waits for them: half a start leaves a fork server that starts no more."""
        request.addfinalizer(functools.partial(signal.signal, signal.SIGINT, signal.getsignal(signal.SIGINT)))
        signal.signal(signal.SIGINT, signal.default_int_handler)
        connect, started = forkserver.connect_to_new_process, list[Any]()

        def connect_and_interrupt(descriptors: Any) -> Any:
            started.append(connect(descriptors))
            if len(started) == 1:
                os.kill(os.getpid(), signal.SIGINT)
            return started[-1]

        monkeypatch.setattr(forkserver, "connect_to_new_process", connect_and_interrupt)
        with make(Rows(96), num_workers=2) as loader:
            batches = iter(loader)
            with pytest.raises(KeyboardInterrupt):
                next(batches)
            assert row_numbers(batches) == row_numbers(make(Rows(96)))
        assert len(started) == 2

    def test_a_close_within_a_slow_start_starts_no_more(self, monkeypatch: pytest.MonkeyPatch, request: Any) -> None:
        """And until then ``next`` is said to wait for the workers, and for no other ranks."""
        request.addfinalizer(functools.partial(signal.signal, signal.SIGINT, signal.getsignal(signal.SIGINT)))
        signal.signal(signal.SIGINT, signal.default_int_handler)
        connect, started, main_thread = forkserver.connect_to_new_process, list[Any](), threading.get_ident()
        loader = make(Rows(96), num_workers=2)

        def is_closed() -> bool:
            return loader._stream.feed._processes.status.wanted_command_id < 0  # type: ignore[attr-defined]

        def connect_slowly(descriptors: Any) -> Any:
            started.append(connect(descriptors))
            for _ in range(10**5):
                if waits_for_batches(stacks().get(main_thread)):
                    os.kill(os.getpid(), signal.SIGINT)
                    break
            while len(started) == 1 and not is_closed():
                os.sched_yield()
            return started[-1]

        monkeypatch.setattr(forkserver, "connect_to_new_process", connect_slowly)
        with pytest.raises(KeyboardInterrupt):
            next(iter(loader))
        loader.close()
        assert len(started) == 1

    def test_many_loads(self, tmp_path: Path) -> None:
        """None waits for the read, and of the segments that they begin the worker makes the last alone."""
        flag = tmp_path / "held"
        with make(Hooked(ROWS, functools.partial(wait_while_exists, flag)), num_workers=1) as loader:
            state = loader.state_dict()
            next(iter(loader))
            flag.touch()
            for _ in range(300):
                loader.load_state_dict(state)
                loader.start()
            flag.unlink()
            assert row_numbers([next(iter(loader))]) == row_numbers([next(iter(make(Rows(96))))])


def local(shard: rd.Shard) -> rd.BaseNode:
    return rd.Reader([1, 2, 3, 4], shard)


def with_a_lock() -> Rows:
    data = Rows(8)
    data.lock = threading.Lock()  # type: ignore[attr-defined]
    return data


@pytest.mark.parametrize(
    ("data", "kwargs", "named"),
    [
        (lambda shard: local(shard), {}, "lambda"),
        (with_a_lock(), {}, "lock"),
        (Rows(8), {"collate_fn": lambda samples: samples}, "lambda"),
        (Rows(8), {"worker_init_fn": lambda worker: None}, "lambda"),
    ],
    ids=["pipeline", "dataset", "collate_fn", "worker_init_fn"],
)
def test_what_does_not_pickle_is_refused_when_the_loader_is_built(data: Any, kwargs: Any, named: str) -> None:
    """With the cure; without workers it is not asked for."""
    cures = r"module-level function.*functools\.partial\(pipeline, source\).*__main__.*num_workers=0"
    with pytest.raises(TypeError, match=rf"must pickle, and do not: .*{named}.*{cures}"):
        rd.DataLoader(data, global_batch_size=1, num_workers=1, **kwargs)
    assert rd.DataLoader(data, global_batch_size=1, num_workers=0, **kwargs)


class Within(Rows):
    """Rows that tell of the process that reads them."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        info = get_worker_info()
        assert info is not None
        assert info.seed == torch.initial_seed()
        drawn = random.random(), float(np.random.random()), float(torch.rand(()))
        ignores = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        seen = info.num_workers, torch.get_num_threads(), ignores, _begun == [info.id]
        return {"id": info.id, "seen": seen, "drawn": drawn}


_begun: list[int] = []
"""The workers for which `begin` was called in this process."""


def begin(worker: int) -> None:
    _begun.append(worker)


def test_within_a_worker() -> None:
    """One thread, a number and a seed for each worker, a call of its own, and Ctrl-C left to the trainer, as in torch's."""
    rows, sizes = [], {"global_batch_size": 1, "num_logical_shards": 2, "num_workers": 2}
    before = torch.get_rng_state()
    for _ in range(2):
        with rd.DataLoader(Within(8), collate_fn=as_samples, worker_init_fn=begin, **sizes) as loader:
            for _ in range(2):
                rows += [batch["samples"][0] for batch in itertools.islice(loader, 2)]
                loader.close()
    assert [row["id"] for row in rows] == [0, 1, 0, 1] * 2
    assert {row["seen"] for row in rows} == {(2, 1, True, True)}
    drawn = [row["drawn"] for row in rows]
    assert len({number for numbers in drawn[:4] for number in numbers}) == 12, "each worker that is started has its own"
    assert drawn[:4] == drawn[4:], "which follow from the trainer's seed"
    assert torch.equal(torch.get_rng_state(), before), "so that a loss with dropout is the same without workers"


def test_tensors_of_a_batch_are_the_trainers_own() -> None:
    """Batches that are kept do not change when workers go on, and can be written to."""
    data = [{"x": torch.full((2000,), float(i))} for i in range(96)]
    with rd.DataLoader(data, global_batch_size=4, num_logical_shards=8, num_workers=2) as loader:
        kept = []
        for batch in loader:
            kept.append(batch["x"])
            batch["x"].add_(0.5)
    values = [value for batch in kept for value in batch.unique(dim=1).flatten().tolist()]
    assert sorted(values) == [i + 0.5 for i in range(96)]


# Values that are packed into shared memory come back, and stay what they are when the memory is used again


arrays = st.sampled_from([np.int8, np.uint16, np.int64, np.float32, np.float64, np.complex64, np.bool_]).flatmap(
    lambda dtype: st.lists(st.integers(0, 3), max_size=3).map(
        lambda shape: np.arange(np.prod(shape, dtype=int)).astype(dtype).reshape(shape)
    )
)
others = st.one_of(st.none(), st.integers(), st.text(max_size=5), st.binary(max_size=5), st.floats(allow_nan=False))
values = st.recursive(
    st.one_of(tensors(), arrays, others),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)),
    max_leaves=8,
)


def sent(slabs: Slabs, inbox: Inbox, slab: int, batch: list[Any]) -> list[Any]:
    inbox.messages.put(slabs.pack(slab, [PackedValue(value) for value in batch]))
    received = [inbox.next_value(0) for _ in batch]
    assert [is_last for _, is_last in received] == [False] * (len(batch) - 1) + [True]
    return [value for value, _ in received]


@given(st.lists(st.lists(values, min_size=1, max_size=3), min_size=1, max_size=6))
def test_values_come_back_and_stay(batches: list[list[Any]]) -> None:
    slabs, inbox = Slabs(), Inbox(pin_memory=False)
    received = [sent(slabs, inbox, i % 2, batch) for i, batch in enumerate(batches)]
    assert exact(received) == exact(batches)


def test_what_is_not_contiguous_dense_or_plain() -> None:
    batch = [
        torch.arange(6).reshape(2, 3).t(),
        np.arange(6).reshape(2, 3).T,
        np.array(["a", "b"]),
        np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
        np.datetime64("2020-01-01"),
    ]
    *found, sparse = sent(Slabs(), Inbox(pin_memory=False), 0, [*batch, torch.eye(2).to_sparse()])
    assert exact(found) == exact(batch)
    assert torch.equal(sparse.to_dense(), torch.eye(2))
