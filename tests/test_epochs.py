"""The end of an epoch: whatever loop a trainer has, wherever it saves and on whatever it goes on, it trains its epochs once."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from torchdata.nodes import Loader

import rescale_data as rd
from rescale_data.engine.ends import STEPS_PER_REMAINDER_ROUND
from rescale_data.engine.schema import Schema
from tests.corpus import Hooked, documents
from tests.pipelines import Rows
from tests.states import opened

EPOCHS, N, NUM_ROWS = 3, 12, 50
ROWS = rd.DatasetSource([{"row": row} for row in range(NUM_ROWS)], name="rows")
LOOPS = ("loader", "own", "set_epoch", "by count")
"""How a trainer counts its epochs: ``range(loader.epoch, EPOCHS)``; a counter that it keeps in the checkpoint; that and
`set_epoch`; that and so many batches as there are, so that it never sees an iterator end."""


def odd_or_small(sample: dict[str, int]) -> bool:
    return sample["row"] % 2 == 1 or sample["row"] < 30


def rows_of(shard: rd.Shard) -> rd.BaseNode[Any]:
    return rd.Reader(ROWS, shard)


def filtered(shard: rd.Shard) -> rd.BaseNode[Any]:
    return rd.Filter(rows_of(shard), odd_or_small)


PIPELINES = {"rows": (rows_of, NUM_ROWS), "filtered": (filtered, 40)}


def train(loader: rd.DataLoader, loop: str, first: int, num_iters: int) -> Iterator[tuple[int, list[int]]]:
    """Yield the trainer's count of epochs and the rows of each batch; and no rows when an epoch is over.

    Args:
        first: The count that was saved.
        num_iters: Calls of ``iter`` before the first batch: some trainers look first whether a loader can be iterated.
    """
    for epoch in range(loader.epoch if loop == "loader" else first, EPOCHS):
        if loop in ("set_epoch", "by count"):
            loader.set_epoch(epoch)
        batches: Any = [iter(loader) for _ in range(num_iters)][-1]
        for batch in itertools.islice(batches, loader.batches_left) if loop == "by count" else batches:
            assert loader.epoch == epoch, "the loader's epoch is the trainer's while its batches are trained"
            yield epoch, batch["row"][batch.get("valid", slice(None))].tolist()
        yield epoch + 1, []


CASES = [(loop, kind) for loop in LOOPS for kind in PIPELINES if (loop, kind) != ("by count", "filtered")]


@pytest.mark.parametrize(("num_iters", "tail"), [(1, "drop"), (2, "pad")])
@pytest.mark.parametrize(("loop", "kind"), CASES)
def test_every_loop_trains_its_epochs_once_wherever_it_saves(loop: str, kind: str, num_iters: int, tail: Any) -> None:
    """Also where it goes on with other global batches, and reads ahead."""
    pipeline, size = PIPELINES[kind]

    def make(o: int = 4, prefetch: int = 0) -> rd.DataLoader:
        sizes = {"global_batch_size": o, "num_logical_shards": N}
        return rd.DataLoader(pipeline, **sizes, tail=tail, seed=3, prefetch=prefetch)

    whole = make()
    saves, before = [(0, whole.state_dict())], list[tuple[int, list[int]]]()
    for epoch, rows in train(whole, loop, 0, num_iters):
        saves.append((epoch, whole.state_dict()))
        before.append((epoch, rows))
    for num_before, (saved_epoch, state) in enumerate(saves):
        o, prefetch = ((4, 0), (24, 3))[num_before % 2]
        with make(o, prefetch) as loader:
            loader.load_state_dict(state)
            taken = [*before[:num_before], *train(loader, loop, saved_epoch, num_iters)]
        for epoch in range(EPOCHS):
            trained = [row for of, rows in taken if of == epoch for row in rows]
            assert max(Counter(trained).values()) == 1, "no row twice"
            assert (size - o < len(trained) <= size) if tail == "drop" else len(trained) == size
        assert not any(rows for of, rows in taken if of == EPOCHS)


def loader_of(**arguments: Any) -> rd.DataLoader:
    return rd.DataLoader(
        rows_of, **{"global_batch_size": 4, "micro_batch_size": 2, "num_logical_shards": N, **arguments}
    )


class TestBetweenTheLastBatchAndTheEnd:
    @pytest.mark.parametrize("ahead", [0, 3])
    @pytest.mark.parametrize("by", ["taking", "skipping"])
    def test_what_is_asked(self, by: str, ahead: int, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO)
        loader = loader_of(verify=True, prefetch=ahead)
        with pytest.raises(ValueError, match=r"set_epoch\(1\): the loader is in epoch 0"):
            loader.set_epoch(1)
        if by == "skipping":
            loader.skip(48)
        for _ in range(24 if by == "taking" else 0):
            next(iter(loader))
        assert (loader.epoch, loader.batches_left, loader.step, len(loader)) == (0, 0, 12, 24)
        assert loader.progress()["dropped_samples"] == 2
        assert "Epoch 0: every row was delivered once" in caplog.text
        state = loader.state_dict()
        assert (opened(state)["epoch"], opened(state)["step"]) == (0, 12)
        assert set(opened(state)["shards"]["remainder"].tolist()) == {-2}
        assert set(opened(state)["shards"]["epoch"].tolist()) == {1}
        for _ in range(2):
            with pytest.raises(StopIteration):
                loader.peek()
        with pytest.raises(ValueError, match=r"set_epoch\(2\): the loader is in epoch 0"):
            loader.set_epoch(2)
        loader.set_epoch(0)
        assert loader.epoch == 0
        loader.skip(4)
        assert (loader.epoch, loader.batches_left, loader.step) == (1, 22, 13)

    @pytest.mark.parametrize("tail", ["drop", "pad"])
    def test_less_than_another_global_batch_is_the_end_of_the_same_epoch_with_one_warning(
        self, tail: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        first = loader_of(tail=tail)
        first.skip(44)
        loader = loader_of(tail=tail, global_batch_size=8, micro_batch_size=8)
        caplog.clear()
        loader.load_state_dict(first.state_dict())
        assert (loader.epoch, loader.batches_left) == (0, 0 if tail == "drop" else 1)
        assert len(list(loader)) == (tail == "pad")
        counts = [loader.progress()[f"{name}_samples"] for name in ("dropped", "padded")]
        assert counts == ([6, 0] if tail == "drop" else [0, 2])
        (said,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert ("Epoch 0 ended with less than a global batch of 8 samples: 6 dropped, 0 repeated" in said) == (
            tail == "drop"
        )
        assert ("global batches begin anew at sample 44" in said) == (tail == "pad")
        assert (loader.epoch, len(list(loader))) == (1, 6 if tail == "drop" else 7)


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("stop", [None, "all"])
def test_a_skip_of_whole_epochs_reads_nothing_and_costs_a_few_calls_each(
    stop: Any, verify: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The numbers of an epoch are looked up; nothing below moves but in the last one. Of an endless one: `test_mixtures`."""
    data, calls = Rows(1000), Counter[str]()
    for owner, name in ((Schema, "epoch_end"), (rd.Reader, "skip")):
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *given, real=real, name=name: calls.update([name]) or real(*given))

    def pipeline(shard: rd.Shard) -> rd.BaseNode[Any]:
        reader = rd.Reader(data, shard)
        return rd.WeightedSampler({"rows": reader}, {"rows": 1}, stop=stop) if stop else reader

    skipped, taken = (
        rd.DataLoader(pipeline, global_batch_size=24, num_logical_shards=30, verify=verify) for _ in range(2)
    )
    skipped.skip(24 * 41 * 5 + 24)
    assert data.num_read == 0
    assert (skipped.epoch, skipped.step, skipped.progress()["dropped_samples"]) == (5, 41 * 5 + 1, 80)
    assert calls["epoch_end"] <= 3 * (5 + 2)
    assert verify or calls["skip"] < 100
    for _ in range(5):
        list(taken)
    next(iter(taken))
    assert all(a["row"].equal(b["row"]) for a, b in zip(skipped, taken, strict=True))


