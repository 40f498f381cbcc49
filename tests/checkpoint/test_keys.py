"""Keys that are no strings: DCP makes strings of them, a load gives them back."""

from __future__ import annotations

from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import ConstantLR, LRScheduler, MultiStepLR, SequentialLR

from rescale_data import checkpoint


class Keeper:
    """A ``Stateful`` with whatever state."""

    def __init__(self, state: dict[Any, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[Any, Any]:
        return self.state

    def load_state_dict(self, state_dict: dict[Any, Any]) -> None:
        self.state = state_dict


def test_a_stateful_gets_back_the_keys_it_gave(tmp_path: Path) -> None:
    given = {1: 7, None: {(2, 3): torch.ones(2)}, "list": [{4: 5}, {6: torch.zeros(1)}], "n": Counter({8: 9})}
    blank = {1: 0, None: {(2, 3): torch.zeros(2)}, "list": [{4: 0}, {6: torch.ones(1)}], "n": Counter({8: 1})}
    checkpoint.save(tmp_path / "c", {"keeper": Keeper(given)})
    keeper = Keeper(blank)
    checkpoint.load(tmp_path / "c", {"keeper": keeper})
    assert str(keeper.state) == str(given)
    checkpoint.save(tmp_path / "again", {"keeper": keeper})


def test_mappings_and_lists_in_the_state_keep_their_keys(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "c", {"list": [{1: torch.ones(2)}, OrderedDict({2: 3})], "n": {3: {1: torch.ones(1)}}})
    state = {"list": [{1: torch.zeros(2)}, OrderedDict({2: 0})], "n": {3: {1: torch.zeros(1)}}}
    checkpoint.load(tmp_path / "c", state)
    assert str(state) == str({"list": [{1: torch.ones(2)}, OrderedDict({2: 3})], "n": {3: {1: torch.ones(1)}}})


def schedulers() -> dict[str, Any]:
    optimizer = SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    steps = MultiStepLR(optimizer, [2, 4, 6])
    parts: list[LRScheduler] = [ConstantLR(optimizer), MultiStepLR(optimizer, [1, 3])]
    return {"steps": steps, "sequence": SequentialLR(optimizer, parts, [2])}


def test_schedulers_with_milestones_are_saved_again_after_a_resume(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "0", schedulers())
    for generation in range(2):
        state = schedulers()
        checkpoint.load(tmp_path / str(generation), state)
        assert state["steps"].milestones == Counter([2, 4, 6])
        checkpoint.save(tmp_path / str(generation + 1), state)
