"""A stream's state as the nested dict that goes into a checkpoint, and back.

    {"shards": {path: a tensor with N rows}, counts of the run: int, "sources", "pipeline", "fields": JSON strings}

The shapes on disk depend on N alone. In memory a table is one of these, and all of them load into each other:

    whole     plain tensors with all rows, equal on every rank (collective): what anybody may keep
    sharded   a `DTensor` over the dp mesh where W divides N, without communication; whole elsewhere
    local     `RankRows`, which `whole_state` makes whole: never any communication

Every row says whose it is: ``stamp`` of row i is ``-1 - (samples * N + i)``. Source: DESIGN, "State in the checkpoint".
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn, cast

import numpy as np
import torch

from rescale_data.engine.change import Fitted, check_changes, fit, fixed_by_others, settle, without_free
from rescale_data.engine.differences import differences
from rescale_data.engine.form import reform, without_form
from rescale_data.engine.group import require_whole_round
from rescale_data.engine.growth import Growth, begin_next_epoch, compare, joined, refuse_changes
from rescale_data.engine.moment import Moment, Standing
from rescale_data.engine.ranks import Ranks
from rescale_data.engine.recipe import (
    DEALT,
    ENDED,
    SAMPLES,
    STAMP,
    STRINGS,
    UNDEALT,
    History,
)
from rescale_data.engine.stream import Stream
from rescale_data.engine.warned import say_changes, steps_left_out, without_functions
from rescale_data.errors import DataStateError
from rescale_data.layout.clock import Clock
from rescale_data.sources.source import Saveable
from rescale_data.state import Field, Ints, from_tensors, to_tensors

VERSION = 2
_OF_NONE = -(1 << 62)  # the stamp of a row that is nobody's
_READS = (1, VERSION)
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
    """The state with plain tensors of all N rows (collective over the dp ranks).

    Where the ranks stand at different batches it is one to load into, as `dcp.load` does, and cannot be kept (`Apart`).
    """
    apart = _find_apart(stream)
    state = state_of(stream.table if apart else stream.whole(), stream.schema.fields, header(stream))
    if apart:
        state["shards"][STAMP.key].fill_(_OF_NONE)
        state["samples"] = Apart(stream.clock.samples, apart)
    return state


def state_of(table: Ints, fields: Sequence[Field], numbers: Mapping[str, Any]) -> dict[str, Any]:
    """The state of a whole table, and of its `header`."""
    stamps = _stamps(int(numbers["samples"]), range(len(table)), len(table))
    return {"shards": {STAMP.key: stamps, **to_tensors(fields, table)}, **numbers}


def sharded_state_dict(stream: Standing) -> dict[str, Any]:
    """The state, each rank with the rows that it owns where W divides N and none is dealt; else as `state_dict`."""
    return _in_blocks(stream) if _has_blocks(stream) else state_dict(stream)


def local_state_dict(stream: Standing) -> dict[str, Any]:
    """The state as this rank knows it, without communication: `whole_state` makes it whole."""
    if stream.ranks.world_size == 1:
        return state_dict(stream)
    _refuse_simulated(stream)
    _require_saveable(stream)
    return {"shards": RankRows(Moment.of(stream)), **header(stream)}


def whole_shards(stream: Standing) -> dict[str, torch.Tensor]:
    """The table with all rows right (collective); ``DataStateError`` where the ranks stand at different batches."""
    state = state_dict(stream)
    if isinstance(state["samples"], Apart):
        state["samples"].refuse()
    return state["shards"]


class RankRows:
    """The table as one rank knows it."""

    def __init__(self, at: Moment) -> None:
        self._at = at

    def whole(self) -> dict[str, torch.Tensor]:
        """The table with all rows right (collective)."""
        return whole_shards(self._at)

    def __reduce__(self) -> NoReturn:
        _refuse_pickle()


class Sharded:
    """A loader as something to save, whose state keeps each rank's rows with that rank (``loader.sharded``)."""

    def __init__(self, save: Callable[[], Standing], load: Callable[[Mapping[str, Any]], None]) -> None:
        self._save, self._load = save, load

    def state_dict(self) -> dict[str, Any]:
        """`DTensor` rows where W divides N, without communication; else, and at an epoch's end, plain tensors."""
        return sharded_state_dict(self._save())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """As `DataLoader.load_state_dict`."""
        self._load(state_dict)

    def __reduce__(self) -> NoReturn:
        _refuse_pickle()