@pytest.mark.parametrize("restart", [True, False])
def test_a_loader_that_returns_old_states_is_warned_about(restart: bool, caplog: pytest.LogCaptureFixture) -> None:
    """After a load of a state of an epoch's end: torchdata 0.11 keeps that state where it begins the next epoch itself."""

    def make() -> Loader[Any]:
        shards = rd.LogicalShards(rows_of, num_logical_shards=N, global_batch_size=10, repeat=False)
        return Loader(shards, restart_on_stop_iteration=restart)

    loader, again = make(), make()
    list(loader)
    again.load_state_dict(loader.state_dict())
    whole = list(again)
    if not restart:
        assert not whole
        batches = iter(again)
        next(batches)
        third = make()
        third.load_state_dict(again.state_dict())
        assert str(list(batches)) == str(list(third))
    assert ("restart_on_stop_iteration=False" in caplog.text) == restart


class TestStepsPerEpoch:
    def test_what_it_says_of_itself(self) -> None:
        loader = rd.DataLoader(
            filtered, global_batch_size=4, micro_batch_size=2, num_logical_shards=N, steps_per_epoch=15
        )
        seen = [(len(loader), loader.batches_left, loader.epoch) for _ in loader]
        assert seen == [(30, left, 0) for left in range(29, -1, -1)]
        assert (loader.epoch, loader.step, loader.progress()["epoch_max/rows"]) == (1, 15, 1)
        other = rd.DataLoader(filtered, global_batch_size=4, num_logical_shards=N, steps_per_epoch=4)
        other.load_state_dict(loader.state_dict())
        assert (other.epoch, other.batches_left, len(list(other)), other.step) == (3, 1, 1, 16)

    @pytest.mark.parametrize("saves", [1, 3])
    def test_the_epoch_before_is_over_for_good_after_a_load_in_mid_step(self, saves: int) -> None:
        """Also where that is saved and loaded again before a batch."""

        def make(b: int) -> rd.DataLoader:
            return loader_of(global_batch_size=4, micro_batch_size=b, repeat=True, steps_per_epoch=3)

        saved = make(2)
        for batches, may_be_over in ((6, True), (7, False)):
            saved.reset()
            saved.skip(2 * batches)
            state = saved.state_dict()
            for _ in range(saves):
                loader = make(4)
                loader.load_state_dict(state)
                state = loader.state_dict()
            assert loader.epoch == 1
            if may_be_over:
                loader.set_epoch(0)
                assert list(loader) == []
            else:
                with pytest.raises(ValueError, match=r"set_epoch\(0\): the loader is in epoch 1"):
                    loader.set_epoch(0)


