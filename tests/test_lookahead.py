"""Whoever reads ahead has the state of the batches that were taken, and loses nothing."""

from __future__ import annotations

import itertools
import logging
import threading
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rescale_data as rd
from rescale_data.lookahead import LookAhead

ROWS = list(range(70))


def make(rows: Any = ROWS, **arguments: Any) -> rd.DataLoader:
    return rd.DataLoader(rows, **{"global_batch_size": 8, "micro_batch_size": 4, **arguments})


def take_epoch(ahead: LookAhead) -> list[list[int]]:
    taken: list[list[int]] = []
    ahead.begin()
    while ahead.read() or ahead.in_hand:
        taken.append(ahead.take().tolist())
    return taken


@settings(max_examples=20, deadline=None)
@given(num_batches=st.integers(1, 9), stop=st.integers(0, 30), tail=st.sampled_from(["drop", "pad"]))
def test_the_state_is_that_of_a_loader_that_took_the_same(num_batches: int, stop: int, tail: str) -> None:
    rows = [{"row": row} for row in ROWS]
    ahead, plain = LookAhead(make(rows, tail=tail), num_batches), make(rows, tail=tail)
    for _ in range(stop):
        expected = next(iter(plain))
        ahead.begin()
        ahead.read()
        assert torch.equal(ahead.take()["row"], expected["row"])
    state, other = ahead.state_dict(), plain.state_dict()
    assert {key: value for key, value in state.items() if key != "shards"} == {
        key: value for key, value in other.items() if key != "shards"
    }
    for field, table in other["shards"].items():
        assert torch.equal(state["shards"][field], table), field
    assert (ahead.step, ahead.epoch) == (plain.step, plain.epoch)
    fresh = make(rows, tail=tail)
    fresh.load_state_dict(state)
    assert fresh.batches_left == plain.batches_left
    assert torch.equal(next(itertools.chain(fresh, fresh))["row"], next(iter(plain))["row"])


def test_epochs_follow_each_other_and_a_load_forgets_what_is_in_hand() -> None:
    loader = make()
    expected = [[batch.tolist() for batch in loader] for _ in range(2)]
    ahead = LookAhead(make(), 3)
    assert [take_epoch(ahead) for _ in range(2)] == expected
    ahead.reset()
    ahead.begin()
    ahead.read()
    state = ahead.state_dict()
    ahead.take()
    ahead.load_state_dict(state)
    assert ahead.in_hand == []
    assert take_epoch(ahead) == expected[0]


@settings(max_examples=30, deadline=None)
@given(
    num_batches=st.integers(1, 7),
    changes=st.lists(st.tuples(st.integers(0, 5), st.sampled_from([4, 8, 16]), st.booleans()), min_size=1, max_size=4),
    repeat=st.booleans(),
)
def test_a_ramp_and_steps_left_out_hold_from_where_the_trainer_is(
    num_batches: int, changes: list[tuple[int, int, bool]], repeat: bool
) -> None:
    """What is in hand are batches of another size, or of steps that are left out."""
    ahead, plain = (
        LookAhead(make(repeat=repeat, micro_batch_size=4), num_batches),
        make(repeat=repeat, micro_batch_size=4),
    )
    for num_steps, size, excludes in changes:
        for _ in range(num_steps * plain.gradient_accumulation_steps):
            expected = next(itertools.chain(plain, plain))
            if not (ahead.read() or ahead.in_hand):
                ahead.begin()
                ahead.read()
            assert torch.equal(ahead.take(), expected)
        for loader in (ahead, plain):
            if excludes:
                loader.exclude_steps([(plain.step + 1, plain.step + 3)])
            else:
                loader.set_global_batch_size(size)
        assert ahead.step == plain.step
        assert ahead.progress()["dropped_samples"] == plain.progress()["dropped_samples"]
        assert ahead.state_dict()["pipeline"] == plain.state_dict()["pipeline"]
        for field, table in plain.state_dict()["shards"].items():
            assert torch.equal(ahead.state_dict()["shards"][field], table), field


