"""A store whose host has vanished: nobody waits for it for long, and what it says comes through as it is."""

import threading
from typing import Any

import pytest
import torch.distributed as dist

from rescale_data.engine.ranks.rollcall import Answering, Missing, RollCall


class Vanishing:
    """Answers until it does not, as a connection that nobody closes."""

    def __init__(self) -> None:
        self.store: Any = dist.HashStore()
        self.gone, self.end = False, threading.Event()

    def __getattr__(self, name: str) -> Any:
        if self.gone:
            self.end.wait(60)
        return getattr(self.store, name)


@pytest.fixture
def store() -> Any:
    store = Vanishing()
    yield store
    store.end.set()


def test_a_store_that_is_gone_before_a_call_or_during_one_is_said_to_be(store: Vanishing) -> None:
    roll_call = RollCall(store, 0, [0, 1])  # type: ignore[arg-type]
    coming = roll_call.come("call", "x", ",".join, 0.5)
    threading.Timer(0.1, lambda: setattr(store, "gone", True)).start()
    with pytest.raises(Missing) as missing:
        roll_call.wait(coming, 0.5)
    assert missing.value.ranks is None
    with pytest.raises(Missing) as missing:
        roll_call.come("call", "x", ",".join, 0.3)
    assert missing.value.ranks is None


def test_answers_and_errors_come_through(store: Vanishing) -> None:
    asked = Answering(store)
    assert [asked.add("count", 2), asked.add("count", 3)] == [2, 5]
    assert asked.get("count") == b"5"
    with pytest.raises(TypeError):
        asked.add("count")


def test_its_thread_ends_with_it(store: Vanishing) -> None:
    before = set(threading.enumerate())
    asked = Answering(store)
    asked.add("x", 1)
    (thread,) = set(threading.enumerate()) - before
    del asked
    thread.join(10)
    assert not thread.is_alive()
