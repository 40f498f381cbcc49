"""The surface of `DataLoader`, one behaviour a test. What a call does at any moment is a law: `tests.laws`."""

import gc
import itertools
import logging
import threading
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torchdata.nodes import Batcher, Mapper, Unbatcher

import rescale_data as rd
from tests.pipelines import Rows, rows
from tests.states import opened, same_state
from tests.test_state import exact

ROWS = Rows(100)


def loader_of(data: Any = ROWS, **kwargs: Any) -> rd.DataLoader:
    """O = 12, b = 4, so A = 3; N = 24."""
    given = {"global_batch_size": 12, "micro_batch_size": 4, "num_logical_shards": 24, "seed": 5}
    return rd.DataLoader(data, **{**given, **kwargs})


def rows_pipeline(shard: rd.Shard) -> rd.BaseNode:
    return rows(ROWS, shard)


def rows_of(batches: Any) -> list[list[int]]:
    return [batch["row"].tolist() for batch in batches]


def take(loader: rd.DataLoader, num: int) -> list[list[int]]:
    return rows_of(itertools.islice(iter(loader), num))


EPOCH = rows_of(loader_of())  # 24 micro batches: 8 steps of 12; 4 of 100 rows are left


# Batches


ON_A_DEVICE: dict[str, tuple[Any, dict[str, Any]]] = {
    "in process": (rows_pipeline, {}),
    "thread": (rows_pipeline, {"prefetch": 2}),
    "workers": (rows_pipeline, {"num_workers": 2, "multiprocessing_context": "fork"}),
    "ints": (range(100), {}),
    "tuples": ([(i, 0.5) for i in range(100)], {}),
    "arrays": ([np.arange(2)] * 100, {}),
    "padded": ([{"x": []}] * 100, {"collate_fn": lambda rows: [*rd.pad_collate({"x": 0})(rows).values()]}),
}


@pytest.mark.parametrize("device", ["meta", "cuda"])  # the latter cannot be used here, and never in a forked worker
@pytest.mark.parametrize("name", ON_A_DEVICE)
def test_a_default_device_of_the_trainer_changes_neither_batches_nor_state(name: str, device: str) -> None:
    data, how = ON_A_DEVICE[name]

    def run() -> tuple[list[Any], Any]:
        with loader_of(data, tail="pad", **how) as loader, loader_of(data, tail="pad", **how) as other:
            seen = list(itertools.islice(iter(loader), 5))
            state = loader.state_dict()
            other.load_state_dict(state)
            return [*seen, *other], state

    batches, state = run()
    with torch.device(device):
        batches_there, state_there = run()
    assert exact(batches_there) == exact(batches)
    assert same_state(state, state_there)


def test_a_batch_is_a_dict_of_tensors() -> None:
    batch = next(iter(loader_of([{"x": i, "y": np.arange(3, dtype=np.float32), "name": "a"} for i in range(48)])))
    assert batch["x"].dtype == torch.int64
    assert batch["y"].dtype == torch.float32
    assert batch["y"].shape == (4, 3)
    assert batch["name"] == ["a"] * 4


def test_defaults(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "rescale_data")
    loader = rd.DataLoader(ROWS, global_batch_size=8, micro_batch_size=4, dp_rank=1, dp_world_size=2)
    assert loader._stream.layout.num_logical_shards == 32
    assert loader.gradient_accumulation_steps == 1
    assert len(next(iter(loader))["row"]) == 4
    rd.DataLoader(ROWS, global_batch_size=8)
    assert [record.message for record in caplog.records].count(
        "num_logical_shards=32 (by default), fixed from here on for the whole run: name it if the global batch may change."
    ) == 1, "said once, by dp rank 0"


def test_pad_collate() -> None:
    ragged = [{"id": i, "tokens": np.arange(i % 5), "labels": torch.ones(i % 5)} for i in range(48)]
    for batch in loader_of(ragged, collate_fn=rd.pad_collate(pad={"tokens": 9, "labels": -1})):
        lengths = (batch["id"] % 5).tolist()
        assert batch["tokens"].shape == batch["labels"].shape == (4, max(lengths))
        for tokens, labels, length in zip(batch["tokens"].tolist(), batch["labels"].tolist(), lengths, strict=True):
            assert tokens == list(range(length)) + [9] * (max(lengths) - length)
            assert labels == [1.0] * length + [-1.0] * (max(lengths) - length)


@pytest.mark.parametrize("empty", [[], (), np.zeros(0), torch.zeros(0)])
def test_pad_collate_keeps_the_dtype_of_what_is_not_empty(empty: Any) -> None:
    large = 2**53 + 1
    for values in ([empty, [large, 3]], [[large, 3], empty]):
        padded = rd.pad_collate({"x": -1})([{"x": value} for value in values])["x"]
        assert padded.dtype == torch.int64
        assert sorted(padded.tolist()) == [[-1, -1], [large, 3]]
    mixed = rd.pad_collate({"x": 0})([{"x": [1]}, {"x": [0.5, 2.0]}])["x"]
    assert mixed.tolist() == [[1.0, 0.0], [0.5, 2.0]]
    assert rd.pad_collate({"x": 0})([{"x": []}])["x"].dtype == torch.int64, "of nothing else, that of the padding"
    assert rd.pad_collate({"x": 0.0})([{"x": []}])["x"].dtype == torch.float32


