"""Micro batches from real worker processes: the same as without them, and a state that is exact however far they are ahead."""

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
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import get_worker_info
from torchdata.nodes import Mapper

import rescale_data as rd
from rescale_data.engine.board import Board
from rescale_data.engine.message import MAX_MESSAGE_VALUES, Inbox, PackedValue, Slabs
from rescale_data.engine.processes import Work
from rescale_data.engine.recipe import SAMPLES, Recipe
from rescale_data.engine.schema import Schema
from rescale_data.engine.segment import Segment
from rescale_data.engine.workers import Begin, Worker
from tests.pipelines import Rows, as_samples, data_for, pipeline_of, plain
from tests.simulate import same_state
from tests.states import opened


def loader_of(kind: str = "rows", k: int = 0, **kwargs: Any) -> rd.DataLoader:
    """O = 12, b = 4, so A = 3; N = 24: K = 1, 2, 3 are aligned."""
    pipeline = pipeline_of(kind, data_for(kind, 130))
    given = {"global_batch_size": 12, "micro_batch_size": 4, "num_logical_shards": 24, "collate_fn": as_samples}
    return rd.DataLoader(pipeline, num_workers=k, **{**given, **kwargs})


def plainly(batches: Any) -> list[Any]:
    return [plain(batch) for batch in batches]


class TestSameAsWithout:
    @pytest.mark.parametrize(
        ("kind", "k", "repeat", "tail"),
        [("rows", 1, False, "drop"), ("rows", 2, False, "pad"), ("packed", 2, True, "drop"), ("every", 3, True, "drop"),
         ("packed", 2, False, "pad"), ("mixed", 2, False, "pad"), ("packed mixture", 2, False, "pad"),
         ("kept", 3, False, "drop"), ("batched", 2, False, "pad")],
    )  # fmt: skip
    def test_batches_and_the_state_after_each(self, kind: str, k: int, repeat: bool, tail: str) -> None:
        """Over two epochs, remainders included; the state is taken while workers are ahead."""
        with loader_of(kind, k, repeat=repeat, tail=tail) as loader:
            other = loader_of(kind, 0, repeat=repeat, tail=tail)
            for _ in range(2):
                for batch, expected in itertools.islice(zip(loader, other, strict=not repeat), 60):
                    assert plain(batch) == plain(expected)
                    assert same_state(loader.state_dict(), other.state_dict())
            assert loader.progress()["dropped_samples"] == other.progress()["dropped_samples"]

    def test_of_a_mixture_a_message_holds_what_changed(self) -> None:
        """However many sources there are."""

        def slots(num_sources: int) -> int:
            def pipeline(shard: rd.Shard) -> Any:
                nodes = {f"s{i}": rd.Reader(Rows(130), shard) for i in range(num_sources)}
                return rd.WeightedSampler(nodes, dict.fromkeys(nodes, 1.0))

            with loader_of(repeat=True) as loader:
                segment = Segment(loader._stream.layout, 0, None)
            worker = Worker(Recipe(pipeline, 24, 0, True), as_samples, 10.0)
            worker.attach(0, Board(1))
            table = Schema(pipeline(rd.Shard(0, 24))).fresh_table(24)
            inbox, size = Inbox(False), 0
            messages = worker.messages(Begin.from_table(0, segment, table, 0, 2), lambda: None)
            parts = (part for message in messages for part in inbox.open(message))
            for part in itertools.islice(parts, 9):
                micro_batch = inbox.unpack(*part)
                micro_batch.rows.write(table)
                size += micro_batch.rows.values.size + micro_batch.rows.slots.size
            assert table[:, SAMPLES].sum() == 9 * 4
            return size

        assert slots(3) == slots(60) == 2 * 9 * 4 * 4  # of each sample: samples, draws, drawn, row

    def test_a_worker_is_told_the_rows_of_its_rank_alone(self) -> None:
        layout = loader_of(repeat=True, dp_rank=1, dp_world_size=3)._stream.layout
        table = np.arange(48).reshape(24, 2)
        begin = Begin.from_table(0, Segment(layout, 1, None), table, 0, 2)
        assert begin.rows.tolist() == table[8:16].tolist()
        assert begin.table[8:16].tolist() == table[8:16].tolist()

    def test_many_small_micro_batches_share_a_message_and_keep_their_order(self) -> None:
        data = Rows(40_000)
        pipeline = pipeline_of("rows", data)
        found = []
        for k in (2, 0):
            with rd.DataLoader(
                pipeline, global_batch_size=2, num_logical_shards=8, num_workers=k, collate_fn=as_samples
            ) as loader:
                found.append(plainly(itertools.islice(loader, 3000)))
                assert opened(loader.state_dict())["samples"] == 6000
        assert found[0] == found[1]


