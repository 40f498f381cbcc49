"""Replays the samples that a run served between two checkpoints: reads them again from the first checkpoint."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from rescale_data.engine.feed import SampleOriginFeed
from rescale_data.engine.options import Options, Tail
from rescale_data.engine.recipe import LOADER_FIELDS, Pipeline, Recipe
from rescale_data.engine.schema import Schema
from rescale_data.engine.setup import make_setup
from rescale_data.engine.states.codec import SavedState, decode
from rescale_data.engine.states.differences import differences, without_functions, without_history
from rescale_data.engine.states.growth import compare_sources
from rescale_data.engine.states.load import load_state_dict
from rescale_data.engine.states.statedict import merged_state_dict
from rescale_data.engine.stream import Stream
from rescale_data.errors import DataStateError
from rescale_data.layout.layout import is_aligned
from rescale_data.nodes.reader import Reader


@dataclass(frozen=True)
class Served:
    """A sample that the run has served, with its step and its documents.

    Args:
        step: The number of its global batch, as `DataLoader.step` counts them.
        sample: Its row in the global batch, over all ranks.
        shard: Its logical shard.
        documents: The place of each of its documents: source, file and row.
    """

    step: int
    sample: int
    shard: int
    documents: list[str]


@dataclass(frozen=True)
class ReplayInterval:
    """A part of a run between two checkpoints, whose samples `replay` reads again.

    Args:
        state_at_start: The state at its beginning; `None` at the beginning of the run.
        state_at_end: The state at its end.
        pipeline: The pipeline that the run had in between.
        skipped_ranges: The samples that the run has skipped, as ranges ``(first, stop)``.
        repeat, tail, num_workers: Arguments of the loader; ``num_workers`` matters if the run was not aligned.
    """

    state_at_start: SavedState | None
    state_at_end: SavedState
    pipeline: Pipeline
    skipped_ranges: Sequence[tuple[int, int]]
    repeat: bool
    tail: Tail
    num_workers: int

    @property
    def first_step(self) -> int:
        return 0 if self.state_at_start is None else self.state_at_start.header["step"]

    @property
    def stop_step(self) -> int:
        """The step after the last one that delivered a sample before the second checkpoint, even if not a whole step."""
        end = self.state_at_end
        return end.header["step"] + (end.clock.samples_in_begun_step(end.sizes[0]) > 0)

    def schema(self) -> Schema:
        """Return the schema of the pipeline, with the files that were known at the second checkpoint."""
        stream = self._make_streams(self.state_at_end.sizes, range(0), as_one_rank=True)[0]
        load_state_dict(stream, self.state_at_end.state)
        return stream.schema

    def replay(self, shards: Collection[int], from_step: int = 0, stop_step: int | None = None) -> Iterator[Served]:
        """Yield the samples of some logical shards in the steps ``from_step .. stop - 1`` between the two checkpoints.

        Raises:
            DataStateError: The replay does not end at the state of the second checkpoint.
        """
        state, replayed_shards = self.state_at_start.state if self.state_at_start is not None else None, set(shards)
        for sizes, end_sample in self._layout_size_changes():
            streams = self._make_streams(sizes, replayed_shards, as_one_rank=self._can_replay_on_one_rank(sizes))
            for stream in streams:
                if state is not None:
                    load_state_dict(stream, state)
                _skip_to_step(stream, from_step, end_sample)
            for served_sample in _replay(streams, end_sample, self.skipped_ranges):
                if stop_step is not None and served_sample.step >= stop_step:
                    replayed_shards.clear()
                elif served_sample.step >= from_step:
                    yield served_sample
            state = merged_state_dict(streams)
        if state is None or not _ends_like_run(decode(state), self.state_at_end, sorted(replayed_shards)):
            raise DataStateError(
                f"Read again from step {self.first_step}, the run does not come to its checkpoint of step "
                f"{self.state_at_end.header['step']}. Give repeat=, tail= and, if it was not aligned, num_workers= as its "
                f"loader had them. Else it had another pipeline, other data or another global batch in between, or a "
                f"checkpoint is of an attempt that was given up."
            )

    def _layout_size_changes(self) -> list[tuple[tuple[int, int, int], int]]:
        """Return each (global batch, dp world size, micro batch) that the run had in turn, with the sample count at its end."""
        header, sizes, start = self.state_at_end.header, self.state_at_end.sizes, self.state_at_start
        end_sample = header["samples"]
        if start is None or start.sizes == sizes:
            return [(sizes, end_sample)]
        old_batch, first_sample = start.sizes[0], start.header["samples"]
        if self.repeat and old_batch != sizes[0]:  # else the ends of epochs move the origin, too
            return [(start.sizes, header["origin"]), (sizes, end_sample)]
        num_steps = header["step"] - self.first_step
        last_step_end = end_sample - (end_sample - header["origin"]) % sizes[0]
        if last_step_end - first_sample == num_steps * sizes[0]:  # from the checkpoint on, which may lie within a step
            return [(sizes, end_sample)]
        first_sample -= start.clock.samples_in_begun_step(old_batch)
        if old_batch == sizes[0]:  # the step that was begun went on with its ranks
            return [(start.sizes, min(end_sample, first_sample + old_batch)), (sizes, end_sample)]
        num_old_steps, remainder = divmod(last_step_end - first_sample - num_steps * sizes[0], old_batch - sizes[0])
        if not remainder and 0 <= num_old_steps <= num_steps:
            return [(start.sizes, first_sample + num_old_steps * old_batch), (sizes, end_sample)]
        raise DataStateError(
            f"Between the steps {self.first_step} and {header['step']} the global batch was {old_batch}, is {sizes[0]}, "
            f"and was something else: no checkpoint in between says what."
        )

    def _can_replay_on_one_rank(self, sizes: tuple[int, int, int]) -> bool:
        """True if one rank can replay all: the topology did not affect the order, and saves and skips were at ends of steps."""
        end_states = [state for state in (self.state_at_start, self.state_at_end) if state is not None]
        at_step_boundaries = not any(state.clock.samples_in_begun_step(state.sizes[0]) for state in end_states) and all(
            any((sample_boundary - state.header["samples"]) % state.sizes[0] == 0 for state in end_states)
            for bounds in self.skipped_ranges
            for sample_boundary in bounds
        )
        return at_step_boundaries and is_aligned(len(self.state_at_end.table), *sizes, self.num_workers)

    def _make_streams(self, sizes: tuple[int, int, int], shards: Container[int], *, as_one_rank: bool) -> list[Stream]:
        """Return a stream for each dp rank of the run, or only one for all of them."""
        global_batch_size, dp_world_size, micro_batch_size = (sizes[0], 1, sizes[0]) if as_one_rank else sizes
        options = Options(
            global_batch_size=global_batch_size,
            micro_batch_size=micro_batch_size,
            num_logical_shards=len(self.state_at_end.table),
            dp_rank=0,
            dp_world_size=dp_world_size,
            num_workers=0 if as_one_rank else self.num_workers,
            seed=self.state_at_end.header["seed"],
            repeat=self.repeat,
            tail=self.tail,
            verify=any(key.rpartition(".")[2] == Reader.PROOF.key for key in self.state_at_end.values),
        )
        streams: list[Stream] = []
        for rank in range(dp_world_size):
            setup = make_setup(
                lambda shard: self.pipeline(replace(shard, provenance=True)), replace(options, dp_rank=rank)
            )
            streams.append(Stream(setup, SampleOriginFeed(setup.runner, shards)))
        return streams


def pipeline_differences(pipeline: Pipeline, state: SavedState) -> list[str]:
    """Describe the parameters and the files in which a pipeline differs from the pipeline of a saved state, a line for each."""
    num_shards, seed, global_batch_size = len(state.table), state.header["seed"], state.sizes[0]
    schema = Schema(Recipe(pipeline, num_shards, seed, False, global_batch_size=global_batch_size).build(0))
    pipelines = without_functions(state.header["pipeline"], schema.pipeline)
    differences_found = differences(*map(without_history, pipelines))
    try:
        added_files = {} if differences_found else compare_sources(schema, state.header["sources"]).added_files
    except DataStateError as error:
        return [str(error)]
    return differences_found or [f"{path} did not read {', '.join(names)}" for path, names in added_files.items()]


def _samples_of_open_step(stream: Stream) -> int:
    """Return the number of samples, over all ranks, that an unfinished step has served."""
    return stream.clock.samples_in_begun_step(stream.layout.global_batch_size)


def _skip_to_step(stream: Stream, step: int, end_sample: int) -> None:
    """Skip to the beginning of a step, but not beyond sample ``end_sample``; in constant time if the pipeline allows it."""
    num_in_open_step, global_batch_size = _samples_of_open_step(stream), stream.layout.global_batch_size
    num_steps_left = (end_sample - stream.clock.samples + num_in_open_step) // global_batch_size
    num_skipped = min(step - stream.step, num_steps_left) * global_batch_size - num_in_open_step
    if num_skipped > 0:
        stream.skip(num_skipped)


def _replay(streams: Sequence[Stream], end_sample: int, skip_ranges: Sequence[tuple[int, int]]) -> Iterator[Served]:
    """Yield all samples before sample ``end_sample``, without the ranges that the run has skipped.

    Samples of shards that are not replayed have no documents.
    """
    first_stream = streams[0]
    while first_stream.clock.samples < end_sample:
        for stream in streams:
            while stream.is_epoch_over():
                stream.begin_next_epoch()
        next_sample = first_stream.clock.samples
        skip_end = next((stop for start, stop in skip_ranges if start <= next_sample < stop), next_sample)
        if skip_end > next_sample:
            for stream in streams:
                stream.skip(min(skip_end, end_sample) - next_sample)
            continue
        for rank, stream in enumerate(streams):
            layout, step = stream.layout, stream.step
            first_row = (rank * layout.global_batch_size + _samples_of_open_step(stream)) // layout.dp_world_size
            batch = stream.take()
            for index, (shard, documents) in enumerate(zip(batch.shards, batch.batch[: batch.num_real], strict=False)):
                yield Served(step, first_row + index, shard, documents)


def _ends_like_run(state: SavedState, end_state: SavedState, shards: Sequence[int]) -> bool:
    """True if a replay ends like the run: all shards' sample counts and the positions of the replayed shards are equal."""
    samples, remainder_key = (field.key for field in LOADER_FIELDS)
    columns, target = state.values, end_state.values
    same_progress = torch.equal(columns[samples], target[samples]) and state.header["step"] == end_state.header["step"]
    return same_progress and all(
        torch.equal(columns[key][shards], rows[shards]) for key, rows in target.items() if key != remainder_key
    )
