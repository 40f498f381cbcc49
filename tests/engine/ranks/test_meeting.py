"""Ranks that meet in a store: who does not come is named, and nothing is left of it for the next attempt."""

import gc
import os
import signal
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from rescale_data.engine.ranks import meeting
from rescale_data.engine.ranks.meeting import MissingRanks, arrive, call_within, meet_at_barrier


class CountedStore(dist.Store):
    """A store that counts what is asked of it, by the kind of key."""

    def __init__(self, store: Any) -> None:
        super().__init__()
        self._store, self.asked = store, Counter[str]()

    def __getattribute__(self, name: str) -> Any:
        if name not in ("append", "add", "get", "wait", "check", "compare_set", "set", "multi_get"):
            return super().__getattribute__(name)

        def ask(key: Any, *args: Any) -> Any:
            first = key[0] if isinstance(key, list) else key
            self.asked[f"{name} {first.rpartition('/')[2]}"] += 1
            return getattr(self._store, name)(key, *args)

        return ask


def counted_stores(num_ranks: int) -> list[CountedStore]:
    """Return the store of a job as each of its ranks has it."""
    store = dist.HashStore()
    return [CountedStore(store) for _ in range(num_ranks)]


def told(call: Any, *args: Any) -> Any:
    """Return what a meeting returns, or the ranks that it misses."""
    try:
        return call(*args)
    except MissingRanks as missing:
        return missing.ranks


def in_threads(num_ranks: int, come: Any, lost: int = -1) -> dict[int, Any]:
    """Return what each rank is told."""
    ranks = [rank for rank in range(num_ranks) if rank != lost]
    with ThreadPoolExecutor(num_ranks) as pool:
        return dict(zip(ranks, pool.map(lambda rank: told(come, rank), ranks), strict=True))


@pytest.mark.parametrize("num_ranks", [4, 32])
def test_one_rank_looks_who_is_missing_and_all_are_told(num_ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # A member that is slower than this to write what it saw is taken for dead.
    monkeypatch.setattr(meeting, "_CHECK_SECONDS", 0.5)
    stores, lost = counted_stores(num_ranks), num_ranks - 2
    found = in_threads(num_ranks, lambda me: arrive(stores[me], me, range(num_ranks), 2.0), lost)
    assert found == {me: [lost] for me in set(range(num_ranks)) - {lost}}
    assert sum(store.asked["compare_set came"] for store in stores) == num_ranks - 1 + 1  # as they come, and the one
    assert told(arrive, stores[lost], lost, range(num_ranks), 60.0) == [lost]  # at once: the verdict holds


def test_a_member_waits_for_few_answers_of_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answer is a trip to the host of the store: a meeting takes at most four, and three for the last that comes."""
    monkeypatch.setattr(meeting, "_CHECK_SECONDS", 60.0)
    stores = counted_stores(6)
    assert len(in_threads(6, lambda me: meet_at_barrier(stores[me], me, range(6), 240.0))) == 6
    trips = [sum(number for name, number in store.asked.items() if name.split()[0] != "append") for store in stores]
    assert max(trips) <= 4
    assert min(trips) == 3


def test_a_store_that_does_not_answer_or_fails_keeps_nobody_for_long() -> None:
    """Errors of its connection are those of a store that is gone; others are raised."""

    def fails() -> None:
        raise dist.DistNetworkError("Connection reset by peer")

    end = threading.Event()
    assert told(call_within, 0.2, end.wait) is None
    end.set()
    assert told(call_within, 60.0, fails) is None
    assert call_within(60.0, lambda: 5) == 5
    with pytest.raises(ZeroDivisionError):
        call_within(60.0, lambda: 1 // 0)


def test_a_fork_does_not_collect_a_group_that_its_parent_has_dropped() -> None:
    """There it would wait for threads that the fork does not have."""
    holder = SimpleNamespace()
    gc.disable()
    try:
        holder.group = meeting.gloo("dropped", dist.HashStore(), 0, 1, 10.0)
        holder.itself = holder
        del holder
        child = os.fork()
        if child == 0:
            signal.alarm(60)  # ends a fork that hangs
            gc.collect()
            os._exit(0)
        assert os.waitpid(child, 0) == (child, 0)
    finally:
        gc.enable()