def test_off_a_boundary_of_the_trainer_a_ramp_is_refused_and_nothing_is_lost() -> None:
    loader = make()
    expected, ahead = [batch.tolist() for batch in make()], LookAhead(loader, 3)
    ahead.begin()
    ahead.read()
    taken = [ahead.take().tolist()]
    with pytest.raises(ValueError, match=r"when loader.step is 1, after 1 more"):
        ahead.set_global_batch_size(16)
    with pytest.raises(ValueError, match="at step 1"):
        ahead.exclude_steps([(0, 1)])
    while ahead.read() or ahead.in_hand:
        taken.append(ahead.take().tolist())
    assert taken == expected
    ahead.set_global_batch_size(16)
    assert loader.gradient_accumulation_steps == 4


def test_an_error_waits_until_what_came_before_it_was_taken() -> None:
    class Broken:
        def __len__(self) -> int:
            return 64

        def __getitem__(self, row: int) -> int:
            if row == bad:
                raise OSError("corrupt")
            return row

    bad = [batch.tolist() for batch in make(ROWS[:64])][2][0]
    ahead = LookAhead(make(Broken()), 5)
    ahead.begin()
    assert len(ahead.read()) == 2
    ahead.take()
    ahead.take()
    with pytest.raises(OSError, match="corrupt"):
        ahead.read()
    assert ahead.state_dict()["samples"] == 8


def test_a_hand_holds_one_batch_at_least() -> None:
    with pytest.raises(ValueError, match="num_batches=0"):
        LookAhead(make(), 0)


def test_only_a_loader_is_read_ahead() -> None:
    given: Any = [1]
    with pytest.raises(TypeError, match=r"list is not read ahead of training.*rd\.Broadcast.*prefetch_batches="):
        LookAhead(given, 1)


def test_a_loader_that_is_read_ahead_refuses_what_would_be_ahead_of_training() -> None:
    loader = make()
    batches = iter(loader)
    next(batches)
    ahead = LookAhead(loader, 4)
    with pytest.raises(RuntimeError, match="what reads the loader ahead took its place"):
        next(batches)
    ahead.begin()
    ahead.read()
    asked = [
        loader.state_dict,
        lambda: loader.sharded,
        loader.reset,
        loader.progress,
        lambda: loader.load_state_dict({}),
    ]
    asked += [lambda: iter(loader), lambda: loader.step, lambda: LookAhead(loader, 2)]
    for ask in asked:
        with pytest.raises(RuntimeError, match=r"LookAhead\) in place of the loader"):
            ask()
    assert ahead.state_dict()["samples"] == 4
    loader.close()


@settings(max_examples=20, deadline=None)
@given(stop=st.integers(0, 30), skipped=st.integers(0, 5), tail=st.sampled_from(["drop", "pad"]))
def test_what_is_asked_is_answered_for_the_trainer(stop: int, skipped: int, tail: str) -> None:
    rows = [{"row": row} for row in ROWS]
    ahead, plain = LookAhead(make(rows, tail=tail), 4), make(rows, tail=tail)
    for _ in range(stop):
        next(iter(plain))
        ahead.begin()
        ahead.read()
        ahead.take()
        waited, counted = plain.progress(), ahead.progress()
        of_time = {name for name in waited if name.endswith("_seconds")} | {"batches_ready"}
        assert {name: value for name, value in waited.items() if name not in of_time} == {
            name: value for name, value in counted.items() if name not in of_time
        }
        assert counted["batches_ready"] == len(ahead.in_hand)
        assert ahead.last_batch_samples == plain.last_batch_samples
        assert (ahead.batches_left, len(ahead)) == (plain.batches_left, len(plain))
    ahead.skip(4 * skipped)
    plain.skip(4 * skipped)
    assert (ahead.sharded.state_dict()["samples"], ahead.step) == (plain.full_state_dict()["samples"], plain.step)
    ahead.begin()
    ahead.read()
    assert torch.equal(ahead.take()["row"], next(iter(plain))["row"])


def test_a_state_taken_beside_another_thread_warns(caplog: pytest.LogCaptureFixture) -> None:
    loader = make()
    batches = iter(loader)
    next(batches)
    with caplog.at_level(logging.WARNING):
        loader.state_dict()
        assert not caplog.records
        thread = threading.Thread(target=lambda: next(batches))
        thread.start()
        thread.join()
        loader.state_dict()
        loader.full_state_dict()
        assert ["LookAhead" in record.getMessage() for record in caplog.records] == [True, True]
        loader.load_state_dict(loader.state_dict())
        caplog.clear()
        loader.state_dict()
        assert not caplog.records, "after a load nobody has taken anything"