def pid_pipeline(shard: rd.Shard) -> rd.BaseNode:
    return Mapper(rd.Reader(list(range(96)), shard), _pid)


def _pid(_: int) -> int:
    return os.getpid()


def test_the_fork_server_imports_torch_while_a_model_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[bool] = []
    monkeypatch.setattr(multiprocessing.forkserver, "ensure_running", lambda: started.append(True))
    loader_of()
    assert started == []
    loader_of(k=1)
    assert started == [True]


class TestProcesses:
    def test_batches_come_from_k_processes_in_turn_and_close_ends_them(self) -> None:
        loader = rd.DataLoader(
            pid_pipeline, global_batch_size=12, micro_batch_size=4, num_logical_shards=24, num_workers=3
        )
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

    def test_they_start_safely_though_this_process_has_used_threads(self, tmp_path: Path) -> None:
        """A fork of it could deadlock: pyarrow's thread pool and an open lock would be copied as they are."""
        for part in range(4):
            pq.write_table(
                pa.table({"x": range(part * 100, part * 100 + 100)}), tmp_path / f"{part}.parquet", row_group_size=10
            )
        table = pq.read_table(tmp_path, use_threads=True)
        assert pc.sum(table["x"]).as_py() == 399 * 200
        lock = threading.Lock()
        with (
            lock,
            rd.DataLoader(
                rd.ParquetSource(tmp_path), global_batch_size=10, num_logical_shards=20, num_workers=2
            ) as loader,
        ):
            rows = [x for batch in loader for x in batch["x"].tolist()]
        assert sorted(rows) == list(range(400))

    def test_spawn(self) -> None:
        with loader_of(k=1, multiprocessing_context="spawn") as loader:
            assert plainly(itertools.islice(loader, 3)) == plainly(itertools.islice(loader_of(), 3))


class Fragile(Rows):
    """Rows that cannot be read while a file is there."""

    def __init__(self, num_rows: int, flag: Path) -> None:
        super().__init__(num_rows)
        self.flag = flag

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 60 and self.flag.exists():
            raise OSError(f"cannot read row {index}")
        return super().__getitem__(index)


class Slow(Rows):
    def __getitem__(self, index: int) -> dict[str, Any]:
        time.sleep(60)
        return super().__getitem__(index)


class Pinned(Rows):
    """Rows that are not read while a file is there."""

    def __init__(self, num_rows: int, flag: Path) -> None:
        super().__init__(num_rows)
        self.flag = flag

    def __getitem__(self, index: int) -> dict[str, Any]:
        while self.flag.exists():
            time.sleep(0.01)
        return super().__getitem__(index)


class Deadly(Rows):
    """Rows of which one ends the process that reads it, in the way of the kernel or of ``sys.exit``."""

    def __init__(self, num_rows: int, end: Any) -> None:
        super().__init__(num_rows)
        self.end = end

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 60:
            self.end(3)
        return super().__getitem__(index)