def whole_state(state: Any) -> Any:
    """Make the states of `LogicalShards` in a state whole (collective over the dp ranks; call it in the main thread).

    A `LogicalShards` gives the rows of its own rank alone, because nodes of torchdata ask for its state in threads. What this
    returns is the same on every rank, pickles, and loads on any topology.

    Args:
        state: Of a `LogicalShards`, or of anything above it, as ``torchdata.nodes.Loader.state_dict()``. Not changed.

    Returns:
        The same with plain tensors of all N rows.

    Raises:
        DataStateError: The ranks stand at different batches.

    Example:
        >>> import rescale_data as rd
        >>> source = rd.SyntheticSource(64, length=8)
        >>> sizes = {"num_logical_shards": 4, "global_batch_size": 4}
        >>> shards = rd.LogicalShards(lambda shard: rd.Reader(source, shard), **sizes, repeat=False)
        >>> rd.whole_state({"root": shards.state_dict()})["root"]["shards"]["samples"]
        tensor([0, 0, 0, 0])
    """
    if not isinstance(state, Mapping):
        return state
    return {
        k: v.whole() if isinstance(v, RankRows) else whole_state(v) for k, v in cast(Mapping[str, Any], state).items()
    }


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
    whole = tables[newest, np.arange(len(newest))]
    return state_of(whole, first.schema.fields, header(first))


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
    fitted = require_fit(stream, {**state, "shards": _whole(stream.ranks, state["shards"])})
    changed = state["pipeline"] != stream.schema.pipeline_json
    state = fitted.state
    table = _table(stream, state["shards"], int(state["samples"]))
    _require_one_end(table)
    was_dealt = _is_dealt(table)
    forms: dict[str, History] = {}
    if changed:
        say_changes(stream, state["pipeline"])
        check_changes(stream.schema, state["pipeline"], table)
        forms = reform(stream, state["pipeline"], table)
    saved = (int(state["global_batch_size"]), int(state["dp_world_size"]), int(state["micro_batch_size"]))
    clock = _clock(state)
    loaded = clock.loaded(saved, stream.layout)
    require_whole_round(stream.schema, table, clock, loaded, saved[0])
    if was_dealt and not _is_dealt(table):
        loaded = clock.restarted(saved[0])
    ended = bool((table[:, DEALT] == ENDED).all())
    if stream.repeat and (table[:, DEALT] != UNDEALT).any():  # an endless stream has no end of an epoch to be at
        loaded = clock.next_epoch(saved[0]) if ended else clock.restarted(saved[0])
    if stream.repeat or (loaded != clock and not ended):
        table[:, DEALT] = UNDEALT
    excluded = steps_left_out(stream, state["pipeline"], loaded.global_step(stream.layout.global_batch_size))
    moved, histories = loaded, fitted.growth.histories
    if fitted.growth.changed:
        moved, histories = _begin_next_epoch(stream, fitted.growth, table, loaded)
    elif fitted.growth.grown:
        histories = _join(stream, fitted.growth, table)
    stream.schema.exclude_steps(excluded)
    stream.schema.adopt({**histories, **forms})
    if changed:
        _report(stream, fitted, settle(stream.schema, table))
    stream.load(table, moved)
    if loaded.origin != clock.origin and not stream.is_short():  # that end has its own warning
        stream.ranks.log(
            logging.WARNING,
            "The state was saved with global_batch_size=%d, dp_world_size=%d, micro_batch_size=%d in the middle of a step, or "
            "with another global batch: global batches begin anew at sample %d. loader.step goes on from %d.",
            *saved,
            loaded.samples,
            loaded.step,
        )


