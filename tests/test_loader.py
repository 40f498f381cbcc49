"""The surface of `DataLoader`, one behaviour a test."""

import collections
import gc
import itertools
import logging
import pickle
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torchdata.nodes import Batcher, IterableWrapper, Loader, Mapper, Prefetcher, Unbatcher

import rescale_data as rd
from rescale_data.engine.states.codec import has_remainder
from rescale_data.testing import assert_rescalable, full_state_dict
from tests.pipelines import Rows, data_for, pipeline_of, rows, tagged
from tests.simulate import same_state
from tests.states import closed, opened

ROWS = Rows(100)
MakeLoader = Callable[..., rd.DataLoader]


def loader_of(data: Any = ROWS, **kwargs: Any) -> rd.DataLoader:
    """O = 12, b = 4, so A = 3; N = 24."""
    given = {"global_batch_size": 12, "micro_batch_size": 4, "num_logical_shards": 24, "seed": 5}
    return rd.DataLoader(data, **{**given, **kwargs})


def packed_loader(**kwargs: Any) -> rd.DataLoader:
    pipeline = pipeline_of("packed", data_for("packed", 100))
    return loader_of(pipeline, **kwargs)


def rows_of(batches: Any) -> list[list[int]]:
    return [batch["row"].tolist() for batch in batches]


def take(loader: rd.DataLoader, num: int) -> list[list[int]]:
    return rows_of(itertools.islice(iter(loader), num))


EPOCH = rows_of(loader_of())  # 24 micro batches: 8 steps of 12; 4 of 100 rows are left


AHEAD: dict[str, dict[str, int]] = {"none": {}, "a thread": {"prefetch": 2}, "workers": {"num_workers": 2}}


@pytest.mark.parametrize(("n", "o", "b"), [(8, 4, 2), (4, 8, 1), (4, 8, 4), (6, 4, 2)])
def test_a_state_is_the_same_where_samples_are_written_in_place(n: int, o: int, b: int) -> None:
    """Rows of turns that come again are counted and written when somebody looks; those of collated samples at once."""
    sizes = {"global_batch_size": o, "micro_batch_size": b, "num_logical_shards": n}
    source = rd.SyntheticSource(100, length=9)

    def pipeline(shard: rd.Shard) -> rd.BaseNode[Any]:
        return rd.TokenPacker(rd.Reader(source, shard), column="tokens", seq_len=8, eos_id=2)

    in_place, collated = (rd.DataLoader(pipeline, **sizes, repeat=True, **how) for how in ({}, {"collate_fn": list}))
    for number, *_ in zip(range(24), in_place, collated, strict=False):
        if number % 7 < 3:
            assert same_state(in_place.state_dict(), collated.state_dict())