@pytest.mark.parametrize(
    ("pad", "values"), [(0.5, [1, 2]), (float("nan"), [1]), (300, np.zeros(2, np.uint8)), (-100, [True])]
)
def test_pad_collate_with_what_the_column_cannot_hold(pad: float, values: Any) -> None:
    with pytest.raises(ValueError, match=rf"pad={pad} for the column 'x', whose values are torch\.\w+: give a number"):
        rd.pad_collate({"x": pad})([{"x": values}, {"x": values[:1]}])
    assert rd.pad_collate({"x": 1.0})([{"x": values}])["x"].tolist() == [list(values)]


# Errors and iterators


def test_an_error_that_passes_leaves_no_node_of_torchdata_broken() -> None:
    """An `Unbatcher` reads where it is reset, and a `Mapper` above whose reset has failed cannot be reset again."""
    data = Rows(48)

    def loader() -> rd.DataLoader:
        def pipeline(shard: rd.Shard) -> Any:
            pairs = Unbatcher(Batcher(rd.Reader(data, shard), 2))
            return Unbatcher(Mapper(pairs, lambda row: [row, row]))

        return loader_of(pipeline, num_logical_shards=12, repeat=True)

    whole, resumed = loader(), loader()
    take(whole, 3)
    resumed.load_state_dict(whole.state_dict())
    data.broken = {*range(48)}
    for _ in range(2):
        with pytest.raises(OSError, match="cannot read row"):
            next(iter(resumed))
    data.broken = set()
    assert take(resumed, 9) == take(whole, 9)


def test_an_iterator_goes_on_after_a_peek_and_a_skip_and_is_invalid_after_what_begins_elsewhere() -> None:
    loader = loader_of()
    batches = iter(loader)
    first = next(batches)
    loader.peek()
    loader.skip(8)
    assert rows_of([first, next(batches)]) == [EPOCH[0], EPOCH[3]]
    for disturb in (iter, rd.DataLoader.reset, lambda loader: loader.load_state_dict(loader_of().state_dict())):
        old = iter(loader)
        next(old)
        disturb(loader)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"no longer valid.*Use the newest"):
                next(old)
        next(iter(loader))


def test_a_thread_within_next_keeps_the_others_out() -> None:
    """Two at once read the same rows and wrote one table, and the error blamed the pipeline."""
    asked, may_answer = threading.Event(), threading.Event()

    def slow(row: int) -> int:
        asked.set()
        assert may_answer.wait(60)
        return row

    source = rd.DatasetSource(range(48), name="numbers")
    loader = rd.DataLoader(lambda shard: rd.Map(rd.Reader(source, shard), slow), global_batch_size=12)
    batches, first = iter(loader), list[torch.Tensor]()
    other = threading.Thread(target=lambda: first.append(next(batches)))
    other.start()
    assert asked.wait(60)
    with pytest.raises(RuntimeError, match="Another thread, or a call around this one, is within next"):
        next(batches)
    may_answer.set()
    other.join()
    assert sorted(torch.cat([*first, *batches]).tolist()) == list(range(48))


@pytest.mark.parametrize("prefetch", [0, 3])
def test_a_function_that_calls_next_is_kept_out_and_harms_nothing(prefetch: int) -> None:
    """Also while a thread reads ahead, and the trainer is not within ``next``: it would miss the batch that is taken."""
    batches, calls, has_called = list[Any](), itertools.count(), threading.Event()

    def nested(row: int) -> int:
        if next(calls) >= 12:  # the first batch is ready
            with pytest.raises(RuntimeError, match="or a call around this one, is within next"):
                next(batches[0])
            has_called.set()
        return row

    pipeline = rd.DatasetSource(range(48), name="numbers")
    with rd.DataLoader(
        lambda shard: rd.Map(rd.Reader(pipeline, shard), nested), global_batch_size=12, prefetch=prefetch
    ) as loader:
        batches.append(iter(loader))
        loader.start()
        assert not prefetch or has_called.wait(60)
        assert sorted(torch.cat([*batches[0]]).tolist()) == list(range(48))


def test_a_time_that_ctrl_c_has_left_keeps_no_thread_out() -> None:
    """It can come between the assignment of the time and the block that takes it back."""
    loader, taken = loader_of(), list[torch.Tensor]()
    batches = iter(loader)
    next(batches)
    loader._watch.start_time, loader._watch.thread_id = 0.0, threading.get_ident()
    thread = threading.Thread(target=lambda: taken.append(next(batches)))
    thread.start()
    thread.join()
    assert rows_of(taken) == [EPOCH[1]]