def header(stream: Standing) -> dict[str, Any]:
    """All of the state but the table: the same on every rank."""
    layout, clock, schema = stream.layout, stream.clock, stream.schema
    return {
        "samples": clock.samples,
        "origin": clock.origin,
        "step": clock.global_step(layout.global_batch_size),
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
    if saved["version"] not in _READS:
        raise DataStateError(
            f"The state has format version {saved['version']}, this rescale_data reads the versions {_READS}. Load it with the "
            f"release that saved it."
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
        pipelines = without_functions(fitted.state["pipeline"], now["pipeline"])
        _require_same(
            "pipeline",
            *(without_form(stream.schema, without_free(stream.schema, pipeline)) for pipeline in pipelines),
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


class Apart(int):
    """The sample at which this rank stands, and others do not: whoever pickles it, as all do that save, is told so."""

    why: str

    def __new__(cls, samples: int, why: str) -> Apart:
        apart = super().__new__(cls, samples)
        apart.why = why
        return apart

    def refuse(self) -> NoReturn:
        raise DataStateError(self.why)

    def __reduce_ex__(self, _: object) -> NoReturn:
        self.refuse()


def _find_apart(stream: Standing) -> str:
    """Why there is no state of this moment; empty where there is one (collective).

    Gathered rows all bear one stamp: so that ranks stand at the same batch has to be seen now.
    """
    _refuse_simulated(stream)
    _require_saveable(stream)
    first, last = stream.ranks.saving.extremes(stream.clock.samples)
    if first == last:
        return ""
    return (
        f"The ranks save at different batches, which no state can describe: dp rank {stream.ranks.rank} after "
        f"{stream.clock.samples} samples, others between {first} and {last}. Save on all ranks after the same batch."
    )


def _require_saveable(stream: Standing) -> None:
    """``DataStateError`` where a source could not be resumed: said now, and not when the run is lost."""
    for source in stream.schema.sources().values():
        if isinstance(source, Saveable):
            source.require_saveable()


def _refuse_simulated(stream: Standing) -> None:
    if stream.ranks.simulated:
        raise ValueError(
            f"state_dict() needs the rows of all {stream.ranks.world_size} dp ranks, but there is no process group (dp_rank= "
            f"and dp_world_size= were given). Use rescale_data.testing.full_state_dict(loaders) with the loaders of all ranks."
        )


def _is_dealt(table: Ints) -> bool:
    """Whether rows are spread over ranks by a deal at the end of an epoch, no longer in one block a rank."""
    return bool((table[:, DEALT] > UNDEALT).any())


def _has_blocks(stream: Standing) -> bool:
    divides = stream.layout.num_logical_shards % stream.ranks.world_size == 0
    return stream.ranks.mesh is not None and divides and not _is_dealt(stream.table)


def _in_blocks(stream: Standing) -> dict[str, Any]:
    _require_saveable(stream)
    block, n = stream.layout.owned(stream.ranks.rank), stream.layout.num_logical_shards
    rows = to_tensors(stream.schema.fields, stream.table[block.start : block.stop])
    shards = {STAMP.key: _stamps(stream.clock.samples, block, n), **rows}
    sharded = {key: stream.ranks.shard(rows, n) for key, rows in shards.items()}
    for tensor in sharded.values():  # pickle asks the object before its class, and torch.save is pickle
        cast(Any, tensor).__reduce_ex__ = _refuse_pickle
    return {"shards": sharded, **header(stream)}


def _refuse_pickle(*_: object) -> NoReturn:
    raise TypeError(
        "This state of a data loader holds the rows of one dp rank, and pickles on none: loaded on the others they would be "
        "taken for theirs. Keep loader.state_dict(), which is whole (all ranks call it), or rd.whole_state(state) of nodes "
        "above rd.LogicalShards; loader.sharded goes through torch.distributed.checkpoint alone."
    )


def _stamps(samples: int, rows: range, num_rows: int) -> torch.Tensor:
    return -1 - samples * num_rows - torch.arange(rows.start, rows.stop, dtype=torch.int64)


def _table(stream: Stream, tensors: Mapping[str, torch.Tensor], samples: int) -> Ints:
    """The table of a state, every value checked."""
    fields, n = stream.schema.fields, stream.layout.num_logical_shards
    missing = sorted({field.key for field in (*fields, STAMP)} - set(tensors))
    if missing:
        raise DataStateError(f"The table of the state lacks the fields {missing}.")
    for field in (*fields, STAMP):
        want = (n, *(field.shape or ())), field.dtype
        got = tuple(tensors[field.key].shape), tensors[field.key].dtype
        if got != want:
            raise DataStateError(
                f"The field {field.key!r} of the state has shape and dtype {got}; the pipeline has {want}."
            )
    _require_own_rows(tensors[STAMP.key], samples)
    return np.ascontiguousarray(from_tensors(fields, tensors))


def _require_one_end(table: Ints) -> None:
    ended = table[:, DEALT] == ENDED
    if ended.any() and not ended.all():
        raise DataStateError(
            f"By the state an epoch has ended for {int(ended.sum())} of {len(table)} logical shards, which happens to all at "
            f"once: it was changed, or is that of several runs. Load another checkpoint."
        )


def _require_own_rows(stamp: torch.Tensor, samples: int) -> None:
    """``DataStateError`` where rows are not those of their logical shards at that sample.

    Args:
        stamp: ``int64[N]``; one that is not negative is of format version 1, and says the sample alone.
    """
    n = len(stamp)
    wrong = torch.nonzero((stamp != _stamps(samples, range(n), n)) & (stamp != samples)).flatten().tolist()
    if not wrong:
        return
    found = [divmod(-1 - value, n) for value in stamp[wrong].tolist()]
    others = [(row, shard) for row, (at, shard) in zip(wrong, found, strict=True) if at == samples]
    if others:
        raise DataStateError(
            f"{len(others)} of {n} rows of the state are those of other logical shards (the first: row {others[0][0]} is that "
            f"of shard {others[0][1]}): one rank's rows were kept for all, or rows changed places. Keep what "
            f"loader.state_dict() returns, or use torch.distributed.checkpoint; load another checkpoint."
        )
    raise DataStateError(
        f"The rows of {len(wrong)} of {n} logical shards (the first: {wrong[:5]}) are not of sample {samples}, at which the "
        f"state was saved: some rank did not save its rows, or ranks saved at different steps. Load another checkpoint."
    )


def _whole(ranks: Ranks, shards: Any) -> dict[str, torch.Tensor]:
    """The table with all rows (collective where it is that of one rank)."""
    if isinstance(shards, RankRows):
        return shards.whole()
    for value in shards.values():
        if not isinstance(value, torch.Tensor):
            raise DataStateError(f"A field of the state is a {type(value).__name__}, not a tensor.")
    return {key: ranks.whole(value) for key, value in shards.items()}


def _clock(state: Mapping[str, Any]) -> Clock:
    """Format version 1 has, under "step", the steps before `origin`."""
    counts = {name: int(state[name]) for name in ("samples", "origin", "step", "epoch")}
    if state["version"] > 1:
        counts["step"] -= (counts["samples"] - counts["origin"]) // int(state["global_batch_size"])
    return Clock(**counts)


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
    if not stream.repeat:
        table[:, DEALT] = ENDED
    return clock.restarted(stream.layout.global_batch_size), histories


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