class TestFailures:
    """The iteration ends with the worker's traceback, the state says what was received, and it can go on from there."""

    def test_a_worker_that_raises(self, tmp_path: Path) -> None:
        flag = tmp_path / "broken"
        data = Fragile(96, flag)

        def loader() -> rd.DataLoader:
            return rd.DataLoader(data, global_batch_size=12, micro_batch_size=4, num_logical_shards=24, num_workers=2)

        flag.touch()
        failing, found = loader(), []
        with pytest.raises(OSError, match="cannot read row 60") as raised:
            found += collected(failing, found)
        assert "in __getitem__" in "".join(raised.value.__notes__), "the traceback of the worker"
        state = failing.state_dict()
        assert opened(state)["samples"] == 4 * len(found)
        assert opened(state)["shards"]["samples"].sum() == 4 * len(found)
        flag.unlink()
        resumed = loader()
        resumed.load_state_dict(state)
        with failing, resumed:
            rest = [batch["row"].tolist() for batch in resumed]
            assert [batch["row"].tolist() for batch in failing] == rest, "the same loader goes on too"
        rows = [row for batch in found for row in batch["row"].tolist()] + [row for batch in rest for row in batch]
        assert sorted(rows) == list(range(96))

    def test_a_worker_that_waits_for_ever(self) -> None:
        loader = rd.DataLoader(
            Slow(96), global_batch_size=12, micro_batch_size=4, num_logical_shards=24, num_workers=1, timeout=5
        )
        with loader, pytest.raises(TimeoutError, match=r"no batch within timeout=5 s\. Give a longer one"):
            next(iter(loader))

    @pytest.mark.parametrize("end", [os._exit, sys.exit])
    def test_a_worker_that_ends_is_noticed_long_before_the_timeout(self, end: Any) -> None:
        """With nothing on its way, so that nothing but its end tells."""
        loader = rd.DataLoader(
            Deadly(96, end),
            global_batch_size=12,
            micro_batch_size=4,
            num_logical_shards=24,
            num_workers=1,
            timeout=3600,
        )
        with loader, pytest.raises(RuntimeError, match="A worker process exited unexpectedly"):
            list(loader)

    @pytest.mark.parametrize("begins_anew", [False, True])
    def test_ctrl_c_while_it_waits_for_a_worker(
        self, tmp_path: Path, begins_anew: bool, request: pytest.FixtureRequest
    ) -> None:
        """As in a notebook, where the next cell goes on: with the batch after the last one."""
        request.addfinalizer(functools.partial(signal.signal, signal.SIGINT, signal.getsignal(signal.SIGINT)))
        signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored under `nohup` and `&`
        flag = tmp_path / "held"
        make = functools.partial(rd.DataLoader, global_batch_size=12, num_logical_shards=24, repeat=True)
        whole = [batch["row"].tolist() for batch in itertools.islice(make(Rows(96)), 90)]
        with make(Pinned(96, flag), num_workers=1) as loader:
            batches = iter(loader)
            found = [next(batches)["row"].tolist()]
            flag.touch()
            if begins_anew:  # the worker is within a batch of the segment before
                loader.load_state_dict(loader.state_dict())
                batches = iter(loader)

            def interrupt() -> None:
                os.kill(os.getpid(), signal.SIGINT)
                flag.unlink()

            def go_on() -> None:
                threading.Timer(0.5, interrupt).start()
                while True:
                    found.append(next(batches)["row"].tolist())

            with pytest.raises(KeyboardInterrupt):
                go_on()
            found += [next(batches)["row"].tolist() for _ in range(90 - len(found))]
        assert found == whole

    def test_a_worker_that_dies(self) -> None:
        """Of an endless stream, so that workers cannot have made all of it before they die."""
        whole = plainly(itertools.islice(loader_of(repeat=True), 300))
        loader, found = loader_of(k=2, repeat=True), []
        batches = iter(loader)
        found += plainly(itertools.islice(batches, 5))
        for child in multiprocessing.active_children():
            os.kill(child.pid or 0, signal.SIGKILL)
        with pytest.raises(RuntimeError, match=r"A worker process exited unexpectedly .*__main__"):
            found += collected(loader, found, map(plain, batches))
        assert found == whole[: len(found)]
        state = loader.state_dict()
        assert opened(state)["samples"] == 4 * len(found)
        expected = whole[len(found) : len(found) + 20]
        with loader:
            assert plainly(itertools.islice(loader, 20)) == expected
        other = loader_of(repeat=True)
        other.load_state_dict(state)
        assert plainly(itertools.islice(other, 20)) == expected


def collected(loader: rd.DataLoader, into: list[Any], batches: Any = None) -> list[Any]:
    """Put batches into a list until an error ends them."""
    for batch in batches or loader:
        into.append(batch)
    return []


class TestPickling:
    """It is tried when the loader is built, and the error names the cure."""

    CURES = r"module-level function.*functools\.partial\(pipeline, source\).*__main__.*num_workers=0"

    def test_a_lambda(self) -> None:
        with pytest.raises(TypeError, match=rf"must pickle, and do not: .*lambda.*{self.CURES}"):
            rd.DataLoader(lambda shard: rd.Reader([1, 2, 3, 4], shard), global_batch_size=1, num_workers=1)

    def test_a_local_function(self) -> None:
        def pipeline(shard: rd.Shard) -> rd.BaseNode:
            return rd.Reader([1, 2, 3, 4], shard)

        with pytest.raises(TypeError, match=rf"must pickle, and do not: .*pipeline.*{self.CURES}"):
            rd.DataLoader(pipeline, global_batch_size=1, num_workers=1)
        assert rd.DataLoader(pipeline, global_batch_size=1, num_workers=0)

    def test_a_dataset(self) -> None:
        data = Rows(8)
        data.lock = threading.Lock()  # type: ignore[attr-defined]
        with pytest.raises(TypeError, match=rf"must pickle, and do not: .*lock.*{self.CURES}"):
            rd.DataLoader(data, global_batch_size=1, num_workers=1)

    def test_a_collate_fn(self) -> None:
        with pytest.raises(TypeError, match="must pickle"):
            loader_of(k=1, collate_fn=lambda samples: samples)


