"""A stream's state as the nested dict that goes into a checkpoint, and back.

    {"shards": {path: a tensor with N rows}, counts of the run: int, "sources", "pipeline", "fields": JSON strings}

The shapes on disk depend on N alone. In memory a table is one of three forms that are interchangeable there: a plain
tensor where one process owns all rows, a `DTensor` over the dp mesh where W divides N, else plain tensors with all rows,
gathered. Source: docs/design.md, 8.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from rescale_data.engine.change import Fitted, fit, fixed_by_others, settle, without_free
from rescale_data.engine.differences import differences
from rescale_data.engine.growth import Growth, begin_next_epoch, compare, joined, refuse_changes
from rescale_data.engine.moment import Standing
from rescale_data.engine.recipe import DEALT, SAMPLES, STAMP, STRINGS, UNDEALT, History
from rescale_data.engine.stream import Stream
from rescale_data.errors import DataStateError
from rescale_data.layout.clock import Clock
from rescale_data.sources.source import Saveable
from rescale_data.state import Ints, from_tensors, to_tensors

VERSION = 1
OTHER_FIELDS = (
    "Build the pipeline that was saved, with the saved verify= (True keeps a digest a reader), or begin a new run."
)
INTS = (
    "samples",
    "origin",
    "step",
    "epoch",
    "global_batch_size",
    "micro_batch_size",
    "dp_world_size",
    "num_logical_shards",
    "seed",
    "version",
)


def state_dict(stream: Standing) -> dict[str, Any]:
    """The state, each rank with the rows that it owns where W divides N; else collective over the dp ranks."""
    refuse_simulated(stream, "state_dict")
    _require_saveable(stream)
    layout, ranks = stream.layout, stream.ranks
    in_blocks = ranks.mesh is not None and layout.num_logical_shards % ranks.world_size == 0
    if not in_blocks or stream.rows_are_dealt:
        return full_state_dict(stream)
    block = layout.owned(ranks.rank)
    shards = _tensors(stream, stream.table[block.start : block.stop])
    return {
        "shards": {key: ranks.shard(rows, layout.num_logical_shards) for key, rows in shards.items()},
        **header(stream),
    }


def full_state_dict(stream: Standing) -> dict[str, Any]:
    """The state with plain tensors of all N rows (collective over the dp ranks)."""
    refuse_simulated(stream, "full_state_dict")
    _require_saveable(stream)
    _require_same_batch(stream)
    return {"shards": _tensors(stream, stream.ranks.saving.merge(stream.table, stream.owners)), **header(stream)}


def merged_state_dict(streams: Sequence[Stream]) -> dict[str, Any]:
    """The state that simulated ranks, each with its rows, would save together: one stream of each dp rank."""
    first = streams[0]
    _require_saveable(first)
    given = sorted(stream.ranks.rank for stream in streams)
    if given != list(range(first.ranks.world_size)):
        raise ValueError(
            f"The loaders are those of the dp ranks {given}; give one of each of {first.ranks.world_size} ranks."
        )
    if any(header(stream) != header(first) for stream in streams):
        raise ValueError("The loaders of the dp ranks stand at different batches. Take the same number from each.")
    tables = np.stack([stream.table for stream in streams])
    newest = tables[:, :, SAMPLES].argmax(axis=0)
    return {"shards": _tensors(first, tables[newest, np.arange(len(newest))]), **header(first)}


def load_state_dict(stream: Stream, state: Mapping[str, Any]) -> None:
    """Go on from a state in either form; ``DataStateError`` where it does not fit, and then nothing has changed."""
    if not isinstance(state, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            f"The state is a {type(state).__name__}. Give what loader.state_dict() returned, or DCP loaded into it."
        )
    missing = sorted({"shards", *INTS, *STRINGS} - set(state))
    if missing:
        raise DataStateError(
            f"The state lacks {missing}. Give what loader.state_dict() returned, or DCP loaded into it."
        )
    fitted = require_fit(stream, state)
    changed = state["pipeline"] != stream.schema.pipeline_json
    state = fitted.state
    table = _table(stream, state["shards"], int(state["samples"]))
    if changed:
        _report(stream, fitted, settle(stream.schema, table))
    saved = (int(state["global_batch_size"]), int(state["dp_world_size"]), int(state["micro_batch_size"]))
    clock = Clock(**{name: int(state[name]) for name in ("samples", "origin", "step", "epoch")})
    loaded = clock.loaded(saved, stream.layout)
    if stream.repeat and (table[:, DEALT] != UNDEALT).any():
        loaded = clock.restarted(saved[0])  # an endless stream has no end of an epoch to be in the middle of
    if loaded != clock or stream.repeat:
        table[:, DEALT] = UNDEALT
    if loaded != clock:
        stream.ranks.log(
            logging.WARNING,
            "The state was saved with global_batch_size=%d, dp_world_size=%d, micro_batch_size=%d in the middle of a step, or "
            "with another global batch: steps are counted anew from sample %d. Nothing is lost or repeated.",
            *saved,
            clock.samples,
        )
    histories = fitted.growth.histories
    if fitted.growth.changed:
        loaded, histories = _begin_next_epoch(stream, fitted.growth, table, loaded)
    elif fitted.growth.grown:
        histories = _join(stream, fitted.growth, table)
    stream.schema.adopt(histories)
    stream.load(table, loaded)


def header(stream: Standing) -> dict[str, Any]:
    """All of the state but the table: the same on every rank."""
    layout, clock, schema = stream.layout, stream.clock, stream.schema
    return {
        "samples": clock.samples,
        "origin": clock.origin,
        "step": clock.step,
        "epoch": clock.epoch,
        "global_batch_size": layout.global_batch_size,
        "micro_batch_size": layout.micro_batch_size,
        "dp_world_size": layout.dp_world_size,
        "num_logical_shards": layout.num_logical_shards,
        "seed": stream.seed,
        "version": VERSION,
        "sources": schema.sources_json,
        "pipeline": schema.pipeline_json,
        "fields": schema.fields_json,
    }


def require_fit(stream: Stream, saved: Mapping[str, Any]) -> Fitted:
    """``DataStateError`` where a state belongs to another run: format, N, seed, fields, sources or pipeline.

    Returns:
        The state as the pipeline of now would have saved it.
    """
    now = header(stream)
    if saved["version"] != now["version"]:
        raise DataStateError(
            f"The state has format version {saved['version']}, this rescale_data reads version {now['version']}. Load it with "
            f"the release that saved it."
        )
    for name, cure in _FIXED.items():
        if saved[name] != now[name]:
            raise DataStateError(
                f"The state was saved with {name}={saved[name]}, the loader has {name}={now[name]}. {cure}"
            )
    fitted = fit(stream.schema, saved)
    _require_same("fields", fitted.state["fields"], now["fields"])
    growth = compare(stream.schema, fitted.state["sources"])
    if stream.on_source_change == "error":
        refuse_changes(growth)
    if fitted.state["pipeline"] != now["pipeline"]:
        _require_same(
            "pipeline",
            *(without_free(stream.schema, document["pipeline"]) for document in (fitted.state, now)),
            fixed=fixed_by_others(stream.schema),
        )
    return replace(fitted, growth=growth)


def _require_same(name: str, saved: str, now: str, fixed: Sequence[str] = ()) -> None:
    found = differences(saved, now)
    if not found:
        return
    message = f"The {name} differ from those of the checkpoint: {'; '.join(found)}. {_DESCRIBED[name]}"
    held = [parameter for parameter in fixed if any(difference.startswith(parameter) for difference in found)]
    if held:
        message += (
            f" {held} could change if all nodes above were of rescale_data, or a Mapper of torchdata: others keep what is "
            f"below them as it was saved."
        )
    raise DataStateError(message)


_FIXED = {
    "num_logical_shards": "It is fixed for a whole run: build the loader with the saved one (the world size, the workers, the "
    "micro batch and the global batch may all change).",
    "seed": "Another seed is another order: build the loader with the saved one, or begin a new run.",
}
_DESCRIBED = {
    "fields": f"The pipeline keeps other state than the one that was saved. {OTHER_FIELDS}",
    "pipeline": "These parameters change the order or the content of the samples: use the saved ones, or begin a new run.",
}


def refuse_simulated(stream: Standing, method: str) -> None:
    if stream.ranks.simulated:
        raise ValueError(
            f"{method}() needs the rows of all {stream.ranks.world_size} dp ranks, but there is no process group (dp_rank= and "
            f"dp_world_size= were given). Use rescale_data.testing.full_state_dict(loaders) with the loaders of all ranks."
        )


def _require_same_batch(stream: Standing) -> None:
    """Gathered rows all bear one stamp: so that ranks stand at the same batch has to be seen now (collective)."""
    first, last = stream.ranks.saving.extremes(stream.clock.samples)
    if first != last:
        raise DataStateError(
            f"The ranks save at different batches, which no state can describe: dp rank {stream.ranks.rank} after "
            f"{stream.clock.samples} samples, others between {first} and {last}. Save on all ranks after the same batch."
        )


def _require_saveable(stream: Standing) -> None:
    """``DataStateError`` where a source could not be resumed: said now, and not when the run is lost."""
    for source in stream.schema.sources().values():
        if isinstance(source, Saveable):
            source.require_saveable()


def _tensors(stream: Standing, table: Ints) -> dict[str, torch.Tensor]:
    stamp = torch.full((len(table),), stream.clock.samples, dtype=torch.int64)
    return {STAMP.key: stamp, **to_tensors(stream.schema.fields, table)}


def _table(stream: Stream, shards: Mapping[str, Any], samples: int) -> Ints:
    """The table of a state, every value checked (collective where it holds `DTensor`s)."""
    fields, n = stream.schema.fields, stream.layout.num_logical_shards
    missing = sorted({field.key for field in (*fields, STAMP)} - set(shards))
    if missing:
        raise DataStateError(f"The table of the state lacks the fields {missing}.")
    tensors = {field.key: _whole(stream, shards[field.key]) for field in (*fields, STAMP)}
    for field in (*fields, STAMP):
        want, got = (
            ((n, *(field.shape or ())), field.dtype),
            (tuple(tensors[field.key].shape), tensors[field.key].dtype),
        )
        if got != want:
            raise DataStateError(
                f"The field {field.key!r} of the state has shape and dtype {got}; the pipeline has {want}."
            )
    stale = torch.nonzero(tensors[STAMP.key] != samples).flatten().tolist()
    if stale:
        raise DataStateError(
            f"The rows of {len(stale)} of {n} logical shards (the first: {stale[:5]}) are not of sample {samples}, at which "
            f"the state was saved: some rank did not save its rows, or ranks saved at different steps. Load another checkpoint."
        )
    return np.ascontiguousarray(from_tensors(fields, tensors))


def _whole(stream: Stream, tensor: Any) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor):
        raise DataStateError(f"A field of the state is a {type(tensor).__name__}, not a tensor.")
    return stream.ranks.whole(tensor)


def _join(stream: Stream, growth: Growth, table: Ints) -> dict[str, History]:
    histories = joined(growth, stream.schema, table)
    for path in growth.grown:
        before, (since, now) = growth.histories[path][-1][1], histories[path][-1]
        known = {name for name, *_ in before["files"]}
        added = [name for name, *_ in now["files"] if name not in known]
        stream.ranks.log(
            logging.WARNING,
            "%d files were added to the source %s since the state was saved (%s): they join at epoch %d, the next that no "
            "logical shard has begun.", len(added), path, ", ".join(added[:3]) + ("" if len(added) <= 3 else ", ..."), since,
        )  # fmt: skip
    return histories


def _begin_next_epoch(stream: Stream, growth: Growth, table: Ints, clock: Clock) -> tuple[Clock, dict[str, History]]:
    histories, left = begin_next_epoch(growth, stream.schema, table)
    stream.ranks.log(
        logging.WARNING,
        "Files were removed or changed since the state was saved (%s): what was left of the epoch, %d rows, is left out, and "
        "all logical shards begin the next one (on_source_change='next_epoch').", "; ".join(growth.changed), left,
    )  # fmt: skip
    o = stream.layout.global_batch_size
    return clock.restarted(o) if stream.repeat else clock.next_epoch(o), histories


def _report(stream: Stream, fitted: Fitted, num_begun_again: int) -> None:
    if fitted.added or fitted.removed:
        stream.ranks.log(
            logging.WARNING,
            "The pipeline has changed since the state was saved. These sources begin with their first row: %s. These are gone, "
            "with their positions: %s.",
            [child.name for child in fitted.added],
            [child.name for child in fitted.removed],
        )
    if num_begun_again:
        stream.ranks.log(
            logging.WARNING,
            "%d of %d logical shards were within a document or window that they cannot go on in without the sources that are "
            "gone: they begin it again, so some documents are repeated. To avoid this give a source weight 0, train on until "
            "those windows have passed, and remove it then.",
            num_begun_again,
            stream.layout.num_logical_shards,
        )
