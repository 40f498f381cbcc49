"""Leaving out micro batches, over the ends of epochs, and steps that were asked for ahead of time."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from rescale_data.engine.leg import Standing
from rescale_data.engine.recipe import MOST_STAMPED
from rescale_data.engine.stream import Stream
from rescale_data.errors import require, require_int
from rescale_data.layout.clock import Clock
from rescale_data.state import Ints


def require_countable(what: str, num_samples: int, num_logical_shards: int) -> None:
    """``ValueError`` where a run would have delivered more samples than the stamps of a state can tell (`STAMP`)."""
    most = MOST_STAMPED // num_logical_shards - 1
    if num_samples > most:
        raise ValueError(
            f"{what}: it would end at sample {num_samples}, and a state with num_logical_shards={num_logical_shards} counts up "
            f"to {most}. Give less."
        )


def skip(stream: Stream, num_micro_batches: int) -> None:
    """Leave them out as if they had been taken."""
    begins: list[tuple[int, Ints]] = []  # of epochs: micro batches left to skip, and where the run stands
    while num_micro_batches:
        verify = stream.setup.recipe.verify
        whole_epochs = stream.ended and not verify
        stream.move_on()
        if whole_epochs:
            begins = [*begins[-2:], (num_micro_batches, _numbers(stream))]
            num_micro_batches = _skip_epochs(stream, begins)
        leg = stream.begin()
        if leg is None:
            continue
        here = num_micro_batches if leg.stop is None else min(num_micro_batches, leg.stop - stream.u)
        if leg.left is None and not stream.repeat:  # only reading tells where the epoch ends
            here = 1
            stream.take()
        else:
            left = leg.left_at(stream.u)
            stream.pass_by(here, reads=left is None or num_micro_batches < left or verify)
        num_micro_batches -= here


def _skip_epochs(stream: Stream, begins: list[tuple[int, Ints]]) -> int:
    """Leave out whole epochs after two that moved the run by the same; the micro batches that are then left to skip, not 0."""
    num_micro_batches, now = begins[-1]
    whole_steps = (
        stream.layout.aligned or stream.setup.tail == "pad"
    )  # else what is dropped depends on the epochs before
    if len(begins) < 3 or not whole_steps or not stream.schema.epochs_are_alike(stream.table):
        return num_micro_batches
    (_, first), (before, second), _ = begins
    if (now - second != second - first).any():
        return num_micro_batches
    size = before - num_micro_batches
    epochs = (num_micro_batches - 1) // size  # the last of them ends where its last batch does
    _set(stream, now + epochs * (now - second))
    return num_micro_batches - epochs * size


def _numbers(stream: Stream) -> Ints:
    """All numbers of a run that is at the beginning of an epoch."""
    clock, counts = stream.clock, stream.standing
    numbers = [clock.samples, clock.origin, clock.step, clock.epoch, counts.dropped_samples, counts.padded_samples]
    return np.concatenate([stream.table.flatten(), np.array(numbers, dtype=np.int64)])


def _set(stream: Stream, numbers: Ints) -> None:
    samples, origin, step, epoch, dropped, padded = numbers[-6:].tolist()
    clock, counts = Clock(samples=samples, origin=origin, step=step, epoch=epoch), (dropped, padded)
    was_empty = stream.standing.was_empty
    standing = Standing(clock, stream.layout.owners, None, False, samples, was_empty, *counts)
    stream.go_to(standing, numbers[:-6].reshape(stream.table.shape))


def steps_from(at: int, stream: Stream, ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """What `DataLoader.exclude_steps` is given, checked, at a step of the run."""
    require(Iterable, "a list of (first, stop), such as [(3, 5)]", ranges=ranges)
    given = [*map(_steps, ranges)]
    for first, stop in given:
        what = f"exclude_steps([({first}, {stop})])"
        if not 0 <= first < stop:
            raise ValueError(f"{what}: give the first step, and the one after the last.")
        if first < at and (first, stop) not in stream.schema.excluded_steps:
            raise ValueError(f"{what}: the loader is at step {at}. Load a state from before.")
        require_countable(what, (stop + 1) * stream.layout.global_batch_size, stream.layout.num_logical_shards)
    return given


def _steps(given: object) -> tuple[int, int]:
    if not isinstance(given, list | tuple) or len(given) != 2:  # pyright: ignore[reportUnknownArgumentType]
        raise TypeError(
            f"exclude_steps takes a list of (first, stop), such as [(3, 5)], and was given {given!r} in it."
        )
    first, stop = require_int(first=given[0], stop=given[1])
    return first, stop
