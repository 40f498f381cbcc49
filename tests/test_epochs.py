"""The end of an epoch: whatever loop a trainer has, wherever it saves and on whatever it goes on, it trains its epochs once."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torchdata.nodes import Loader, Mapper, Prefetcher, Unbatcher

import rescale_data as rd
from rescale_data.engine.schema import Schema
from rescale_data.testing import full_state_dict
from tests.histories.ranks import Top
from tests.pipelines import Rows
from tests.states import opened, same_state

EPOCHS, N, NUM_ROWS = 3, 12, 50


class Loop(NamedTuple):
    """How a trainer goes through its epochs.

    Args:
        by_count: It takes as many batches as there are, and so never sees an iterator end.
        counts: Its epochs: ``range(loader.epoch, EPOCHS)``; a counter that it keeps in the checkpoint; that and `set_epoch`.
        num_iters: Calls of ``iter`` before the first batch: some trainers look first whether a loader can be iterated.
    """

    by_count: bool
    counts: Literal["loader", "own", "set_epoch"]
    num_iters: int = 1


LOOPS = [
    *(Loop(False, counts, num) for counts in ("loader", "own", "set_epoch") for num in (1, 2, 3)),
    *(
        Loop(True, "set_epoch", num) for num in (1, 2)
    ),  # an empty iterator ends with the StopIteration that it never sees
]
Save = tuple[dict[str, Any], int]


def odd_or_small(sample: dict[str, int]) -> bool:
    return sample["row"] % 2 == 1 or sample["row"] < 30


def rows_of(shard: rd.Shard) -> rd.BaseNode[Any]:
    return rd.Reader(rd.DatasetSource([{"row": row} for row in range(NUM_ROWS)], name="rows"), shard)


def filtered(shard: rd.Shard) -> rd.BaseNode[Any]:
    return rd.Filter(rows_of(shard), odd_or_small)


PIPELINES = {"rows": (rows_of, NUM_ROWS), "filtered": (filtered, 40)}


class Trainer:
    """The loaders of all ranks, asked at once, or one that reads ahead; what it took, by the loader's epoch."""

    def __init__(
        self, loop: Loop, kind: str, topology: Top, tail: str, ahead: int, save: Save | None, **more: Any
    ) -> None:
        self.loop, (pipeline, _), w = loop, PIPELINES[kind], topology.w
        self.ranks = [
            rd.DataLoader(
                pipeline,
                global_batch_size=topology.o,
                micro_batch_size=topology.b,
                num_logical_shards=N,
                seed=3,
                num_workers=topology.k,
                prefetch=None if topology.k else ahead,
                tail=tail,  # type: ignore[arg-type]
                **({"dp_rank": rank, "dp_world_size": w} if w > 1 else {}),
                **more,
            )
            for rank in range(w)
        ]
        self.known, self.counter = kind == "rows", 0
        if save is not None:
            for loader in self.ranks:
                loader.load_state_dict(save[0])
            self.counter = save[1]

    def save(self) -> Save:
        state = self.ranks[0].state_dict() if len(self.ranks) == 1 else full_state_dict(self.ranks)
        return state, self.counter

    def same(self, ask: Callable[[Any], Any]) -> Any:
        found = [ask(loader) for loader in self.ranks]
        assert len(set(found)) == 1, "the ranks disagree"
        return found[0]

    @property
    def epoch(self) -> int:
        return self.same(lambda loader: loader.epoch)

    def train(self) -> Iterator[tuple[int, list[int]]]:
        """The trainer's epoch and the rows of each batch; and once after each epoch, when its counter has moved on."""
        for epoch in range(self.epoch if self.loop.counts == "loader" else self.counter, EPOCHS):
            self.counter = epoch
            if self.loop.counts == "set_epoch":
                self.same(lambda loader, epoch=epoch: loader.set_epoch(epoch))
            yield from ((epoch, rows) for rows in self._one_epoch())
            self.counter = epoch + 1
            yield epoch, []

    def _one_epoch(self) -> Iterator[list[int]]:
        iterators = [[iter(loader) for loader in self.ranks] for _ in range(self.loop.num_iters)][-1]
        if self.loop.by_count:
            for _ in range(self.same(lambda loader: loader.batches_left)):
                yield self._rows([next(iterator) for iterator in iterators])
            return
        size = self.same(len) if self.known else 0
        while True:
            batches = [next(iterator, None) for iterator in iterators]
            assert len({batch is None for batch in batches}) == 1
            if batches[0] is None:
                return
            rows = self._rows(batches)
            assert not self.known or self.same(len) == size
            yield rows

    def _rows(self, batches: list[Any]) -> list[int]:
        assert self.same(bool)
        real = [batch["valid"] if "valid" in batch else slice(None) for batch in batches]
        return [row for batch, valid in zip(batches, real, strict=True) for row in batch["row"][valid].tolist()]


