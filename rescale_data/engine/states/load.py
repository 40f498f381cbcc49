"""Loading a state: what it becomes where a pipeline or its data have changed, and where the run goes on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from rescale_data.engine.agreement import together
from rescale_data.engine.group import require_whole_round
from rescale_data.engine.ranks.ranks import Ranks
from rescale_data.engine.recipe import (
    DEALT,
    ENDED,
    EXCLUDED_STEPS,
    FIRST_SLOT,
    IN_STEP,
    SAMPLES,
    STRINGS,
    UNDEALT,
    Histories,
    History,
    path_name,
)
from rescale_data.engine.schema import Nodes, Schema
from rescale_data.engine.states.change import (
    Fitted,
    check_changes,
    earlier,
    reform,
    settle,
)
from rescale_data.engine.states.check import require_fit
from rescale_data.engine.states.differences import say_changes, steps_left_out, without_all
from rescale_data.engine.states.growth import Growth, begin_next_epoch, joined, needed
from rescale_data.engine.states.statedict import INTS, RankRows
from rescale_data.engine.states.table import is_dealt, table_of
from rescale_data.engine.stream import Stream
from rescale_data.errors import DataStateError
from rescale_data.layout.clock import Clock
from rescale_data.nodes.below import readers_of
from rescale_data.nodes.form import BEFORE
from rescale_data.state import Ints


def load_state_dict(stream: Stream, state: Mapping[str, Any]) -> None:
    """Go on from a state in either form; ``DataStateError`` where it does not fit, and then nothing has changed."""
    _require_state(state)
    shards, fitted, clock = _whole(stream.ranks, state["shards"]), require_fit(stream, state), _clock(state)
    pipelines = json.loads(state["pipeline"]), stream.schema.pipeline
    changed = _differ(*pipelines, EXCLUDED_STEPS, IN_STEP)
    table = table_of(stream.schema, {**state, "shards": shards}, fitted.added)
    was_dealt = is_dealt(table)
    _require_one_end(table)
    _require_rows(stream.schema, table, bounded=not fitted.growth.changed)
    forms = _change(stream, fitted.pipeline, table) if changed else {}
    loaded = _place(stream, clock, table, _sizes(state), was_dealt=was_dealt)
    excluded = steps_left_out(stream, fitted.pipeline, loaded.global_step(stream.layout.global_batch_size))
    moved, histories = loaded, fitted.growth.histories
    if fitted.growth.changed:
        moved, histories = _begin_next_epoch(stream, fitted.growth, table, loaded)
    elif fitted.growth.grown:
        histories = _join(stream, fitted.growth, table)
    stream.schema.exclude_steps(excluded)  # from here on nothing is refused
    stream.schema.adopt({**needed(histories, stream.schema, table), **forms})
    begun_again = settle(stream.schema, table) if changed or fitted.growth.changed else 0
    if changed:
        _report(stream, fitted, begun_again)
    stream.load(table, moved)
    _warn_of_epochs(stream, table)
    if loaded.origin != clock.origin and not stream.is_short():  # that end has its own warning
        stream.ranks.warn(
            "The state was saved with global_batch_size=%d, dp_world_size=%d, micro_batch_size=%d in the middle of a step, or "
            "with another global batch: global batches begin anew at sample %d. loader.step goes on from %d.",
            *_sizes(state),
            loaded.samples,
            loaded.step,
        )


def _require_state(state: Mapping[str, Any]) -> None:
    if not isinstance(state, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            f"The state is a {type(state).__name__}. Give what loader.state_dict() returned, or DCP loaded into it."
        )
    missing = sorted({"shards", *INTS, *STRINGS} - set(state))
    if missing:
        raise DataStateError(
            f"The state lacks {missing}. Give what loader.state_dict() returned, or DCP loaded into it."
        )


def _sizes(state: Mapping[str, Any]) -> tuple[int, int, int]:
    """O, W and b of the save."""
    return int(state["global_batch_size"]), int(state["dp_world_size"]), int(state["micro_batch_size"])


def _change(stream: Stream, saved: Nodes, table: Ints) -> dict[str, History]:
    """Take the positions of another pipeline, changed where they depend on it; what nodes have to know of that one."""
    say_changes(stream, saved)
    check_changes(stream.schema, saved, table)
    forms = {**reform(stream, saved, table), **earlier(stream.schema, saved, table)}
    if _differ(saved, stream.schema.pipeline, BEFORE, EXCLUDED_STEPS, IN_STEP):
        table[:, DEALT][table[:, DEALT] != ENDED] = UNDEALT  # what was dealt are samples of the pipeline before
    return forms


def _place(stream: Stream, clock: Clock, table: Ints, saved: tuple[int, int, int], *, was_dealt: bool) -> Clock:
    """Where the run goes on in its steps; what is dealt in the table goes where it does not hold there."""
    loaded = clock.loaded(saved, stream.layout)
    require_whole_round(stream.schema, table, clock, loaded, saved[0])
    if was_dealt and not is_dealt(table):
        loaded = clock.restarted(saved[0])
    ended = bool((table[:, DEALT] == ENDED).all())
    if stream.repeat and (table[:, DEALT] != UNDEALT).any():  # an endless stream has no end of an epoch to be at
        loaded = clock.next_epoch(saved[0]) if ended else clock.restarted(saved[0])
    if stream.repeat or (loaded != clock and not ended):
        table[:, DEALT] = UNDEALT
    return loaded


def _require_one_end(table: Ints) -> None:
    ended = table[:, DEALT] == ENDED
    if ended.any() and not ended.all():
        raise DataStateError(
            f"By the state an epoch has ended for {int(ended.sum())} of {len(table)} logical shards, which happens to all at "
            f"once: it was changed, or is that of several runs. Load another checkpoint."
        )


def _require_rows(schema: Schema, table: Ints, *, bounded: bool) -> None:
    """``DataStateError`` of a reader that stands where its source, unless it has changed since, has no row."""
    for reader, slot in readers_of(schema.root, FIRST_SLOT):
        epoch, row = table[:, slot], table[:, slot + 1]
        wrong = (epoch < 0) | (row < 0) | ((row > reader.source.num_rows) & bounded) | (table[:, SAMPLES] < 0)
        if wrong.any():
            at, source = int(wrong.argmax()), reader.source
            raise DataStateError(
                f"By the state logical shard {at} has delivered {table[at, SAMPLES]} samples and stands at row {row[at]} "
                f"of epoch {epoch[at]} of {source.name}, which has {source.num_rows} rows: it was changed. Load another one."
            )


def _warn_of_epochs(stream: Stream, table: Ints) -> None:
    """Of an endless stream's shards, each in an epoch of its own, where the loader has epochs."""
    readers = readers_of(stream.schema.root, FIRST_SLOT)
    if stream.repeat or len(readers) != 1 or readers[0][0].rows.is_small:
        return
    ((_, slot),) = readers
    begun = table[table[:, slot + 1] > 0, slot]
    if len(begun) and begun.min() != begun.max():
        stream.ranks.warn(
            "The state is that of an endless stream (repeat=True), whose logical shards are in the epochs %d to %d. With "
            "repeat=False they stay so many apart: an epoch of the loader is one of each shard, in which some rows come twice "
            "and others not at all. Go on with repeat=True, or switch where all are in one epoch.",
            begun.min(),
            begun.max(),
        )


