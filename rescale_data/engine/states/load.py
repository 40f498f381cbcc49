"""Loads a state into a stream, and translates the state if the pipeline or its data have changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from rescale_data.engine.agreement import call_on_all_ranks
from rescale_data.engine.cursor import Cursor
from rescale_data.engine.ends import EpochEnds
from rescale_data.engine.recipe import (
    EPOCH_ENDED,
    FIRST_SLOT_COLUMN,
    NO_REMAINDER,
    REMAINDER_COLUMN,
    SAMPLES,
    DataHistories,
    History,
    path_name,
)
from rescale_data.engine.schema import NodeParameters, Schema, set_histories
from rescale_data.engine.skip import require_micro_batches, skip
from rescale_data.engine.states.change import apply_changes, check_changes, earlier_parameters, reform
from rescale_data.engine.states.check import StateTranslation, require_fit
from rescale_data.engine.states.codec import SavedState, decode, has_remainder, table_of
from rescale_data.engine.states.differences import log_changes, without_functions, without_history
from rescale_data.engine.states.growth import Growth, needed_manifests, with_added_files
from rescale_data.engine.states.statedict import whole_state
from rescale_data.engine.stream import Stream
from rescale_data.errors import DataStateError
from rescale_data.layout.clock import Clock
from rescale_data.layout.layout import Layout
from rescale_data.nodes import changing
from rescale_data.nodes.abilities import RereadsDocument
from rescale_data.nodes.base import Node
from rescale_data.nodes.below import is_endless, readers_of
from rescale_data.nodes.reader import Reader
from rescale_data.state import Ints, position_slots, require_limits


def load_state_dict(stream: Stream, state: Mapping[str, Any], delivered: int = 0) -> None:
    """Load a state into a stream, to continue from it; if it does not fit, raise ``DataStateError`` and change nothing.

    Args:
        delivered: The number of samples that the topology of the state delivered after it.
    """
    saved = decode(whole_state(state))
    translation, clock = require_fit(stream, saved.header), saved.clock
    pipeline_changed = saved.header["pipeline"] != stream.schema.pipeline
    table = table_of(stream.schema, saved, translation.added)
    had_remainder = has_remainder(table)
    _require_common_end(table)
    _require_valid_rows(stream.schema, table)
    if delivered:
        _refuse_changes(stream.schema, translation, delivered)
        histories_then = needed_manifests(translation.growth.all_histories(stream.schema), stream.schema, table)
        forms_then = _earlier_forms(stream, translation.pipeline, table)
        clock, table = _skip_delivered(stream, saved, clock, table, {**histories_then, **forms_then}, delivered)
        had_remainder = has_remainder(table)
    forms = _translate_positions(stream, translation.pipeline, table) if pipeline_changed else {}
    histories = translation.growth.histories
    if translation.growth.added_files:
        histories = _join_added_files(stream, translation.growth, table, forms)
    loaded_clock = _clock_after_load(stream, stream.layout, clock, table, saved.sizes, had_remainder=had_remainder)
    stream.schema.adopt({**needed_manifests(histories, stream.schema, table), **forms})  # from here on nothing raises
    if pipeline_changed:
        _warn_of_changes(stream, translation, apply_changes(stream.schema, table))
    stream.load(table, loaded_clock)
    _warn_of_mixed_epochs(stream, table)
    if loaded_clock.origin != clock.origin and not stream.has_short_tail():  # the end of the epoch has its own warning
        stream.ranks.warn(
            "The state was saved with global_batch_size=%d, dp_world_size=%d, micro_batch_size=%d in the middle of a step, or "
            "with another global batch: global batches begin anew at sample %d. loader.step goes on from %d.",
            *saved.sizes,
            loaded_clock.samples,
            loaded_clock.step,
        )


def _translate_positions(stream: Stream, saved: NodeParameters, table: Ints) -> dict[str, History]:
    """Translate positions from an earlier pipeline to the current one; return the earlier parameters that nodes need."""
    log_changes(stream, saved)
    check_changes(stream.schema, saved, table)
    form_histories = _earlier_forms(stream, saved, table)
    if without_history(saved) != without_history(stream.schema.pipeline):
        # The remainder counts samples of the earlier pipeline
        table[:, REMAINDER_COLUMN][table[:, REMAINDER_COLUMN] != EPOCH_ENDED] = NO_REMAINDER
    return form_histories


def _earlier_forms(stream: Stream, saved: NodeParameters, table: Ints) -> dict[str, History]:
    """Adapt positions to the current sample format; return the earlier formats and weights that nodes still need."""
    return {**reform(stream, saved, table), **earlier_parameters(stream.schema, saved, table)}


def _refuse_changes(schema: Schema, translation: StateTranslation, num_delivered: int) -> None:
    """Raise ``DataStateError`` if the samples to skip were delivered by another pipeline than the current one."""
    saved, current = map(without_history, without_functions(translation.pipeline, schema.pipeline))
    if saved != current:
        raise DataStateError(
            f"load_state_dict(state, delivered={num_delivered}): the pipeline has changed since the state was saved, "
            f"and what was delivered after it was not of this pipeline. Build the loader as it was then, load the state, save, "
            f"and load that with the change."
        )


def _skip_delivered(
    stream: Stream, saved: SavedState, clock: Clock, table: Ints, histories: DataHistories, num_samples: int
) -> tuple[Clock, Ints]:
    """Skip samples that were delivered after a save, in its topology; return clock and table (collective if rows are read).

    Args:
        histories: The data of each source, the forms and weights, as they were when these samples were delivered.
    """
    setup, schema, n = stream.setup, stream.schema, len(table)
    (o, w, b), k = saved.sizes, saved.header["num_workers"]
    layout = Layout(num_logical_shards=n, global_batch_size=o, dp_world_size=w, micro_batch_size=b, num_workers=k)
    call, whole_steps = f"load_state_dict(state, delivered={num_samples})", setup.options.balance is not None
    num_micro_batches = require_micro_batches(call, num_samples, layout, clock, whole_steps=whole_steps)
    clock = _clock_after_load(stream, layout, clock, table, (o, w, b), had_remainder=has_remainder(table))
    ranks = setup.ranks.named("load")
    saved_counts = {name: value for name, value in saved.header.items() if isinstance(value, int)}
    ranks.require_same({"delivered": num_samples, **saved_counts}, "loaded states")
    ends = EpochEnds(replace(setup, layout=layout, ranks=ranks))
    ends.owned = np.arange(n) if ranks.simulated else ends.owned
    histories_before = schema.histories
    schema.adopt(histories)
    try:
        cursor = skip(Cursor.from_clock(clock, table, ends.owners, layout), ends, num_micro_batches)
        return cursor.clock_now(layout), ranks.merge(cursor.table, cursor.owners)
    finally:
        schema.adopt(histories_before)


def _clock_after_load(
    stream: Stream, layout: Layout, clock: Clock, table: Ints, saved_sizes: tuple[int, int, int], *, had_remainder: bool
) -> Clock:
    """Return the clock with which the run goes on; clear the table's remainder if the current topology cannot continue it."""
    loaded_clock = clock.after_load(saved_sizes, layout)
    if had_remainder and not has_remainder(table):
        loaded_clock = clock.restarted(saved_sizes[0])
    has_ended = bool((table[:, REMAINDER_COLUMN] == EPOCH_ENDED).all())
    # An endless stream is never at the end of an epoch
    if stream.setup.recipe.repeat and (table[:, REMAINDER_COLUMN] != NO_REMAINDER).any():
        loaded_clock = clock.next_epoch(saved_sizes[0]) if has_ended else clock.restarted(saved_sizes[0])
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
    for reader, slot in readers_of(schema.root, FIRST_SLOT_COLUMN):
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
    readers = readers_of(stream.schema.root, FIRST_SLOT_COLUMN)
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


