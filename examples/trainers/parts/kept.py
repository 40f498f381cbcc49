"""What ranks keep so that others can go on when some die: the last two states of the loader."""

from __future__ import annotations

import json
from typing import Any

import torch.distributed as dist

import rescale_data as rd


class Kept:
    """The last two states of a loader, of which survivors may hold different ones."""

    def __init__(self, every: int = 100) -> None:
        self.every, self.states, self.are_new = every, dict[int, Any](), True

    def keep(self, loader: rd.DataLoader) -> None:
        """Keep the state every so many steps, and of new ranks at once: all call it BEFORE a step's first micro batch."""
        if self.are_new or (loader.step % self.every == 0 and loader.step not in self.states):
            self.states = dict([*self.states.items(), (loader.step, loader.state_dict())][-2:])
            self.are_new = False

    def agreed(self, model_step: int) -> tuple[Any, int]:
        """Return one state, the same on all ranks of the new process group, and the samples delivered after it.

        All of these were delivered by the ranks of that state: `keep` takes another one when the ranks have changed.
        """
        steps: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(steps, list(self.states))
        step, rank = max((step, rank) for rank, kept in enumerate(steps) for step in kept if step <= model_step)
        states = [self.states.get(step)]
        dist.broadcast_object_list(states, rank)
        self.states, self.are_new = {step: states[0]}, True
        return states[0], (model_step - step) * json.loads(states[0]["header"])["global_batch_size"]
