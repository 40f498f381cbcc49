"""Ranks that wait for one that does not come: one of them looks, and all hear what it has found."""

import threading
from collections import Counter
from typing import Any

import pytest
import torch.distributed as dist

from rescale_data.engine.ranks import rollcall
from rescale_data.engine.ranks.rollcall import Missing, RollCall


class CountedStore:
    """A store that counts what is asked of it, by the kind of key."""

    def __init__(self, store: Any, asked: Counter[str]) -> None:
        self._store, self._asked = store, asked

    def clone(self) -> Any:
        return self

    def __getattr__(self, name: str) -> Any:
        def ask(key: Any, *args: Any) -> Any:
            first = key[0] if isinstance(key, list) else key
            self._asked[f"{name} {first.rpartition('/')[2]}"] += 1
            return getattr(self._store, name)(key, *args)

        return ask


@pytest.mark.parametrize("num_ranks", [4, 32])
def test_one_rank_looks_who_is_missing_and_all_are_told(num_ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollcall, "_LOOK", 0.1)
    store, lost = dist.HashStore(), num_ranks - 2
    asked = [Counter[str]() for _ in range(num_ranks)]
    told: dict[int, list[int] | None] = {}

    def come(me: int) -> None:
        roll_call = RollCall(CountedStore(store, asked[me]), me, range(num_ranks))
        try:
            roll_call.wait(roll_call.come("save", "", ",".join, 5.0), 0.5)
        except Missing as missing:
            told[me] = missing.ranks

    threads = [threading.Thread(target=come, args=(me,)) for me in range(num_ranks) if me != lost]
    [thread.start() for thread in threads]
    [thread.join(60) for thread in threads]
    assert told == {key: [lost] for key in set(range(num_ranks)) - {lost}}
    assert sum(count["get came"] for count in asked) == 1
    assert all(count["get verdict"] == 1 for me, count in enumerate(asked) if me != lost)
    kinds = {kind for count in asked for kind in count}
    assert {kind.split()[1] for kind in kinds} <= {"failed", "came", "count", "verdict", "looks"}  # no key a rank
