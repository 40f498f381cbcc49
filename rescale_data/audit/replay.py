"""Replay the samples that a run served between two checkpoints: read them again from the first one."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch

from rescale_data.engine.feed import Traced
from rescale_data.engine.options import Options, Tail
from rescale_data.engine.reading import Reading
from rescale_data.engine.recipe import LOADER_FIELDS, Pipeline, Recipe
from rescale_data.engine.runner import Runner
from rescale_data.engine.schema import Schema
from rescale_data.engine.setup import set_up
from rescale_data.engine.states.codec import Saved, read
from rescale_data.engine.states.differences import differences, without_all, without_functions
from rescale_data.engine.states.statedict import merged_state_dict
from rescale_data.engine.stream import Stream, stream_of
from rescale_data.errors import DataStateError
from rescale_data.layout.layout import Layout
from rescale_data.nodes.form import EARLIER_KEY
from rescale_data.nodes.reader import Reader

State: TypeAlias = Saved


@dataclass(frozen=True)
class Served:
    """A sample that the run has served, with its step and its documents.

    Args:
        step: Of which global batch, as `DataLoader.step` counts them.
        sample: Its row in that, over all ranks.
        shard: The logical shard.
        documents: Where it comes from, a line a document: source, file and row.
    """

    step: int
    sample: int
    shard: int
    documents: list[str]


@dataclass(frozen=True)
class Interval:
    """Part of a run between two checkpoints.

    Args:
        before: The state of the first; `None`: the beginning of the run.
        after: That of the second.
        pipeline: Which the run had in between.
        skipped: What the run has left out, as ranges ``(first, stop)`` of samples.
        repeat, tail, num_workers: Of the loader; the last matters where the run was not aligned.
    """

    before: State | None
    after: State
    pipeline: Pipeline
    skipped: Sequence[tuple[int, int]]
    repeat: bool
    tail: Tail
    num_workers: int

    @property
    def first_step(self) -> int:
        return 0 if self.before is None else self.before.header["step"]

    def schema(self) -> Schema:
        """Return the schema of the pipeline, with the files that were known at the second checkpoint."""
        reading = self._readings(self.after.sizes, range(0), together=True)[0]
        reading.load_state_dict(self.after.state)
        return stream_of(reading).schema

    def replay(self, shards: Collection[int], first: int = 0, stop: int | None = None) -> Iterator[Served]:
        """Yield the samples of some logical shards in the steps ``first .. stop - 1`` between the two checkpoints.

        Raises:
            DataStateError: That is not how the run has come to its second checkpoint.
        """
        state, replayed = self.before.state if self.before is not None else None, set(shards)
        for sizes, until in self._size_changes():
            readings = self._readings(sizes, replayed, together=self._fits_one_rank(sizes))
            for reading in readings:
                if state is not None:
                    reading.load_state_dict(state)
                _skip(reading, first, until)
            for served in _replay(readings, until, self.skipped):
                if stop is not None and served.step >= stop:
                    replayed.clear()
                elif served.step >= first:
                    yield served
            state = merged_state_dict([stream_of(reading) for reading in readings])
        if state is None or not _reaches(read(state), self.after, sorted(replayed)):
            raise DataStateError(
                f"Read again from step {self.first_step}, the run does not come to its checkpoint of step "
                f"{self.after.header['step']}. Give repeat=, tail= and, if it was not aligned, num_workers= as its loader had "
                f"them. Else it had another pipeline or data in between, or a checkpoint is of an attempt that was given up."
            )

    def _size_changes(self) -> list[tuple[tuple[int, int, int], int]]:
        """Return the sizes (O, W, b) that the run had in turn, each with the sample count at which they ended."""
        after, now = self.after.header, self.after.sizes
        end, before = after["samples"], None if self.before is None else self.before.header
        if self.before is None or before is None or self.before.sizes[0] == now[0]:
            return [(now, end)]
        old, begun = self.before.sizes[0], (end - after["origin"]) % now[0]
        steps, samples = after["step"] - self.first_step, end - before["samples"] - begun
        num_old, rest = divmod(samples - steps * now[0], old - now[0])
        if rest or not 0 <= num_old <= steps:
            raise DataStateError(
                f"Between the steps {self.first_step} and {after['step']} the global batch was {old}, is {now[0]}, and was "
                f"something else: no checkpoint in between says what."
            )
        return [(self.before.sizes, before["samples"] + num_old * old), (now, end)]

    def _fits_one_rank(self, sizes: tuple[int, int, int]) -> bool:
        """True if one rank can replay all ranks: the run was aligned, and saved and skipped between whole steps."""
        states = [state for state in (self.before, self.after) if state is not None]
        whole = not any(state.clock.begun(state.sizes[0]) for state in states) and all(
            any((bound - state.header["samples"]) % state.sizes[0] == 0 for state in states)
            for bounds in self.skipped
            for bound in bounds
        )
        o, w, b = sizes
        layout = Layout(
            num_logical_shards=len(self.after.table),
            global_batch_size=o,
            dp_world_size=w,
            micro_batch_size=b,
            num_workers=self.num_workers,
        )
        return whole and layout.aligned

    def _readings(self, sizes: tuple[int, int, int], shards: Container[int], *, together: bool) -> list[Reading]:
        """Return a `Reading` for each dp rank of the run, or only one for all of them."""
        o, w, b = (sizes[0], 1, sizes[0]) if together else sizes
        return [self._reading(o, w, b, rank, 0 if together else self.num_workers, shards) for rank in range(w)]

    def _reading(self, o: int, w: int, b: int, rank: int, num_workers: int, shards: Container[int]) -> Reading:
        options = Options(
            global_batch_size=o,
            micro_batch_size=b,
            num_logical_shards=len(self.after.table),
            dp_rank=rank,
            dp_world_size=w,
            num_workers=num_workers,
            seed=self.after.header["seed"],
            repeat=self.repeat,
            tail=self.tail,
            verify=any(key.rpartition(".")[2] == Reader.PROOF.key for key in self.after.values),
        )
        setup = set_up(lambda shard: self.pipeline(replace(shard, provenance=True)), options)
        runner = Runner(setup.recipe, setup.schema)
        return Reading(Stream(setup, runner, Traced(runner, shards)))


def skipped_in(state: State) -> list[tuple[int, int]]:
    """Return the ranges ``(first, stop)`` of samples that a run has skipped up to a state."""
    return list(state.clock.skipped)


def pipeline_differences(pipeline: Pipeline, state: State) -> list[str]:
    """Return the parameters of a pipeline that differ from the pipeline of a saved state, in words."""
    n, seed, o = len(state.table), state.header["seed"], state.sizes[0]
    now = Schema(Recipe(pipeline, n, seed, False, global_batch_size=o).build(0)).pipeline
    pipelines = without_functions(state.header["pipeline"], now)
    return differences(*(without_all(each, EARLIER_KEY) for each in pipelines))


def _begun_samples(reading: Reading) -> int:
    """Return the number of samples, over all ranks, that an unfinished step has served."""
    stream = stream_of(reading)
    return stream.clock.begun(stream.layout.global_batch_size)


def _skip(reading: Reading, step: int, until: int) -> None:
    """Skip to the beginning of a step, but not beyond sample ``until``; in constant time if the pipeline allows it."""
    stream, begun = stream_of(reading), _begun_samples(reading)
    o = stream.layout.global_batch_size
    left = (until - stream.clock.samples + begun) // o
    num = min(step - reading.step, left) * o - begun
    if num > 0:
        reading.skip(num)


def _replay(readings: Sequence[Reading], until: int, skipped: Sequence[tuple[int, int]]) -> Iterator[Served]:
    """Yield all samples before sample ``until``, without the ranges that the run has skipped.

    Samples of shards that are not replayed have no documents.
    """
    streams = [stream_of(reading) for reading in readings]
    first_stream = streams[0]
    while first_stream.clock.samples < until:
        for stream in streams:
            while stream.begin() is None:
                stream.move_on()
        at = first_stream.clock.samples
        stop = next((stop for first, stop in skipped if first <= at < stop), at)
        if stop > at:
            for reading in readings:
                reading.skip(min(stop, until) - at)
            continue
        for rank, (reading, stream) in enumerate(zip(readings, streams, strict=True)):
            layout, step = stream.layout, stream.step
            row = (
                rank * layout.global_batch_size // layout.dp_world_size
                + _begun_samples(reading) // layout.dp_world_size
            )
            batch = stream.take()
            for place, (shard, lines) in enumerate(zip(batch.shards, batch.batch[: batch.num_real], strict=False)):
                yield Served(step, row + place, shard, lines)


def _reaches(state: State, after: State, shards: Sequence[int]) -> bool:
    """True if a replay ends where the run did: with the same samples of all shards, and positions of replayed shards."""
    samples, remainder = (field.key for field in LOADER_FIELDS)
    reached, wanted = state.values, after.values
    same_progress = torch.equal(reached[samples], wanted[samples]) and state.header["step"] == after.header["step"]
    return same_progress and all(
        torch.equal(reached[key][shards], rows[shards]) for key, rows in wanted.items() if key != remainder
    )
