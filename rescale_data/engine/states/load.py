"""Loads a state into a stream: compares it with the loader, and translates it if the pipeline or its data have changed.

A plain ``dcp.load`` raises by itself if the number of logical shards or columns differs ("Size mismatch between saved ... and
current ..."). It does so before our code runs, and does not say what to do. So `check_state_fits` reads the header alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rescale_data.engine.cursor import Cursor
from rescale_data.engine.ends import EpochEndFinder
from rescale_data.engine.moves import require_micro_batches, skip
from rescale_data.engine.recipe import (
    EPOCH_ENDED,
    FIRST_SLOT,
    NO_REMAINDER,
    REMAINDER_COLUMN,
    SAMPLES,
    STAMP,
    VersionLog,
    VersionLogs,
)
from rescale_data.engine.schema import NodeParameters, Schema
from rescale_data.engine.states.added_files import join_added_files
from rescale_data.engine.states.change import (
    ChangedChild,
    adapt_positions,
    apply_changes,
    fixed_parameters,
    node_changes,
)
from rescale_data.engine.states.codec import BALANCED, SavedState, decode, fields_in, has_remainder, table_of
from rescale_data.engine.states.differences import differences, log_changes, without_functions, without_history
from rescale_data.engine.states.growth import Growth, compare_sources, needed_manifests
from rescale_data.engine.states.statedict import whole_state
from rescale_data.engine.stream import HasStream, Stream, stream_of
from rescale_data.errors import DataStateError, require_type
from rescale_data.layout.clock import Clock
from rescale_data.layout.layout import Layout
from rescale_data.nodes.below import readers_of
from rescale_data.state import Ints, require_limits, slot_offsets

_FIXED_VALUE_ADVICE = {
    "num_logical_shards": "It is fixed for a whole run, and its default follows global_batch_size: give the loader the saved "
    "one (the world size, the workers, the micro batch and the global batch may all change).",
    "seed": "Another seed is another order: build the loader with the saved one, or begin a new run.",
}
_DIFFERENCE_ADVICE = {
    "fields": "The pipeline keeps other state than the one that was saved. Build the pipeline that was saved, with the saved "
    "verify= (True keeps a digest a reader), or begin a new run.",
    "parameters of the pipeline": "They change the order or the content of samples: use the saved ones, or begin a new run. "
    "What may change between segments may not below other nodes of torchdata than Mapper: these keep what they have read.",
}


@dataclass(frozen=True)
class StateTranslation:
    """The parameters of the pipeline in a state, translated to the current pipeline, and the changes since the save.

    Args:
        added, removed: The child nodes that have come and gone. Nodes that have come have delivered nothing.
        growth: The changes of the data.
    """

    pipeline: NodeParameters
    added: list[ChangedChild]
    removed: list[ChangedChild]
    growth: Growth


def load_state_dict(stream: Stream, state: Mapping[str, Any], delivered: int = 0) -> None:
    """Load a state into a stream, to continue from it; if it does not fit, raise ``DataStateError`` and change nothing.

    Args:
        delivered: The number of samples that the topology of the state delivered after it.
    """
    saved = decode(whole_state(state))
    translated, clock = _require_fit(stream, saved.header), saved.clock
    pipeline_changed = saved.header["pipeline"] != stream.schema.pipeline
    table = table_of(stream.schema, saved, translated.added)
    had_remainder = has_remainder(table)
    _require_common_end(table)
    _require_valid_rows(stream.schema, table)
    if delivered:
        _refuse_changes(stream.schema, translated, delivered)
        saved_manifests = needed_manifests(translated.growth.all_histories(stream.schema), stream.schema, table)
        old_formats = adapt_positions(stream, translated.pipeline, table)
        clock, table = _skip_delivered(stream, saved, clock, table, {**saved_manifests, **old_formats}, delivered)
        had_remainder = has_remainder(table)
    formats: dict[str, VersionLog] = {}
    if pipeline_changed:
        log_changes(stream, translated.pipeline)
        formats = adapt_positions(stream, translated.pipeline, table)
        if without_history(translated.pipeline) != without_history(stream.schema.pipeline):
            # The remainder counts samples of the earlier pipeline
            table[:, REMAINDER_COLUMN][table[:, REMAINDER_COLUMN] != EPOCH_ENDED] = NO_REMAINDER
    histories = join_added_files(stream, translated.growth, table, formats)
    loaded_clock = _clock_after_load(stream, stream.layout, clock, table, saved.sizes, had_remainder=had_remainder)
    # From here on nothing raises
    stream.schema.use_histories({**needed_manifests(histories, stream.schema, table), **formats})
    if pipeline_changed:
        _warn_of_changes(stream, translated, apply_changes(stream.schema, table))
    stream.load(table, loaded_clock)
    _warn_of_mixed_epochs(stream, table)
    is_new_step = clock.samples_in_begun_step(saved.sizes[0]) > 0 or saved.sizes[0] != stream.layout.global_batch_size
    is_new_step &= loaded_clock.origin != clock.origin
    if is_new_step and not stream.has_short_tail():  # the end of the epoch has its own warning
        stream.ranks.warn(
            "The state was saved with global_batch_size=%d, dp_world_size=%d, micro_batch_size=%d in the middle of a step, or "
            "with another global batch: global batches begin anew at sample %d. loader.step goes on from %d.",
            *saved.sizes,
            loaded_clock.samples,
            loaded_clock.step,
        )


# The state and the loader are compared


def check_state_fits(header: Mapping[str, Any], loader: HasStream) -> None:
    """Raise ``DataStateError`` if a saved data state does not fit the loader, or only `load_changed` can load it."""
    require_type(HasStream, "the loader that is to load it", loader=loader)
    stream = stream_of(loader)
    translated = _require_fit(stream, header)
    if slot_offsets(fields_in(header))[-1] == stream.table.shape[1] + 1:
        return
    added, removed = ([child.name for child in children] for children in (translated.added, translated.removed))
    raise DataStateError(
        f"The checkpoint keeps the table of the sources in another shape than the loader does: {added} are new and {removed} "
        f'gone. dcp.load refuses that ("Size mismatch"). Leave the loader out of the dict that dcp.load is given, and call '
        f"rescale_data.checkpoint.load_changed(path, loader): new sources begin with their first row, the others go on."
    )


def _require_fit(stream: Stream, header: Mapping[str, Any]) -> StateTranslation:
    """Raise ``DataStateError`` if a state belongs to another run: its N, seed, columns, sources or pipeline differ."""
    current = {"num_logical_shards": stream.layout.num_logical_shards, "seed": stream.setup.recipe.seed}
    for name, advice in _FIXED_VALUE_ADVICE.items():
        if header[name] != current[name]:
            raise DataStateError(
                f"The state was saved with {name}={header[name]}, the loader has {name}={current[name]}. {advice}"
            )
    schema, pipeline = stream.schema, stream.schema.pipeline
    removed, added = node_changes(schema, header["pipeline"])

    def translate(saved: Mapping[str, Any], current: Mapping[str, Any]) -> dict[str, Any]:
        kept = {key: value for key, value in saved.items() if not any(child.owns(key) for child in removed)}
        return {**kept, **{key: value for key, value in current.items() if any(child.owns(key) for child in added)}}

    saved_fields, fields = (
        {field.key: field.describe() for field in fields} for fields in (fields_in(header), (STAMP, *schema.fields))
    )
    _require_same("fields", translate(saved_fields, fields), fields)
    growth = compare_sources(schema, translate(header["sources"], json.loads(schema.sources_json)))
    saved_pipeline = translate(header["pipeline"], pipeline)
    pipelines = without_functions(saved_pipeline, pipeline)
    _require_same("parameters of the pipeline", *(fixed_parameters(schema, nodes) for nodes in pipelines))
    return StateTranslation(saved_pipeline, added, removed, growth)


def _require_same(name: str, saved: Any, current: Any) -> None:
    difference_lines = differences(saved, current)
    if difference_lines:
        raise DataStateError(
            f"The {name} differ from those of the checkpoint: {'; '.join(difference_lines)}. {_DIFFERENCE_ADVICE[name]}"
        )


# Positions and counts are translated


def _refuse_changes(schema: Schema, translated: StateTranslation, num_delivered: int) -> None:
    """Raise ``DataStateError`` if the samples to skip were delivered by another pipeline than the current one."""
    saved, current = map(without_history, without_functions(translated.pipeline, schema.pipeline))
    if saved != current:
        raise DataStateError(
            f"load_state_dict(state, delivered={num_delivered}): the pipeline has changed since the state was saved, "
            f"and what was delivered after it was not of this pipeline. Build the loader as it was then, load the state, save, "
            f"and load that with the change."
        )


def _skip_delivered(
    stream: Stream, saved: SavedState, clock: Clock, table: Ints, histories: VersionLogs, num_samples: int
) -> tuple[Clock, Ints]:
    """Skip samples that were delivered after a save, in its topology; return clock and table (collective if rows are read).

    Args:
        histories: The data of each source, the formats and weights, as they were when these samples were delivered.
    """
    setup, schema, n = stream.setup, stream.schema, len(table)
    (o, w, b), k = saved.sizes, saved.header["num_workers"]
    layout = Layout(num_logical_shards=n, global_batch_size=o, dp_world_size=w, micro_batch_size=b, num_workers=k)
    call = f"load_state_dict(state, delivered={num_samples})"
    whole_steps = setup.options.balance is not None or BALANCED in saved.header
    num_micro_batches = require_micro_batches(call, num_samples, layout, clock, whole_steps=whole_steps)
    clock = _clock_after_load(stream, layout, clock, table, (o, w, b), had_remainder=has_remainder(table))
    ranks = setup.ranks.for_purpose("load")
    saved_counts = {name: value for name, value in saved.header.items() if isinstance(value, int)}
    ranks.require_same({"delivered": num_samples, **saved_counts}, "loaded states")
    ends = EpochEndFinder(replace(setup, layout=layout, ranks=ranks))
    ends.owned = np.arange(n) if ranks.simulated else ends.owned
    histories_before = schema.histories
    schema.use_histories(histories)
    try:
        cursor = skip(Cursor.from_clock(clock, table, ends.owners, layout), ends, num_micro_batches)
        return cursor.clock_now(layout), ranks.merge(cursor.table, cursor.owners)
    finally:
        schema.use_histories(histories_before)


def _clock_after_load(
    stream: Stream, layout: Layout, clock: Clock, table: Ints, saved_sizes: tuple[int, int, int], *, had_remainder: bool
) -> Clock:
    """Return the clock with which the run goes on; clear the table's remainder if the current topology cannot continue it."""
    loaded_clock = clock.after_load(saved_sizes, layout)
    if had_remainder and not has_remainder(table):
        loaded_clock = clock.with_origin_now(saved_sizes[0])
    has_ended = bool((table[:, REMAINDER_COLUMN] == EPOCH_ENDED).all())
    # An endless stream is never at the end of an epoch
    if stream.setup.recipe.repeat and (table[:, REMAINDER_COLUMN] != NO_REMAINDER).any():
        loaded_clock = clock.next_epoch(saved_sizes[0]) if has_ended else clock.with_origin_now(saved_sizes[0])
    if stream.setup.recipe.repeat or (loaded_clock != clock and not has_ended):
        table[:, REMAINDER_COLUMN] = NO_REMAINDER
    return loaded_clock


