"""Micro batches that a run passes without giving them to anybody: the trainer leaves them out, or they were delivered before.

Positions move here as they move by taking, over the ends of epochs. Who serves is arithmetic (`Layout`, `Deal`); each rank
reads for its own block of logical shards, so that the ranks which served may be others than those that read.
"""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial

import numpy as np

from rescale_data.engine.agreement import together
from rescale_data.engine.leg import Leg, Standing
from rescale_data.engine.legs import Legs
from rescale_data.engine.position import Position
from rescale_data.engine.recipe import MOST_STAMPED, SAMPLES
from rescale_data.layout.clock import Clock
from rescale_data.state import Ints

_MANY = 1 << 40  # samples: more than a shard has left of any epoch
_STEPS_AT_ONCE = 16
"""So many steps are read before ranks compare whether an epoch has ended, where only reading tells."""
_COUNTS = [each.name for each in fields(Clock) if each.name != "skipped"]


def require_countable(what: str, num_samples: int, num_logical_shards: int) -> None:
    """``ValueError`` where a run would have delivered more samples than the stamps of a state can tell (`STAMP`)."""
    most = MOST_STAMPED // num_logical_shards - 1
    if num_samples > most:
        raise ValueError(
            f"{what}: it would end at sample {num_samples}, and a state with num_logical_shards={num_logical_shards} counts up "
            f"to {most}. Give less."
        )


def skip(at: Position, legs: Legs, num_micro_batches: int) -> None:
    """Move a position, of which nothing is made ahead, by so many micro batches (collective where only reading finds ends)."""
    begins: list[tuple[int, Ints]] = []  # of epochs: micro batches left to skip, and where the run stands
    verify = at.setup.recipe.verify
    while num_micro_batches:
        if at.ended:
            at.move_on()
            begins = [*begins[-2:], (num_micro_batches, _numbers(at))]
            num_micro_batches = num_micro_batches if verify else _skip_epochs(at, begins)
        if at.leg is None:
            at.go_to(*legs.first(at))
        _settle(at, legs)
        leg, first = at.leg, at.u
        if leg is None:
            continue
        here = num_micro_batches if leg.stop is None else min(num_micro_batches, leg.stop - first)
        if leg.stop is None and not at.repeat:
            _read_until(at, leg, first + min(here, _STEPS_AT_ONCE * at.layout.gradient_accumulation_steps))
        else:
            left = leg.left_at(first)
            if left is None or num_micro_batches < left or verify:  # else nothing of the epoch is delivered after these
                together(at.ranks, partial(at.move, at.owned, at.reached(first + here)))
                at.standing = replace(at.standing, owners=at.owners)
            at.u = first + here
        num_micro_batches -= at.u - first
        _settle(at, legs)


def _settle(at: Position, legs: Legs) -> None:
    """Find the leg of the next micro batch; where there is none, end the epoch."""
    while (leg := at.leg) is not None and leg.stop == at.u and not leg.is_last:
        at.go_to(*legs.deal(at, leg))
    if leg is not None and leg.deal is not None and leg.stop == at.u:
        at.go_to(*legs.end(at, leg.deal))


def _read_until(at: Position, leg: Leg, u: int) -> None:
    """Move to a micro batch of a main phase, or to where that ends, which only reading tells (collective)."""
    layout, samples, table = at.layout, at.reached(at.u), at.table.copy()
    step_end = (u // layout.gradient_accumulation_steps + 1) * layout.gradient_accumulation_steps
    until, beyond = at.reached(u), at.reached(step_end)

    def find() -> int:
        left = np.full(len(table), _MANY)
        at.runner.load(table, leg.histories)
        for shard in at.owned.tolist():
            count, end = at.runner.look_ahead(shard, int(until[shard] - samples[shard]))
            table[shard] = at.runner.table[shard]
            if end is None:  # this is all that is needed, but whether the next step is there
                more, end = at.runner.look_ahead(shard, int(beyond[shard] - until[shard]))
                count += more
            if end is not None:
                left[shard] = count
        return max(at.u, layout.last_whole(samples, left, at.u))

    stop = at.ranks.extremes(together(at.ranks, find))[0]
    if stop > u:
        table[at.owned, SAMPLES] = until[at.owned]
        at.table, at.u = table, u
        return
    together(at.ranks, partial(at.move, at.owned, at.reached(stop)))
    at.u, at.standing = stop, replace(at.standing, leg=replace(leg, stop=stop))


def _skip_epochs(at: Position, begins: list[tuple[int, Ints]]) -> int:
    """Leave out whole epochs after two that moved the run by the same; the micro batches that are then left to skip, not 0."""
    num_micro_batches, now = begins[-1]
    whole_steps = at.layout.aligned or at.setup.tail == "pad"  # else what is dropped depends on the epochs before
    if len(begins) < 3 or not whole_steps or not at.schema.epochs_are_alike(at.table):
        return num_micro_batches
    (_, first), (before, second), _ = begins
    if (now - second != second - first).any():
        return num_micro_batches
    size = before - num_micro_batches
    epochs = (num_micro_batches - 1) // size  # the last of them ends where its last batch does
    _set(at, now + epochs * (now - second))
    return num_micro_batches - epochs * size


def _numbers(at: Position) -> Ints:
    """All numbers of a run that is at the beginning of an epoch."""
    counts = [getattr(at.clock, name) for name in _COUNTS]
    return np.concatenate([at.table.flatten(), np.array(counts, dtype=np.int64)])


def _set(at: Position, numbers: Ints) -> None:
    table, counts = numbers[: at.table.size], numbers[at.table.size :].tolist()
    clock = replace(at.clock, **dict(zip(_COUNTS, counts, strict=True)))
    at.go_to(
        Standing(clock, at.owners, None, False, clock.samples, at.standing.was_empty), table.reshape(at.table.shape)
    )