def _join_added_files(stream: Stream, growth: Growth, table: Ints, forms: Mapping[str, History]) -> dict[str, History]:
    epochs_read = _last_epochs_read(
        stream, table, {**growth.all_histories(stream.schema), **forms}, list(growth.added_files)
    )
    histories = with_added_files(growth, stream.schema, table, epochs_read)
    for path, added in growth.added_files.items():
        epoch = histories[path][-1][0]
        stream.ranks.warn(
            "%d files were added to the source %s since the state was saved (%s): they join at epoch %d, the next that no "
            "logical shard has begun.", len(added), path, ", ".join(added[:3]) + ("" if len(added) <= 3 else ", ..."), epoch,
        )  # fmt: skip
    return histories


def _last_epochs_read(stream: Stream, table: Ints, histories: DataHistories, paths: Sequence[str]) -> list[int]:
    """Return for each source the last epoch of which a shard has to read rows again to resume, -1 for none (collective).

    Shards read again to go on within windows and documents that were delivered in part.
    """
    ranks = stream.ranks.named("load")
    shards = range(len(table)) if ranks.simulated else stream.ends.owned.tolist()

    def own_last_epochs() -> list[int]:
        by_shard = [_last_epochs_of(stream, shard, table[[shard]], histories) for shard in shards]
        return [max((epochs.get(path, -1) for epochs in by_shard), default=-1) for path in paths]

    return ranks.gather_ints(call_on_all_ranks(ranks, own_last_epochs)).max(axis=0).tolist()