def test_a_state_taken_beside_another_thread_warns(caplog: pytest.LogCaptureFixture) -> None:
    loader = loader_of()
    batches = iter(loader)
    next(batches)
    with caplog.at_level(logging.WARNING):
        loader.state_dict()
        assert not caplog.records
        thread = threading.Thread(target=lambda: next(batches))
        thread.start()
        thread.join()
        loader.state_dict()
        loader.state_dict()
        assert ["prefetch=" in record.getMessage() for record in caplog.records] == [True, True]
        loader.load_state_dict(loader.state_dict())
        caplog.clear()
        loader.state_dict()
        assert not caplog.records, "after a load nobody has taken anything"


def test_a_loader_that_nobody_uses_is_gone_at_once() -> None:
    """What it has cached goes with it: without cycles that only the garbage collector would find."""
    loader = rd.DataLoader(list(range(8)), global_batch_size=2)
    next(iter(loader))
    alive = weakref.ref(loader._stream)
    gc.disable()
    try:
        del loader
        assert alive() is None
    finally:
        gc.enable()


# Where the run stands


@pytest.mark.parametrize(("tail", "whole"), [("drop", 24), ("pad", 27)])
def test_len_is_that_of_the_epoch_and_batches_left_what_is_left_of_it(tail: str, whole: int) -> None:
    loader = loader_of(lambda shard: Mapper(rd.Reader(ROWS, shard), dict), tail=tail)
    for _ in range(2):
        seen = [(len(loader), loader.batches_left), *((len(loader), loader.batches_left) for _ in loader)]
        assert seen == [(whole, left) for left in range(whole, -1, -1)]
        assert loader


@pytest.mark.parametrize("num_rows", [45, 53, 22])
@pytest.mark.parametrize(("before", "after"), [("pad", "drop"), ("drop", "pad")])
def test_another_tail_than_was_saved(before: str, after: str, num_rows: int) -> None:
    """From each micro batch of the epoch on, and of a last step that is half delivered."""

    def loader(tail: str) -> rd.DataLoader:
        return loader_of(Rows(num_rows), global_batch_size=8, micro_batch_size=2, num_logical_shards=8, tail=tail)

    def real(batch: dict[str, Any]) -> list[int]:
        return batch["row"][batch.get("valid", slice(None))].tolist()

    saved = loader(before)
    seen: list[int] = []
    whole = list(loader(before))
    assert len(whole) == (num_rows // 8 + (before == "pad")) * 4
    for batch in [*whole, None]:
        first = loader(after)
        first.load_state_dict(saved.state_dict())
        assert first.batches_left == 0 or first.peek() is not None
        delivered = [*seen, *(row for batch in first for row in real(batch))]
        assert len(set(delivered)) == len(delivered) == num_rows - first.progress()["dropped_samples"]
        assert opened(first.state_dict())["shards"]["samples"].sum() == len(delivered)
        assert len({row for batch in first for row in real(batch)}) >= num_rows // 8 * 8
        if batch is not None:
            seen += real(next(iter(saved)))


def test_progress() -> None:
    loaders = [loader_of(dp_rank=rank, dp_world_size=3) for rank in range(3)]
    for loader in loaders:
        take(loader, 2)
    keys = {
        "global_samples", "global_step", "wait_seconds", "filtered_rows", "skipped_rows", "dropped_samples",
        "padded_samples", "rows/Rows", "epoch_min/Rows", "epoch_max/Rows", "wait_p50_seconds", "wait_p99_seconds",
        "batches_ready", "read_bytes", "read_seconds", "transform_seconds", "requests", "request_bytes", "retries",
    }  # fmt: skip
    found = [loader.progress() for loader in loaders]
    assert all(progress.keys() == keys for progress in found)
    assert all(type(value) is float for progress in found for value in progress.values())
    assert {progress["global_samples"] for progress in found} == {24.0}
    assert {progress["global_step"] for progress in found} == {2.0}
    assert [progress["rows/Rows"] for progress in found] == [8.0, 8.0, 8.0]
    assert all(progress["wait_seconds"] > 0 for progress in found)


def test_start_makes_the_first_batch_and_changes_nothing() -> None:
    data = Rows(100)
    loader = loader_of(data)
    before = loader.state_dict()
    loader.start()
    assert data.num_read == 4
    assert same_state(before, loader.state_dict())
    assert rows_of(loader) == EPOCH


def test_a_state_is_copied_out_and_in() -> None:
    loader, other = loader_of(), loader_of()
    states = [loader.state_dict() for _ in zip(range(4), loader, strict=False)]
    other.load_state_dict(states[-1])
    states[-1]["table"].fill_(77)
    assert rows_of(loader) == rows_of(other) == EPOCH[4:]
    loader.load_state_dict(states[0])
    assert rows_of(loader) == EPOCH[1:]