def test_an_endless_stream_whose_shards_are_in_several_epochs_warns_where_the_loader_has_epochs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sizes: dict[str, Any] = {"global_batch_size": 4, "num_logical_shards": 8}
    for num_batches, apart in ((7, False), (9, True)):
        endless, finite = (rd.DataLoader(range(37), repeat=repeat, tail="pad", **sizes) for repeat in (True, False))
        batches = iter(endless)
        before = [row for _ in range(num_batches) for row in next(batches).tolist()]
        caplog.clear()
        finite.load_state_dict(endless.state_dict())
        assert ("in the epochs 0 to 1" in caplog.text) == apart
        epochs = [[row for batch in finite for row in batch.tolist()[: finite.last_batch_samples]] for _ in range(2)]
        assert (Counter(before + epochs[0]) == Counter(range(37))) == (len(set(epochs[1])) == 37) == (not apart)


# An end that only reading tells


SEQ_LEN = 8


@pytest.mark.parametrize(("longest", "n", "o"), [(8, 4, 4), (8, 6, 2), (40, 4, 2), (40, 6, 4)])
def test_a_call_in_the_rounds_of_a_remainder_reads_a_bounded_number_of_rows(longest: int, n: int, o: int) -> None:
    """That every token comes once: `test_histories`."""
    lengths = np.sort(np.random.default_rng(0).integers(1, longest + 1, 1500)).tolist()  # the last shards have most
    reads, most = list[int](), 0
    source = rd.DatasetSource(Hooked([{"tokens": doc} for doc in documents(lengths, first=0)], reads.append))

    def pipeline(shard: rd.Shard) -> Any:
        rows = rd.Reader(source, shard, shuffle=8)
        return rd.TokenPacker(rows, column="tokens", seq_len=SEQ_LEN, eos_id=None, last="pad", pad_id=-1)

    for _ in rd.DataLoader(pipeline, global_batch_size=o, num_logical_shards=n, tail="pad"):
        most = max(most, len(reads))
        reads.clear()
    samples_a_call = 2 * (STEPS_PER_REMAINDER_ROUND * o + n)  # looked at, and then served
    assert most <= samples_a_call * (SEQ_LEN + 1) + 8 * n