def _require_common_end(table: Ints) -> None:
    ended = table[:, REMAINDER_COLUMN] == EPOCH_ENDED
    if ended.any() and not ended.all():
        raise DataStateError(
            f"By the state an epoch has ended for {int(ended.sum())} of {len(table)} logical shards, which happens to all at "
            f"once: it was changed, or is that of several runs. Load another checkpoint."
        )


def _require_valid_rows(schema: Schema, table: Ints) -> None:
    """Raise ``DataStateError`` if a number in the table is out of range, or a reader is past the last row of its source."""
    require_limits(schema.fields, table, "logical shard {}")
    for reader, slot in readers_of(schema.root, FIRST_SLOT):
        epochs, rows = table[:, slot], table[:, slot + 1]
        is_past_end = rows > reader.source.num_rows
        if is_past_end.any():
            shard, source = int(is_past_end.argmax()), reader.source
            raise DataStateError(
                f"By the state logical shard {shard} has delivered {table[shard, SAMPLES]} samples and stands at row "
                f"{rows[shard]} of epoch {epochs[shard]} of {source.name}, which has {source.num_rows} rows: it was changed. "
                f"Load another one."
            )


def _warn_of_mixed_epochs(stream: Stream, table: Ints) -> None:
    """Warn if a loader with epochs loads the state of an endless stream whose shards are in different epochs."""
    readers = readers_of(stream.schema.root, FIRST_SLOT)
    if stream.setup.recipe.repeat or len(readers) != 1 or readers[0][0].rows.is_small:
        return
    ((_, slot),) = readers
    begun_epochs = table[table[:, slot + 1] > 0, slot]
    if len(begun_epochs) and begun_epochs.min() != begun_epochs.max():
        stream.ranks.warn(
            "The state is that of an endless stream (repeat=True), whose logical shards are in the epochs %d to %d. With "
            "repeat=False they stay so many apart: an epoch of the loader is one of each shard, in which some rows come twice "
            "and others not at all. Go on with repeat=True, or switch where all are in one epoch.",
            begun_epochs.min(),
            begun_epochs.max(),
        )


def _warn_of_changes(stream: Stream, translated: StateTranslation, shards_begun_again: int) -> None:
    if translated.added or translated.removed:
        stream.ranks.warn(
            "The pipeline has changed since the state was saved. These sources begin with their first row: %s. These are gone, "
            "with their positions: %s.",
            [child.name for child in translated.added],
            [child.name for child in translated.removed],
        )
    if shards_begun_again:
        stream.ranks.warn(
            "%d of %d logical shards were within a document or window that they cannot go on in without the sources or the "
            "blocklist that are gone: they begin it again, so some documents are repeated. To avoid this for a source give it "
            "weight 0, train on until those windows have passed, and remove it then.",
            shards_begun_again,
            stream.layout.num_logical_shards,
        )