class TestIteration:
    @pytest.mark.parametrize("how", AHEAD)
    def test_a_default_device_of_the_trainer_changes_neither_batches_nor_state(self, how: str) -> None:
        def run() -> tuple[list[Any], Any, list[Any]]:
            loader = loader_of(rows_pipeline, tail="pad", **AHEAD[how])
            seen = list(itertools.islice(iter(loader), 5))
            state = loader.state_dict()
            other = loader_of(rows_pipeline, tail="pad", **AHEAD[how])
            other.load_state_dict(state)
            rest = list(other)
            loader.close(), other.close()
            return seen, state, rest

        seen, state, rest = run()
        with torch.device("meta"):
            seen_there, state_there, rest_there = run()
        for batch, there in zip([*seen, *rest], [*seen_there, *rest_there], strict=True):
            assert all(torch.equal(batch[key], there[key]) for key in ("row", "valid"))
        assert same_state(state, state_there)

    def test_a_batch_is_a_dict_of_tensors(self) -> None:
        batch = next(iter(loader_of([{"x": i, "y": np.arange(3, dtype=np.float32), "name": "a"} for i in range(48)])))
        assert batch["x"].dtype == torch.int64
        assert batch["y"].dtype == torch.float32
        assert batch["y"].shape == (4, 3)
        assert batch["name"] == ["a"] * 4

    def test_iter_ends_with_the_epoch_and_then_goes_on_with_the_next(self) -> None:
        loader = loader_of()
        epochs = [rows_of(loader) for _ in range(3)]
        assert [len(epoch) for epoch in epochs] == [24, 24, 24]
        assert epochs[0] == EPOCH
        assert len({str(epoch) for epoch in epochs}) == 3
        assert loader.epoch == 3

    def test_repeat_never_ends(self) -> None:
        loader = loader_of(repeat=True)
        assert len(take(loader, 100)) == 100
        assert loader.epoch == 0
        assert loader.progress()["epoch_min/Rows"] == 3.0

    def test_a_row_is_a_sample_of_a_dataset_of_numbers(self) -> None:
        found = [row for batch in loader_of(list(range(50, 98))) for row in batch.tolist()]
        assert sorted(found) == list(range(50, 98))

    def test_seeds_give_other_orders_of_the_same_rows(self) -> None:
        one, other = rows_of(loader_of(seed=0)), rows_of(loader_of(seed=1))
        assert one != other
        assert sorted(map(len, one)) == sorted(map(len, other))

    def test_ints_of_numpy_are_ints(self) -> None:
        counts = {"global_batch_size": 12, "micro_batch_size": 4, "num_logical_shards": 24, "seed": 5}
        counts |= {"dp_rank": 0, "dp_world_size": 1, "num_workers": 0}
        loader, expected = loader_of(**{name: np.int8(count) for name, count in counts.items()}), loader_of(**counts)
        loader.skip(np.uint8(24))
        loader.set_epoch(np.int16(0))
        expected.skip(24)
        assert str(loader.state_dict()) == str(expected.state_dict())
        assert b"numpy" not in pickle.dumps(
            {key: value for key, value in loader.state_dict().items() if key != "shards"}
        )
        assert rows_of(loader) == rows_of(expected)

    def test_defaults(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, "rescale_data")
        loader = rd.DataLoader(ROWS, global_batch_size=8, micro_batch_size=4, dp_rank=1, dp_world_size=2)
        assert loader._stream.layout.num_logical_shards == 32
        assert loader.gradient_accumulation_steps == 1
        assert len(next(iter(loader))["row"]) == 4
        rd.DataLoader(ROWS, global_batch_size=8)
        assert [record.message for record in caplog.records].count(
            "num_logical_shards=32 (by default), fixed from here on for the whole run: name it if the global batch "
            "may change."
        ) == 1, "said once, by dp rank 0"

    @pytest.mark.parametrize(
        "disturb",
        [
            pytest.param(iter, id="a newer iterator"),
            pytest.param(rd.DataLoader.reset, id="reset"),
            pytest.param(lambda loader: loader.load_state_dict(loader_of().state_dict()), id="a load"),
        ],
    )
    def test_an_iterator_is_invalid_after(self, disturb: Callable[[rd.DataLoader], Any]) -> None:
        loader = loader_of()
        old = iter(loader)
        next(old)
        disturb(loader)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"no longer valid.*Use the newest"):
                next(old)
        next(iter(loader))

    def test_an_error_of_the_pipeline_says_where_and_can_be_gone_past(self) -> None:
        data = Fragile(48, broken={7})
        loader, found = loader_of(data), []
        with pytest.raises(OSError, match="cannot read row 7") as raised:
            collections.deque(map(found.append, loader))
        assert any("in the pipeline of logical shard" in note for note in raised.value.__notes__)
        assert opened(loader.state_dict())["samples"] == len(found) * 4
        data.broken = set()
        assert rows_of(found) + rows_of(loader) == rows_of(loader_of(Fragile(48, broken=set())))

    @pytest.mark.parametrize("row", range(0, 48, 5))
    def test_an_error_that_passes_loses_nothing_where_an_epoch_is_read_to_find_its_end(self, row: int) -> None:
        """Whichever row it is, also one that is read ahead of the batch, or by which the end was to be found."""

        def kept(data: Rows) -> rd.DataLoader:
            return loader_of(lambda shard: rd.Filter(rd.Reader(data, shard), lambda sample: sample["row"] % 4))

        data = Fragile(48, broken={row})
        loader, found, failed = kept(data), [], 0
        while loader.epoch == 0:
            try:
                collections.deque(map(found.append, loader))
            except OSError:
                failed, data.broken = failed + 1, set()
        assert failed == 1
        assert rows_of(found) == rows_of(kept(Fragile(48, broken=set())))

    def test_an_error_that_passes_leaves_no_node_of_torchdata_broken(self) -> None:
        """An `Unbatcher` reads where it is reset, and a `Mapper` above whose reset has failed cannot be reset again."""
        data = Fragile(48, broken=set())

        def loader() -> rd.DataLoader:
            def pipeline(shard: rd.Shard) -> Any:
                pairs = Unbatcher(Batcher(rd.Reader(data, shard), 2))
                return Unbatcher(Mapper(pairs, lambda row: [row, row]))

            return loader_of(pipeline, num_logical_shards=12, repeat=True)

        batches = itertools.islice(whole := loader(), 3)
        collections.deque(batches, 0)
        resumed = loader()
        resumed.load_state_dict(whole.state_dict())
        data.broken = {*range(48)}
        for _ in range(2):
            with pytest.raises(OSError, match="cannot read row"):
                next(iter(resumed))
        data.broken = set()
        assert rows_of(itertools.islice(resumed, 9)) == rows_of(itertools.islice(whole, 9))