class Run(NamedTuple):
    """A run in segments, each of which ends with a save after some batches or epochs.

    Args:
        segments: Topology, how far it reads ahead, and how many batches and ends of epochs it goes.
    """

    loop: Loop
    kind: str
    tail: str
    segments: list[tuple[Top, int, int]]


@st.composite
def runs(draw: st.DrawFn) -> Run:
    loop, tail = draw(st.sampled_from(LOOPS)), draw(st.sampled_from(["drop", "pad"]))
    kind = "rows" if loop.by_count else draw(st.sampled_from(list(PIPELINES)))
    segments: list[tuple[Top, int, int]] = []
    for _ in range(draw(st.integers(1, 4))):
        o = draw(st.sampled_from([4, 6, 8, 12, 24]))
        w = 1 if kind == "filtered" else draw(st.sampled_from([w for w in (1, 2, 3) if o % w == 0]))
        b = draw(st.sampled_from([b for b in range(1, o // w + 1) if o % (w * b) == 0]))
        ahead = draw(st.sampled_from([0, 1, 3, 30])) if w == 1 else 0
        segments.append((Top(w, b, o), ahead, draw(st.integers(0, 3 * NUM_ROWS // (w * b) + 4))))
    return Run(loop, kind, tail, segments)


@settings(max_examples=150, deadline=None)
@given(runs())
@example(Run(Loop(False, "own"), "rows", "drop", [(Top(1, 4, 4), 0, 12)]))  # eoe: in the loop, after the last batch
@example(Run(Loop(True, "set_epoch"), "rows", "drop", [(Top(1, 4, 4), 0, 13)]))  # the counter is one further
@example(Run(Loop(False, "loader"), "rows", "drop", [(Top(1, 4, 4), 0, 11), (Top(1, 8, 8), 0, 1)]))  # extra_epoch
@example(Run(Loop(False, "own", 2), "rows", "drop", [(Top(1, 4, 4), 0, 11)]))  # a state of an epoch's end
@example(Run(Loop(False, "own"), "filtered", "drop", [(Top(1, 4, 4), 0, 9), (Top(1, 24, 24), 3, 2)]))
def test_every_loop_trains_its_epochs_once_wherever_it_saves(run: Run) -> None:
    taken: dict[int, list[int]] = defaultdict(list)
    largest, save = 0, None
    for topology, ahead, stop in [*run.segments, (run.segments[-1][0], 0, 10**9)]:
        trainer = Trainer(run.loop, run.kind, topology, run.tail, ahead, save)
        largest = max(largest, topology.o)
        for i, (epoch, rows) in enumerate(trainer.train()):
            if rows:
                assert epoch == trainer.epoch, "the loader's epoch is the trainer's while its batches are trained"
                taken[trainer.epoch] += rows
            if i == stop:
                break
        save = trainer.save()
    assert sorted(taken) == list(range(EPOCHS))
    size = PIPELINES[run.kind][1]
    for rows in taken.values():
        assert max(Counter(rows).values()) == 1, "no row twice"
        assert size - largest < len(rows) <= size
        assert run.tail == "drop" or len(rows) == size


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
        (said,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert ("Epoch 0 ended with less than a global batch of 8 samples: 6 dropped, 0 repeated" in said) == (
            tail == "drop"
        )
        assert ("global batches begin anew at sample 44" in said) == (tail == "pad")
        assert (loader.epoch, len(list(loader))) == (1, 6 if tail == "drop" else 7)


def pipeline_over(kind: str, num_rows: int) -> Callable[[rd.Shard], rd.BaseNode[Any]]:
    """Of two sources, or one."""
    rows, few = rd.DatasetSource(range(num_rows), name="rows"), rd.DatasetSource(range(9), name="few")

    def pipeline(shard: rd.Shard) -> rd.BaseNode[Any]:
        if kind in ("never", "all"):
            both = {"rows": rd.Reader(rows, shard), "few": rd.Map(rd.Reader(few, shard), int)}
            return rd.WeightedSampler(both, {"rows": 2, "few": 1}, stop=kind)  # type: ignore[arg-type]
        return rd.Shuffle(rd.Reader(rows, shard), 3) if kind == "shuffle" else rd.Reader(rows, shard)

    return pipeline


class TestSkipOfWholeEpochs:
    @pytest.mark.parametrize("verify", [False, True])
    def test_reads_nothing(self, verify: bool) -> None:
        data = Rows(1000)

        def make() -> rd.DataLoader:
            return rd.DataLoader(data, global_batch_size=24, num_logical_shards=30, verify=verify)

        skipped, taken = make(), make()
        skipped.skip(24 * 41 * 5 + 24)
        assert data.num_read == 0
        assert (skipped.epoch, skipped.step, skipped.progress()["dropped_samples"]) == (5, 41 * 5 + 1, 80)
        for _ in range(5):
            list(taken)
        next(iter(taken))
        assert all(a["row"].equal(b["row"]) for a, b in zip(skipped, taken, strict=True))

    @settings(max_examples=40, deadline=None)
    @given(
        st.sampled_from(["rows", "all", "never", "shuffle"]), st.integers(5, 24), st.sampled_from([3, 4, 8]),
        st.sampled_from([3, 4]), st.sampled_from(["drop", "pad"]), st.integers(0, 20), st.integers(6, 60), st.booleans(),
    )  # fmt: skip
    def test_are_as_if_they_had_been_taken(
        self, kind: str, num_rows: int, n: int, o: int, tail: Any, first: int, num: int, repeat: bool
    ) -> None:
        skipped, taken = (
            rd.DataLoader(pipeline_over(kind, num_rows), global_batch_size=o, num_logical_shards=n, tail=tail,
                          repeat=repeat or kind == "never")
            for _ in range(2)
        )  # fmt: skip
        for loader in (skipped, taken):
            loader.skip(o * first)
        skipped.skip(o * num)
        for _ in range(num):
            taken.skip(o)
        assert same_state(skipped.state_dict(), taken.state_dict())

    @pytest.mark.parametrize("kind", ["rows", "all", "never"])
    def test_cost_nothing_in_an_endless_stream(self, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
        calls = count_calls(monkeypatch)
        loader = rd.DataLoader(pipeline_over(kind, 40), global_batch_size=4, num_logical_shards=8, repeat=True)
        loader.skip(4 * 10**7)
        assert (loader.step, calls.total() < 100) == (10**7, True)

    @pytest.mark.parametrize("kind", ["rows", "all"])
    def test_cost_a_few_calls_each(self, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """The numbers of an epoch are looked up; nothing below moves but in the last one."""
        calls = count_calls(monkeypatch)
        loader = rd.DataLoader(pipeline_over(kind, 40), global_batch_size=4, num_logical_shards=8)
        loader.skip(4 * 10**4)
        assert loader.step == 10**4
        assert calls["epoch_end"] <= 3 * (loader.epoch + 2)
        assert calls["skip"] < 100


def count_calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Return the counts of what a skip costs, by the name of the method."""
    calls = Counter[str]()
    for owner, name in ((Schema, "epoch_end"), (rd.Reader, "skip")):
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *given, real=real, name=name: calls.update([name]) or real(*given))
    return calls


class TestUnderTorchdata:
    """Nodes of torchdata above `LogicalShards`, saved at every batch of three epochs and at every end."""

    ABOVE: Mapping[str, Callable[[Any], Any]] = {
        "nothing": lambda node: node,
        "Prefetcher": lambda node: Prefetcher(node, 3),
        "Prefetcher, few snapshots": lambda node: Prefetcher(node, prefetch_factor=4, snapshot_frequency=3),
        "Mapper of Unbatcher": lambda node: Mapper(Unbatcher(node), str),
    }

    @pytest.mark.parametrize("above", ABOVE)
    def test_epochs_follow_each_other_wherever_it_was_saved(self, above: str) -> None:
        def make() -> Loader[Any]:
            shards = rd.LogicalShards(rows_of, num_logical_shards=N, global_batch_size=10, repeat=False)
            return Loader(self.ABOVE[above](shards))

        loader, epochs, states = make(), [], []
        for epoch in range(EPOCHS):
            taken: list[str] = []
            for item in loader:
                taken.append(str(item))
                states.append((epoch, len(taken), loader.state_dict()))
            epochs.append(taken)
            states.append((epoch, len(taken), loader.state_dict()))
        assert len({tuple(taken) for taken in epochs}) == EPOCHS
        for epoch, count, state in states:
            again = make()
            again.load_state_dict(state)
            rest = [str(item) for item in again]
            following = [epochs[epoch][count:], *epochs[epoch + 1 :]]
            if not following[0]:  # torchdata's Loader begins the next epoch at once
                following = following[1:]
            for expected in following:
                assert rest == expected, (above, epoch, count)
                rest = [str(item) for item in again]

    @pytest.mark.parametrize("restart", [True, False])
    def test_a_loader_that_returns_old_states_is_warned_about(
        self, restart: bool, caplog: pytest.LogCaptureFixture
    ) -> None:
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
    @pytest.mark.parametrize(("repeat", "kind"), [(True, "rows"), (False, "filtered")])
    @pytest.mark.parametrize("loop", [loop for loop in LOOPS if loop.num_iters < 3])
    def test_an_epoch_is_so_many_steps_wherever_it_was_saved(self, loop: Loop, repeat: bool, kind: str) -> None:
        def make(save: Save | None = None) -> Trainer:
            trainer = Trainer(loop, kind, Top(1, 2, 4), "drop", 0, save, repeat=repeat, steps_per_epoch=7)
            trainer.known = True
            return trainer

        whole = make()
        expected, saves = [], []
        for epoch, rows in whole.train():
            if rows:
                expected.append((epoch, rows))
            saves.append((len(expected), whole.save()))
        assert len(expected) == 7 * 2 * EPOCHS
        assert whole.ranks[0].step == 7 * EPOCHS
        for count, save in saves:
            trainer = make(save)
            at_end = count % 14 == 0 and count > 0
            rest = [(epoch, rows) for epoch, rows in trainer.train() if rows]
            if at_end and save[1] * 14 < count and loop.counts == "own":
                assert len(rest) == len(expected) - count + 14  # a state there is the beginning of the next epoch
            else:
                assert rest == expected[count:], count

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


def test_a_state_says_again_that_it_was_saved_within_a_step() -> None:
    """Loaded on others and saved again before a batch, it is still no end of an epoch of steps."""

    def loader(global_batch_size: int) -> rd.DataLoader:
        sizes = {"global_batch_size": global_batch_size, "micro_batch_size": 2, "num_logical_shards": 4}
        return rd.DataLoader(range(64), repeat=True, steps_per_epoch=1, **sizes)

    first, second, third = loader(4), loader(2), loader(2)
    next(iter(first))
    second.load_state_dict(first.state_dict())
    again = second.state_dict()
    assert opened(again)["in_step"]
    third.load_state_dict(again)
    assert opened(third.state_dict())["in_step"]


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
