"""A stream's state as the nested dict that goes into a checkpoint.

    {"shards": {name: a tensor with N rows}, counts of the run: int, "sources", "pipeline", "fields": JSON strings}

The shapes on disk depend on N alone. In memory a table is one of these, and all of them load into each other:

    whole     plain tensors with all rows, equal on every rank (collective): what anybody may keep
    sharded   a `DTensor` over the dp mesh where W divides N, without communication; whole elsewhere
    local     `RankRows`, which `whole_state` makes whole: never any communication

The tensors are those of `table.py`. Source: docs/design.md, 8.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, cast

import numpy as np
import torch

from rescale_data.engine.position import Position
from rescale_data.engine.recipe import MOST_STAMPED, SAMPLES, STAMP
from rescale_data.engine.schema import Schema
from rescale_data.engine.states.table import is_dealt, stamps_of, tensors_of, version_of
from rescale_data.engine.stream import Stream
from rescale_data.errors import DataStateError
from rescale_data.state import Ints

_OF_NONE = -MOST_STAMPED  # the stamp of a row that is nobody's
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


def state_dict(stream: Position) -> dict[str, Any]:
    """The state with plain tensors of all N rows (collective over the dp ranks).

    Where the ranks stand at different batches it is one to load into, as `dcp.load` does, and cannot be kept (`Apart`).
    """
    apart = _find_apart(stream)
    state = state_of(stream.schema, stream.table if apart else stream.whole(), header(stream))
    if apart:
        state["shards"][STAMP.key].fill_(_OF_NONE)
        state["samples"] = Apart(stream.clock.samples, apart)
    return state


def state_of(schema: Schema, table: Ints, numbers: Mapping[str, Any]) -> dict[str, Any]:
    """The state of a whole table, and of its `header`."""
    stamps = stamps_of(range(len(table)), int(numbers["samples"]), len(table))
    return {"shards": tensors_of(schema, table, stamps), **numbers}


def local_state_dict(stream: Position) -> dict[str, Any]:
    """The state as this rank knows it, without communication: `whole_state` makes it whole."""
    if stream.ranks.world_size == 1:
        return state_dict(stream)
    _refuse_simulated(stream)
    _require_saveable(stream)
    return {"shards": RankRows(stream.copy()), **header(stream)}


def whole_shards(stream: Position) -> dict[str, torch.Tensor]:
    """The table with all rows right (collective); ``DataStateError`` where the ranks stand at different batches."""
    state = state_dict(stream)
    if isinstance(state["samples"], Apart):
        state["samples"].refuse()
    return state["shards"]


class RankRows:
    """The table as one rank knows it."""

    def __init__(self, at: Position) -> None:
        self._at = at

    def whole(self) -> dict[str, torch.Tensor]:
        """The table with all rows right (collective)."""
        return whole_shards(self._at)

    def __reduce__(self) -> NoReturn:
        _refuse_pickle()


class Sharded:
    """A loader as something to save, whose state keeps each rank's rows with that rank (``loader.sharded``)."""

    def __init__(self, save: Callable[[], Position], load: Callable[[Mapping[str, Any]], None]) -> None:
        self._save, self._load = save, load

    def state_dict(self) -> dict[str, Any]:
        """`DTensor` rows where W divides N, without communication; else, and at an epoch's end, plain tensors."""
        stream = self._save()
        return _in_blocks(stream) if _has_blocks(stream) else state_dict(stream)

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
    return state_of(first.schema, whole, header(first))


def header(stream: Position) -> dict[str, Any]:
    """All of the state but the table: the same on every rank."""
    layout, clock, schema = stream.layout, stream.clock, stream.schema
    return {
        "samples": clock.samples,
        "origin": clock.origin,
        "step": stream.step,
        "epoch": clock.epoch,
        "global_batch_size": layout.global_batch_size,
        "micro_batch_size": layout.micro_batch_size,
        "dp_world_size": layout.dp_world_size,
        "num_logical_shards": layout.num_logical_shards,
        "seed": stream.setup.recipe.seed,
        "version": version_of(schema),
        "sources": schema.sources_json,
        "pipeline": schema.pipeline_json_at(in_step=clock.in_step),
        "fields": schema.fields_json,
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


def _find_apart(stream: Position) -> str:
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


def _require_saveable(stream: Position) -> None:
    """``DataStateError`` where a source could not be resumed: said now, and not when the run is lost."""
    for source in stream.schema.saveable:
        source.require_saveable()


def _refuse_simulated(stream: Position) -> None:
    if stream.ranks.simulated:
        raise ValueError(
            f"state_dict() needs the rows of all {stream.ranks.world_size} dp ranks, but there is no process group (dp_rank= "
            f"and dp_world_size= were given). Use rescale_data.testing.full_state_dict(loaders) with the loaders of all ranks."
        )


def _has_blocks(stream: Position) -> bool:
    divides = stream.layout.num_logical_shards % stream.ranks.world_size == 0
    return stream.ranks.mesh is not None and divides and not is_dealt(stream.table)


def _in_blocks(stream: Position) -> dict[str, Any]:
    _require_saveable(stream)
    block, n = stream.layout.owned(stream.ranks.rank), stream.layout.num_logical_shards
    stamps = stamps_of(block, stream.clock.samples, n)
    shards = tensors_of(stream.schema, stream.table[block.start : block.stop], stamps)
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