class Fragile(Rows):
    def __init__(self, num_rows: int, broken: set[int]) -> None:
        super().__init__(num_rows)
        self.broken = broken

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index in self.broken:
            raise OSError(f"cannot read row {index}")
        return super().__getitem__(index)


class TestWhereTheRunStands:
    def test_step_counts_whole_global_batches_over_all_epochs(self) -> None:
        loader = loader_of()
        steps = []
        for _ in range(2):
            for _batch in loader:
                steps.append(loader.step)
        assert steps == [(i + 1) // 3 for i in range(48)]

    def test_step_goes_on_where_the_global_batch_changes(self) -> None:
        loader = loader_of(repeat=True)
        take(loader, 7)  # two steps of 12, and 4 samples
        other = loader_of(repeat=True, global_batch_size=24)
        other.load_state_dict(loader.state_dict())
        assert other.step == 2
        take(other, 6)
        assert other.step == 3

    def test_len_is_that_of_the_epoch_and_batches_left_what_is_left_of_it(self) -> None:
        for tail in ("drop", "pad"):
            loader = loader_of(tail=tail)
            whole = 24 if tail == "drop" else 27
            for _ in range(2):
                seen = [(len(loader), loader.batches_left), *((len(loader), loader.batches_left) for _ in loader)]
                assert seen == [(whole, left) for left in range(whole, -1, -1)]
                assert loader

    @pytest.mark.parametrize(
        ("make", "why"), [(lambda: loader_of(repeat=True), "repeat=True"), (packed_loader, "only reading tells")]
    )
    def test_len_where_it_cannot_be_known(self, make: MakeLoader, why: str) -> None:
        with pytest.raises(TypeError, match=why):
            len(make())

    def test_last_batch_samples(self) -> None:
        loader = loader_of(tail="pad")
        assert loader.last_batch_samples == 0
        real = [(loader.last_batch_samples, batch["valid"].sum().item()) for batch in loader]
        assert real == [(4, 4)] * 25 + [(0, 0)] * 2

    def test_padding_is_real_rows_and_marked(self) -> None:
        loader = loader_of(tail="pad")
        batches = list(loader)
        assert {batch["valid"].dtype for batch in batches} == {torch.bool}
        real = [row for batch in batches for row in batch["row"][batch["valid"]].tolist()]
        assert sorted(real) == list(range(100))
        assert all(0 <= row < 100 for batch in batches for row in batch["row"].tolist())
        assert loader.progress()["padded_samples"] == 8.0
        assert loader.progress()["dropped_samples"] == 0.0

    def test_the_rest_that_is_dropped_is_counted_and_logged(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, "rescale_data")
        loader = loader_of()
        for epoch in range(2):
            assert len(list(loader)) == 24
            assert loader.progress()["dropped_samples"] == 4.0 * (epoch + 1)
        loader.reset()
        assert loader.progress()["dropped_samples"] == 0.0
        assert "Epoch 0 ended with less than a global batch of 12 samples: 4 dropped" in caplog.text

    @pytest.mark.parametrize("num_rows", [45, 53, 22])
    @pytest.mark.parametrize(("before", "after"), [("pad", "drop"), ("drop", "pad")])
    def test_another_tail_than_was_saved(self, before: str, after: str, num_rows: int) -> None:
        """From each micro batch of the epoch on, and of a last step that is half delivered."""

        def loader(tail: str) -> rd.DataLoader:
            return loader_of(Rows(num_rows), global_batch_size=8, micro_batch_size=2, num_logical_shards=8, tail=tail)

        def real(batch: dict[str, Any]) -> list[int]:
            return batch["row"][batch["valid"]].tolist() if "valid" in batch else batch["row"].tolist()

        saved = loader(before)
        batches, seen, num = iter(saved), [], 0
        while True:
            first = loader(after)
            first.load_state_dict(saved.state_dict())
            assert first.batches_left == 0 or first.peek() is not None
            delivered = [*seen, *(row for batch in first for row in real(batch))]
            dropped = first.progress()["dropped_samples"]
            assert len(set(delivered)) == len(delivered) == num_rows - dropped
            assert opened(first.state_dict())["shards"]["samples"].sum() == len(delivered)
            assert len({row for batch in first for row in real(batch)}) >= num_rows // 8 * 8
            batch = next(batches, None)
            if batch is None:
                break
            seen += real(batch)
            num += 1
        assert num == (num_rows // 8 + (before == "pad")) * 4

    def test_progress(self) -> None:
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

    def test_progress_of_a_packer_counts_tokens(self) -> None:
        loader = packed_loader(repeat=True)
        batches = iter(loader)
        for _ in range(3):
            next(batches)
        assert loader.progress()["tokens/Documents"] == 3 * 4 * 5
        assert loader.progress()["rows/Documents"] > 0


class TestPeek:
    @pytest.mark.parametrize("make", [loader_of, packed_loader])
    def test_shows_the_next_batch_and_changes_nothing(self, make: MakeLoader) -> None:
        loader, other = make(), make()
        for expected in other:
            before = loader.state_dict()
            shown = [loader.peek(), loader.peek()]
            assert same_state(before, loader.state_dict())
            taken = next(iter(loader))
            for batch in (*shown, taken):
                assert all(torch.equal(batch[key], expected[key]) for key in expected)

    def test_past_the_end_of_an_epoch_shows_the_next_one(self) -> None:
        loader, other = loader_of(), loader_of()
        list(loader), list(other)
        assert loader.peek()["row"].tolist() == next(iter(other))["row"].tolist()
        assert rows_of(loader)[1:] == rows_of(other)

    def test_does_not_invalidate_the_iterator(self) -> None:
        loader = loader_of()
        batches = iter(loader)
        found = [next(batches), loader.peek(), next(batches)]
        assert rows_of(found) == [EPOCH[0], EPOCH[1], EPOCH[1]]

    def test_start_makes_the_first_batch_and_changes_nothing(self) -> None:
        data = Rows(100)
        loader = loader_of(data)
        before = loader.state_dict()
        loader.start()
        assert data.num_read == 4
        assert same_state(before, loader.state_dict())
        assert rows_of(loader) == EPOCH


class TestSkip:
    def test_reads_nothing_where_counts_are_known(self) -> None:
        data = Rows(100_000)
        loader = loader_of(data, repeat=True)
        loader.skip(12 * 50_000)
        assert data.num_read == 0
        assert loader.step == 50_000
        take(loader, 1)
        assert data.num_read == 4

    @pytest.mark.parametrize("num_samples", [-4, 3, 5])
    def test_of_no_whole_micro_batches(self, num_samples: int) -> None:
        with pytest.raises(ValueError, match=rf"num_samples={num_samples}\): give a multiple of .* = 4"):
            loader_of().skip(num_samples)

    def test_invalidates_no_iterator(self) -> None:
        loader = loader_of()
        batches = iter(loader)
        next(batches)
        loader.skip(8)
        assert next(batches)["row"].tolist() == EPOCH[3]


class TestResetAndClose:
    def test_reset_begins_again(self) -> None:
        loader = loader_of()
        take(loader, 30)
        loader.reset()
        assert (loader.step, loader.epoch) == (0, 0)
        assert same_state(loader.state_dict(), loader_of().state_dict())
        assert rows_of(loader) == EPOCH

    def test_close_keeps_the_position(self) -> None:
        loader = loader_of()
        found = take(loader, 5)
        loader.peek()
        state = loader.state_dict()
        loader.close()
        loader.close()
        assert same_state(state, loader.state_dict())
        assert found + rows_of(loader) == EPOCH

    def test_with_closes(self) -> None:
        with loader_of() as loader:
            found = take(loader, 7)
        assert found + rows_of(loader) == EPOCH


class TestWhoElseTakesItsBatches:
    def test_a_state_taken_beside_another_thread_warns(self, caplog: pytest.LogCaptureFixture) -> None:
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


class TestState:
    def test_is_a_copy(self) -> None:
        loader = loader_of()
        states = []
        for i, _ in enumerate(loader):
            states.append(loader.state_dict())
            if i == 3:
                break
        assert [opened(state)["samples"] for state in states] == [4, 8, 12, 16]
        assert [opened(state)["shards"]["samples"].sum().item() for state in states] == [4, 8, 12, 16]
        states[-1]["table"].fill_(77)
        assert rows_of(loader) == EPOCH[4:]

    def test_is_copied_in(self) -> None:
        loader, other = loader_of(), loader_of()
        take(loader, 4)
        state = loader.state_dict()
        other.load_state_dict(state)
        state["table"].fill_(77)
        assert rows_of(other) == EPOCH[4:]

    def test_after_the_last_batch_is_the_end_of_the_epoch(self) -> None:
        loader = loader_of()
        batches = iter(loader)
        for _ in range(24):
            next(batches)
        other = loader_of()
        other.load_state_dict(loader.state_dict())
        assert (other.epoch, other.batches_left, list(other), other.epoch) == (0, 0, [], 1)
        assert next(batches, None) is None
        assert rows_of(other) == rows_of(loader)

    def test_loads_while_it_iterates(self) -> None:
        loader = loader_of()
        states = [loader.state_dict()]
        for _ in loader:
            states.append(loader.state_dict())
        for num in (20, 3, 0, 24, 11):
            loader.load_state_dict(states[num])
            assert rows_of(loader) == EPOCH[num:]

    def test_local_state_dict_is_the_same_on_one_rank(self) -> None:
        loader = loader_of()
        take(loader, 3)
        assert same_state(loader.state_dict(), rd.whole_state(loader.local_state_dict()))

    @pytest.mark.parametrize(
        "spoil",
        [
            lambda state: state.pop("table"),
            lambda state: state.update(header="{}"),
            lambda state: state.update(header="no JSON"),
            lambda state: state.update(header=None),
            *(
                lambda state, wrong=wrong: state.update(closed({**opened(state), **wrong}))
                for wrong in (
                    {"version": 99},
                    {"seed": 1},
                    {"samples": -1},
                    {"global_batch_size": 0},
                    {"columns": []},
                    {"columns": [{"name": 3}]},
                    {"pipeline": None},
                    {"skipped": [[3]]},
                )
            ),
            lambda state: state["table"][:, 0].fill_(3),
            lambda state: state.update(table=torch.zeros(24, 6)),
            lambda state: state.update(table=torch.zeros(23, 6, dtype=torch.int64)),
            lambda state: state.update(table=torch.zeros(24, dtype=torch.int64)),
            lambda state: state.update(table=[0] * 24),
            *(
                lambda state, field=field, value=value: opened(state)["shards"][field][5:6].fill_(value)
                for field, value in (("row", -5), ("row", 10**6), ("epoch", -1), ("samples", -1))
            ),
        ],
    )
    def test_a_bad_one_changes_nothing(self, spoil: Callable[[dict[str, Any]], Any]) -> None:
        loader = loader_of()
        batches = iter(loader)
        next(batches)
        before = loader.state_dict()
        bad = loader_of().state_dict()
        spoil(bad)
        with pytest.raises(rd.DataStateError):
            loader.load_state_dict(bad)
        assert same_state(before, loader.state_dict())
        assert next(batches)["row"].tolist() == EPOCH[1]

    def test_of_simulated_ranks(self) -> None:
        loaders = [loader_of(dp_rank=rank, dp_world_size=3) for rank in range(3)]
        for method in (rd.DataLoader.state_dict, rd.DataLoader.local_state_dict):
            with pytest.raises(ValueError, match=r"rescale_data\.testing\.full_state_dict\(loaders\)"):
                method(loaders[0])
        with pytest.raises(ValueError, match=r"dp ranks \[0, 1\]; give one of each of 3 ranks"):
            full_state_dict(loaders[:2])
        take(loaders[0], 1)
        with pytest.raises(ValueError, match="stand at different batches"):
            full_state_dict(loaders)
        take(loaders[1], 1), take(loaders[2], 1)
        assert opened(full_state_dict(loaders[::-1]))["samples"] == 12


class TestCollate:
    def test_your_own(self) -> None:
        batch = next(iter(loader_of(collate_fn=lambda samples: [sample["row"] for sample in samples])))
        assert batch == EPOCH[0]

    @pytest.mark.parametrize("sample", [None, object()])
    def test_samples_that_are_no_numbers(self, sample: Any) -> None:
        with pytest.raises(ValueError, match=r"The samples cannot be stacked .* your own collate_fn"):
            next(iter(loader_of([sample] * 48)))

    def test_ragged_samples_name_the_column_and_the_cures(self) -> None:
        ragged = [{"id": i, "tokens": np.arange(i % 5)} for i in range(48)]
        with pytest.raises(
            ValueError, match=r"The column 'tokens' cannot be stacked.*shapes \[\(\d,\).*pad_collate.*TokenPacker"
        ):
            list(loader_of(ragged))

    def test_pad_collate(self) -> None:
        ragged = [{"id": i, "tokens": np.arange(i % 5), "labels": torch.ones(i % 5)} for i in range(48)]
        loader = loader_of(ragged, collate_fn=rd.pad_collate(pad={"tokens": 9, "labels": -1}))
        for batch in loader:
            lengths = (batch["id"] % 5).tolist()
            assert batch["tokens"].shape == batch["labels"].shape == (4, max(lengths))
            for tokens, labels, length in zip(batch["tokens"].tolist(), batch["labels"].tolist(), lengths, strict=True):
                assert tokens == list(range(length)) + [9] * (max(lengths) - length)
                assert labels == [1.0] * length + [-1.0] * (max(lengths) - length)

    def test_pad_collate_of_a_column_that_is_not_there(self) -> None:
        with pytest.raises(ValueError, match=r"the columns \['labels'\], which samples lack; they have \['row'\]"):
            list(loader_of(collate_fn=rd.pad_collate(pad={"labels": 0})))

    @pytest.mark.parametrize("empty", [[], (), np.zeros(0), torch.zeros(0)])
    def test_pad_collate_keeps_the_dtype_of_what_is_not_empty(self, empty: Any) -> None:
        large = 2**53 + 1
        for values in ([empty, [large, 3]], [[large, 3], empty]):
            padded = rd.pad_collate({"x": -1})([{"x": value} for value in values])["x"]
            assert padded.dtype == torch.int64
            assert sorted(padded.tolist()) == [[-1, -1], [large, 3]]
        mixed = rd.pad_collate({"x": 0})([{"x": [1]}, {"x": [0.5, 2.0]}])["x"]
        assert mixed.tolist() == [[1.0, 0.0], [0.5, 2.0]]

    def test_pad_collate_of_nothing_but_empty_lists_has_the_dtype_of_the_padding(self) -> None:
        assert rd.pad_collate({"x": 0})([{"x": []}])["x"].dtype == torch.int64
        assert rd.pad_collate({"x": 0.0})([{"x": []}])["x"].dtype == torch.float32

    @pytest.mark.parametrize(
        ("pad", "values"), [(0.5, [1, 2]), (float("nan"), [1]), (300, np.zeros(2, np.uint8)), (-100, [True])]
    )
    def test_pad_collate_with_what_the_column_cannot_hold(self, pad: float, values: Any) -> None:
        with pytest.raises(
            ValueError, match=rf"pad={pad} for the column 'x', whose values are torch\.\w+: give a number"
        ):
            rd.pad_collate({"x": pad})([{"x": values}, {"x": values[:1]}])
        assert rd.pad_collate({"x": 1.0})([{"x": values}])["x"].tolist() == [list(values)]

    def test_a_batch_that_cannot_be_handed_over_has_not_been_delivered(self) -> None:
        loader = loader_of(tail="pad", collate_fn=lambda samples: {"valid": samples})
        for _ in range(3):
            with pytest.raises(ValueError, match="tail='pad'"):
                next(iter(loader))
        assert opened(loader.state_dict())["samples"] == 0


def to_float(sample: dict[str, Any]) -> dict[str, Any]:
    return {"x": torch.tensor([sample["row"] / 2]), "row": sample["row"]}


class TestTorchdata:
    """Pipelines of stock nodes, and this library under stock nodes."""

    def test_a_mapper_in_a_pipeline(self) -> None:
        """The whole of what a user writes: a function of one logical shard, made of any torchdata nodes."""
        source = rd.DatasetSource(ROWS)

        def pipeline(shard: rd.Shard) -> rd.BaseNode:
            rows = rd.Reader(source, shard, shuffle=True)
            return Mapper(rows, to_float)

        loader = loader_of(pipeline)
        assert len(loader) == 24, "a mapper keeps the count of its source"
        batch = next(iter(loader))
        assert batch["x"].tolist() == [[row / 2] for row in batch["row"].tolist()]
        state = loader.state_dict()

        resumed = loader_of(pipeline)
        resumed.load_state_dict(state)
        assert rows_of(resumed) == rows_of(loader)

    @pytest.mark.parametrize("repeat", [False, True])
    def test_a_stop_iteration_of_a_mapper_does_not_end_the_epoch(self, repeat: bool) -> None:
        def search(sample: dict[str, Any]) -> Any:
            return next(sample for _ in range(1) if sample["row"] != 5)

        with pytest.raises(RuntimeError, match="it raised StopIteration") as raised:
            collections.deque(
                itertools.islice(loader_of(lambda s: Mapper(rd.Reader(ROWS, s), search), repeat=repeat), 25)
            )
        assert any("in the function of Mapper, given Rows" in note for note in raised.value.__notes__)

    def test_a_pipeline_that_makes_no_use_of_its_shard_is_warned_of(self, caplog: pytest.LogCaptureFixture) -> None:
        loader = loader_of(lambda shard: IterableWrapper([{"row": i} for i in range(12)]))
        assert "each of the 24 logical shards yields all of the data" in caplog.text
        assert sum(len(batch["row"]) for batch in loader) == 24 * 12
        caplog.clear()
        loader_of(lambda shard: Mapper(rd.Reader(ROWS, shard), to_float))
        assert not caplog.text

    def test_a_batcher_in_a_pipeline(self) -> None:
        loader = loader_of(lambda shard: Batcher(rd.Reader(ROWS, shard), 2), repeat=True, collate_fn=list)
        batch = next(iter(loader))
        assert [len(sample) for sample in batch] == [2] * 4
        own = ["_ended", "epoch", "row", "skipped"]
        expected = ["begun", "remainder", "samples", *(f"source.{name}" for name in own), "stamp"]
        assert sorted(opened(loader.state_dict())["shards"]) == expected

    def test_steps_are_counted_anew_in_each_epoch(self) -> None:
        loader = loader_of(Rows(115))
        list(loader)
        state = loader.state_dict()
        counts = opened(state)
        assert [counts[name] for name in ("samples", "origin", "step", "epoch")] == [108, 108, 9, 1]

    def test_an_endless_run_goes_on_from_the_remainder_of_an_epoch(self) -> None:
        """Saved before the first batch of the remainder, where the clock alone does not show that there is one."""
        data = Rows(115)

        def pipeline(shard: rd.Shard) -> rd.BaseNode[Any]:
            return tagged(rd.Reader(data, shard, shuffle=False), shard)  # a shard has the same rows in each epoch

        loader, drawn = loader_of(pipeline), collections.Counter[tuple[int, int]]()

        def draw(batch: Any) -> None:
            drawn.update(zip(batch["shard"].tolist(), batch["row"].tolist(), strict=True))

        for batch in loader:
            draw(batch)
            if has_remainder(loader._stream.table):
                break
        state = loader.state_dict()
        assert (opened(state)["shards"]["remainder"] >= 0).all()
        assert opened(state)["origin"] == opened(state)["samples"] == drawn.total()
        endless = loader_of(pipeline, repeat=True)
        endless.load_state_dict(state)
        assert (opened(endless.state_dict())["shards"]["remainder"] == -1).all()
        for batch in itertools.islice(endless, 60):
            draw(batch)
        assert len(drawn) == 115
        for shard in range(24):
            counts = [count for (of, _), count in drawn.items() if of == shard]
            assert max(counts) - min(counts) <= 1

    def test_a_node_that_shows_its_shard(self) -> None:
        """What the state says of the pipeline is the same whichever shards a rank owns."""

        class Shown(Batcher[Any]):
            def __init__(self, shard: rd.Shard) -> None:
                super().__init__(rd.Reader(ROWS, shard), 2)
                self.index = shard.index

        def make(rank: int, w: int) -> rd.DataLoader:
            return loader_of(
                Shown, repeat=True, collate_fn=list, dp_rank=rank, dp_world_size=w, micro_batch_size=12 // w
            )

        ranks = [make(rank, 3) for rank in range(3)]
        for loader in ranks:
            next(iter(loader))
        make(0, 1).load_state_dict(full_state_dict(ranks))

    def test_logical_shards_under_a_prefetcher_go_on_with_another_micro_batch(self) -> None:
        def make(b: int) -> Loader[Any]:
            shards = rd.LogicalShards(
                rows_pipeline, num_logical_shards=24, global_batch_size=12, micro_batch_size=b, repeat=False
            )
            return Loader(Prefetcher(shards, prefetch_factor=4))

        loader, resumed = make(4), make(12)
        batches = iter(loader)
        assert len(list(itertools.islice(batches, 3))) == 3
        resumed.load_state_dict(loader.state_dict())
        rest, others = ([sample["row"] for batch in part for sample in batch] for part in (batches, resumed))
        assert rest == others

    @pytest.mark.parametrize(
        "above", [lambda node: node, lambda node: Prefetcher(node, prefetch_factor=4, snapshot_frequency=3)]
    )
    @pytest.mark.parametrize("repeat", [False, True])
    def test_logical_shards_under_a_torchdata_loader(self, above: Callable[[Any], Any], repeat: bool) -> None:
        def make() -> Loader[Any]:
            shards = rd.LogicalShards(
                pipeline_of("rows", ROWS),
                num_logical_shards=24,
                global_batch_size=12,
                micro_batch_size=4,
                seed=5,
                repeat=repeat,
            )
            return Loader(above(shards))

        def rows_in(batches: Any) -> list[list[int]]:
            return [[sample["row"] for sample in batch] for batch in batches]

        whole = rows_in(itertools.islice(iter(make()), 24))
        assert whole == rows_of(itertools.islice(iter(loader_of(rows_pipeline, repeat=repeat)), 24))
        for num in (1, 5, 12, 23):
            loader = make()
            found = rows_in(itertools.islice(iter(loader), num))
            resumed = make()
            resumed.load_state_dict(loader.state_dict())
            assert found + rows_in(itertools.islice(iter(resumed), 24 - num)) == whole

    def test_logical_shards_of_simulated_ranks(self) -> None:
        def make(rank: int, w: int) -> rd.LogicalShards:
            return rd.LogicalShards(
                pipeline_of("rows", ROWS),
                num_logical_shards=24,
                global_batch_size=12,
                micro_batch_size=12 // w,
                dp_rank=rank,
                dp_world_size=w,
            )

        ranks = [make(rank, 3) for rank in range(3)]
        first = [sample for node in ranks for sample in next(node)]
        state = full_state_dict(ranks)
        alone, resumed = make(0, 1), make(0, 1)
        assert [sample["row"] for sample in first] == [sample["row"] for sample in next(alone)]
        resumed.reset(state)
        assert [s["row"] for s in next(resumed)] == [s["row"] for s in next(alone)]


def rows_pipeline(shard: rd.Shard) -> rd.BaseNode:
    return rows(ROWS, shard)


class TestAssertRescalable:
    def make(self, rank: int, w: int, b: int, k: int, **kwargs: Any) -> rd.DataLoader:
        pipeline = kwargs.pop("pipeline", rows_pipeline)
        return loader_of(
            pipeline, dp_rank=rank, dp_world_size=w, micro_batch_size=b, num_workers=k, repeat=True, **kwargs
        )

    def test_a_chain_of_nothing(self) -> None:
        with pytest.raises(ValueError, match="topologies is empty"):
            assert_rescalable(self.make, [])

    def test_finds_a_node_that_forgets(self) -> None:
        def make(rank: int, w: int, b: int, k: int) -> rd.DataLoader:
            return self.make(rank, w, b, k, pipeline=lambda shard: tagged(Forgetful(rd.Reader(ROWS, shard)), shard))

        with pytest.raises(AssertionError, match=r"segment 1 \(W=2, b=2, K=0\), micro batch \d+, rank \d, 'count'"):
            assert_rescalable(make, [(4, 3, 0), (2, 2, 0)])


class Forgetful(rd.Node[Any]):
    """Counts its samples, and keeps the count for itself."""

    def __init__(self, source: rd.BaseNode) -> None:
        super().__init__(source=source)
        self.count = 0

    def next(self) -> Any:
        self.count += 1
        return {**next(self.children["source"]), "count": self.count}


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
    with pytest.raises(RuntimeError, match="Another thread is within next"):
        next(batches)
    may_answer.set()
    other.join()
    assert sorted(torch.cat([*first, *batches]).tolist()) == list(range(48))