def _last_epochs_of(stream: Stream, shard: int, row: Ints, histories: DataHistories) -> dict[str, int]:
    """Return, for each source, the last epoch that a shard reads again to resume within a window or document.

    Args:
        row: ``int64[1, columns]``, a copy of the shard's row in the table that is loaded.
        histories: The data of each source, for that table.
    """
    if not _begun_nodes(stream.schema, stream.schema.root, row):
        return {}
    root = stream.setup.recipe.build(shard)
    set_histories(root, histories)
    changing.apply_changes_at(
        root, row[0, FIRST_SLOT_COLUMN:].data
    )  # what needs an old list begins again, and is not read
    for node, position in _begun_nodes(stream.schema, root, row):
        node.bind(position.copy().data)
        with suppress(StopIteration):
            if isinstance(node, RereadsDocument):
                node.reread_document()
            else:
                next(node)
    return {path_name(path): node.farthest_epoch for path, node in root.walk() if isinstance(node, Reader)}


def _begun_nodes(schema: Schema, root: Node[Any], row: Ints) -> list[tuple[Node[Any], Ints]]:
    """Return the nodes of a shard that stand within a partly delivered document or window, and their positions.

    A node that `reveals_next` does as soon as it has moved in its epoch: a sample says something of the next one.
    """
    begun_nodes: list[tuple[Node[Any], Ints]] = []
    fresh_nodes = schema.nodes_with_slots(schema.fresh_table(1))
    for (_, node, positions), (*_, fresh_positions) in zip(
        schema.nodes_with_slots(row, root), fresh_nodes, strict=True
    ):
        if not node.READS_AHEAD:
            continue
        is_begun = bool(positions[:, position_slots(node.FIELDS)].any())
        if isinstance(node, RereadsDocument) and node.reveals_next:
            # The last sample of an epoch says nothing of the next epoch
            is_in_epoch = is_endless(node) or any(positions[0, slot + 1] for _, slot in readers_of(node, 0))
            is_begun |= is_in_epoch and bool((positions != fresh_positions).any())
        if is_begun:
            begun_nodes.append((node, positions[0]))
    return begun_nodes


def _warn_of_changes(stream: Stream, translation: StateTranslation, shards_begun_again: int) -> None:
    if translation.added or translation.removed:
        stream.ranks.warn(
            "The pipeline has changed since the state was saved. These sources begin with their first row: %s. These are gone, "
            "with their positions: %s.",
            [child.name for child in translation.added],
            [child.name for child in translation.removed],
        )
    if shards_begun_again:
        stream.ranks.warn(
            "%d of %d logical shards were within a document or window that they cannot go on in without the sources or the "
            "blocklist that are gone: they begin it again, so some documents are repeated. To avoid this for a source give it "
            "weight 0, train on until those windows have passed, and remove it then.",
            shards_begun_again,
            stream.layout.num_logical_shards,
        )