class Within(Rows):
    """Rows that tell of the process that reads them."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        info = get_worker_info()
        assert info is not None
        assert info.seed == torch.initial_seed()
        drawn = random.random(), float(np.random.random()), float(torch.rand(()))
        ignores = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        return {
            "id": info.id,
            "of": info.num_workers,
            "threads": torch.get_num_threads(),
            "ignores": ignores,
            "drawn": drawn,
        }


def test_within_a_worker() -> None:
    """One thread, a number and a seed for each worker, and Ctrl-C left to the trainer, as in workers of torch."""
    rows = []
    for _ in range(2):
        with rd.DataLoader(
            Within(8), global_batch_size=1, num_logical_shards=2, num_workers=2, collate_fn=only
        ) as loader:
            rows += list(itertools.islice(loader, 2))
            loader.close()
            rows += list(itertools.islice(loader, 2))
    assert [row["id"] for row in rows] == [0, 1, 0, 1] * 2
    assert {(row["of"], row["threads"], row["ignores"]) for row in rows} == {(2, 1, True)}
    drawn = [row["drawn"] for row in rows]
    assert len({number for numbers in drawn[:4] for number in numbers}) == 12, "each worker that is started has its own"
    assert drawn[:4] == drawn[4:], "which follow from the trainer's seed"


def only(samples: list[Any]) -> Any:
    (sample,) = samples
    return sample


def test_a_pipe_carries_less_than_4_kb_each_way() -> None:
    """However much there is to say: else the sender of one side waits for the other, which waits for it."""
    loader = loader_of(k=2)
    segment = Segment(loader._stream.layout, 0, None)
    begin = Begin.from_table(2**40, segment, np.zeros((24, 20_000), dtype=np.int64), 2**40, 3)
    text = "x" * 100_000
    message = Slabs().pack(3, [PackedValue((torch.zeros(10_000), text))] * MAX_MESSAGE_VALUES)
    assert len(ForkingPickler.dumps(Work(begin, 2).command)) < 4096
    assert len(ForkingPickler.dumps((2**40, message))) < 4096


def _fail(number: int) -> None:
    raise OSError(f"no scratch disk for {number}")


def test_a_worker_init_fn_that_raises() -> None:
    with (
        loader_of(k=1, worker_init_fn=_fail) as loader,
        pytest.raises(RuntimeError, match=r"(?s)_fail.*no scratch disk for 0"),
    ):
        next(iter(loader))


def unsendable(samples: list[Any]) -> Any:
    return lambda: samples


def test_a_batch_that_does_not_pickle() -> None:
    with loader_of(k=1, collate_fn=unsendable) as loader, pytest.raises(Exception, match=r"pickle.*lambda"):
        next(iter(loader))


def test_many_loads_while_a_worker_is_within_a_read(tmp_path: Path) -> None:
    """None waits for the read, and of the segments that they begin the worker makes the last alone."""
    flag = tmp_path / "held"
    make = functools.partial(rd.DataLoader, global_batch_size=12, num_logical_shards=24)
    expected = next(iter(make(Rows(96))))["row"].tolist()
    with make(Pinned(96, flag), num_workers=1) as loader:
        state = loader.state_dict()
        next(iter(loader))
        flag.touch()
        for _ in range(300):
            loader.load_state_dict(state)
            loader.start()
        flag.unlink()
        assert next(iter(loader))["row"].tolist() == expected


def test_the_trainers_random_numbers_are_its_own() -> None:
    """So that a loss with dropout is the same with and without workers."""
    before = torch.get_rng_state()
    with loader_of(k=1) as loader:
        next(iter(loader))
    assert torch.equal(torch.get_rng_state(), before)


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


def test_the_fork_server_imports_what_the_pipelines_of_the_trainer_are_made_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for all workers: each would else import pyarrow to unpickle its source."""
    given: list[str] = []
    monkeypatch.setattr(multiprocessing, "set_forkserver_preload", given.extend)
    source = rd.ParquetSource.__module__, rd.TokenPacker.__module__
    loader_of(k=1).close()
    assert {*source, "rescale_data.engine.processes", "__main__"} <= set(given)
    assert not [name for name in given if name.startswith("rescale_data.integrations")]