def _differ(saved: Nodes, now: Nodes, *apart: str) -> bool:
    """Whether parameters of two pipelines differ, but for some."""
    return without_all(saved, *apart) != without_all(now, *apart)


def _whole(ranks: Ranks, shards: Any) -> dict[str, torch.Tensor]:
    """The table with all rows (collective where it is that of one rank)."""
    if isinstance(shards, RankRows):
        return shards.whole()
    if not isinstance(shards, Mapping):
        raise DataStateError(
            f"'shards' of the state is a {type(shards).__name__}, not a dict of tensors. Give what loader.state_dict() "
            f"returned."
        )
    for value in shards.values():
        if not isinstance(value, torch.Tensor):
            raise DataStateError(f"A field of the state is a {type(value).__name__}, not a tensor.")
    return {key: ranks.whole(value) for key, value in shards.items()}


def _clock(state: Mapping[str, Any]) -> Clock:
    """Format version 1 has, under "step", the steps before `origin`."""
    counts = {name: int(state[name]) for name in ("samples", "origin", "step", "epoch")}
    if state["version"] > 1:
        counts["step"] -= (counts["samples"] - counts["origin"]) // int(state["global_batch_size"])
    return Clock(**counts, in_step=IN_STEP in json.loads(state["pipeline"])[path_name(())])


def _join(stream: Stream, growth: Growth, table: Ints) -> dict[str, History]:
    histories = joined(growth, stream.schema, table, partial(_reached, stream, table))
    for path, added in growth.grown.items():
        since = histories[path][-1][0]
        stream.ranks.warn(
            "%d files were added to the source %s since the state was saved (%s): they join at epoch %d, the next that no "
            "logical shard has begun.", len(added), path, ", ".join(added[:3]) + ("" if len(added) <= 3 else ", ..."), since,
        )  # fmt: skip
    return histories


def _reached(stream: Stream, table: Ints, histories: Histories, paths: Sequence[str]) -> list[int]:
    """Of each of these sources the last epoch that is read again to go on within windows and documents that have begun; -1:
    none is (collective where something has begun)."""
    begun, ranks = stream.schema.begun(table), stream.ranks

    def farthest() -> list[int]:
        found = [[-1] * len(paths)]
        for shard in range(len(table)) if ranks.simulated else stream.layout.owned(ranks.rank):
            if nodes := [node for node, rows in begun.items() if rows[shard]]:
                row = table[shard : shard + 1, FIRST_SLOT:]
                of_shard = stream.runner.farthest(shard, row, histories, nodes)
                found.append([of_shard.get(path, -1) for path in paths])
        return np.max(found, axis=0).tolist()

    if not any(rows.any() for rows in begun.values()):
        return farthest()
    return ranks.each(together(ranks, farthest)).max(axis=0).tolist()


def _begin_next_epoch(stream: Stream, growth: Growth, table: Ints, clock: Clock) -> tuple[Clock, dict[str, History]]:
    histories, left = begin_next_epoch(growth, stream.schema, table)
    stream.ranks.warn(
        "Files were removed or changed since the state was saved (%s): what was left of the epoch, %d rows, is left out, and "
        "all logical shards begin the next one (on_source_change='next_epoch').", "; ".join(growth.changed), left,
    )  # fmt: skip
    if not stream.repeat:
        table[:, DEALT] = ENDED
    return clock.restarted(stream.layout.global_batch_size), histories


def _report(stream: Stream, fitted: Fitted, num_begun_again: int) -> None:
    if fitted.added or fitted.removed:
        stream.ranks.warn(
            "The pipeline has changed since the state was saved. These sources begin with their first row: %s. These are gone, "
            "with their positions: %s.",
            [child.name for child in fitted.added],
            [child.name for child in fitted.removed],
        )
    if num_begun_again:
        stream.ranks.warn(
            "%d of %d logical shards were within a document or window that they cannot go on in without the sources or the "
            "blocklist that are gone: they begin it again, so some documents are repeated. To avoid this for a source give it "
            "weight 0, train on until those windows have passed, and remove it then.",
            num_begun_again,
            stream.layout.num_logical_shards,
        )
