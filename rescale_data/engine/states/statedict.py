"""Makes the state of a stream: with all rows of the table, or with the rows that one rank knows.

    whole     all rows, equal on every rank (collective): this form can be kept, and plain DCP saves it
    local     the rows of one rank (`OneRankTable`), without communication: `whole_state` makes it whole

`codec.py` describes the format. Source: docs/design.md, 8.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, cast

import numpy as np
import torch

from rescale_data.engine.cursor import Cursor
from rescale_data.engine.ends import EpochEndFinder
from rescale_data.engine.ranks.meeting import digest
from rescale_data.engine.recipe import SAMPLES, STAMP_LIMIT
from rescale_data.engine.states.codec import HEADER, TABLE, encode_state, header_of
from rescale_data.engine.stream import Stream
from rescale_data.errors import DataStateError

_NO_SHARD_STAMP = -STAMP_LIMIT  # the stamp of a row that belongs to no shard


def state_dict(cursor: Cursor, ends: EpochEndFinder) -> dict[str, Any]:
    """Return the state with all N rows (collective over the dp ranks).

    If the ranks stand at different batches, the state can only be loaded into, as `dcp.load` does; it cannot be kept
    (`UnsavableHeader`).
    """
    return mark_unsavable(*state_and_unsavable_reason(cursor, ends))


def state_and_unsavable_reason(cursor: Cursor, ends: EpochEndFinder) -> tuple[dict[str, Any], str]:
    """Return the state with all N rows, and the reason why it cannot be kept, which is empty if it can be (collective)."""
    reason = _why_unsavable(cursor, ends)
    state = encode_state(
        cursor.positions if reason else ends.ranks.for_purpose("save").merge(cursor.positions, cursor.owners),
        cursor.clock_now(ends.layout).samples,
        header_of(cursor, ends),
    )
    if reason:
        state[TABLE][:, 0] = _NO_SHARD_STAMP
    return state, reason


def mark_unsavable(state: dict[str, Any], reason: str) -> dict[str, Any]:
    """Return a state that raises an error with the text ``reason`` when pickled; the same state if the reason is empty."""
    return {**state, HEADER: UnsavableHeader(state[HEADER], reason)} if reason else state


def local_state_dict(cursor: Cursor, ends: EpochEndFinder) -> dict[str, Any]:
    """Return the state with the rows of this rank alone, without communication; `whole_state` adds the other rows."""
    if ends.ranks.world_size == 1:
        return state_dict(cursor, ends)
    _refuse_simulated_ranks(ends)
    _require_saveable(ends)
    return {TABLE: OneRankTable(cursor.copy(), ends), HEADER: header_of(cursor, ends)}


class OneRankTable:
    """The table of a state in which only the rows of one rank are up to date; `table_of_all_ranks` adds the other rows."""

    def __init__(self, cursor: Cursor, ends: EpochEndFinder) -> None:
        self._cursor, self._ends = cursor, ends

    def table_of_all_ranks(self) -> torch.Tensor:
        """Return the table with all rows up to date (collective); raise ``DataStateError`` if ranks are not at one batch."""
        state = state_dict(self._cursor, self._ends)
        if isinstance(state[HEADER], UnsavableHeader):
            state[HEADER].raise_reason()
        return state[TABLE]

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "This state of a data loader holds the rows of one dp rank, and pickles on none: loaded on the others they would "
            "be taken for theirs. Keep loader.state_dict(), which is whole (all ranks call it), or rd.whole_state(state) of "
            "loader.local_state_dict() and of nodes above rd.LogicalShards."
        )


def whole_state(state: Any) -> Any:
    """Return a state with the rows of all ranks, from one with the rows of this rank (collective; for the main thread).

    A `LogicalShards` saves the rows of its own rank alone, because nodes of torchdata ask for its state in threads. The whole
    state is the same on every rank, pickles, and loads on any topology.

    Args:
        state: The state of a `LogicalShards`, of any node or loader above it, as ``torchdata.nodes.Loader.state_dict()``, or
            the result of `DataLoader.local_state_dict`. It is not changed.

    Returns:
        The state with all N rows.

    Raises:
        DataStateError: The ranks stand at different batches.

    Example:
        >>> import rescale_data as rd
        >>> source = rd.SyntheticSource(64, length=8)
        >>> sizes = {"num_logical_shards": 4, "global_batch_size": 4}
        >>> shards = rd.LogicalShards(lambda shard: rd.Reader(source, shard), **sizes, repeat=False)
        >>> rd.whole_state({"root": shards.state_dict()})["root"]["table"].shape
        torch.Size([4, 6])
    """
    if not isinstance(state, Mapping):
        return state
    return {
        k: v.table_of_all_ranks() if isinstance(v, OneRankTable) else whole_state(v)
        for k, v in cast(Mapping[str, Any], state).items()
    }


def merged_state_dict(streams: Sequence[Stream]) -> dict[str, Any]:
    """Return the state that simulated ranks would save together, from one stream of each dp rank."""
    first_stream = streams[0]
    _require_saveable(first_stream.ends)
    ranks = sorted(stream.ranks.rank for stream in streams)
    if ranks != list(range(first_stream.ranks.world_size)):
        raise ValueError(
            f"The loaders are those of the dp ranks {ranks}; give one of each of {first_stream.ranks.world_size} ranks."
        )
    header = header_of(first_stream.cursor, first_stream.ends)
    if any(header_of(stream.cursor, stream.ends) != header for stream in streams):
        raise ValueError("The loaders of the dp ranks stand at different batches. Take the same number from each.")
    tables = np.stack([stream.table for stream in streams])
    newest_stream = tables[:, :, SAMPLES].argmax(axis=0)
    return encode_state(tables[newest_stream, np.arange(len(newest_stream))], first_stream.clock.samples, header)


class UnsavableHeader(str):
    """The header of a state whose ranks stand at different batches; pickling it, as every save does, raises an error."""

    reason: str

    def __new__(cls, header: str, reason: str) -> UnsavableHeader:
        header_that_raises = super().__new__(cls, header)
        header_that_raises.reason = reason
        return header_that_raises

    def raise_reason(self) -> NoReturn:
        raise DataStateError(self.reason)

    def __reduce_ex__(self, _: object) -> NoReturn:
        self.raise_reason()


def _why_unsavable(cursor: Cursor, ends: EpochEndFinder) -> str:
    """Return the reason why the ranks cannot save a common state now; empty if they can (collective).

    All gathered rows get the same stamp, so only now can it be checked that ranks are at the same batch.
    """
    _refuse_simulated_ranks(ends)
    _require_saveable(ends)
    ranks, clock = ends.ranks, cursor.clock_now(ends.layout)
    gathered = ranks.for_purpose("save").gather_ints([clock.samples, digest(clock.skipped)])
    if (gathered == gathered[0]).all():
        return ""
    return (
        f"The ranks save at different batches, or have not left out the same samples: dp rank {ranks.rank} after "
        f"{clock.samples} samples without {clock.skipped}, others between {gathered[:, 0].min()} and {gathered[:, 0].max()}. "
        f"Save on all ranks after the same batch, and call skip() on all, with the same number."
    )


def _require_saveable(ends: EpochEndFinder) -> None:
    """Raise ``DataStateError`` if a source could not be resumed: the save fails, rather than a later load."""
    for source in ends.schema.sources().values():
        source.require_saveable()


def _refuse_simulated_ranks(ends: EpochEndFinder) -> None:
    if ends.ranks.simulated:
        raise ValueError(
            f"state_dict() needs the rows of all {ends.ranks.world_size} dp ranks, but there is no process group (dp_rank= "
            f"and dp_world_size= were given). Use rescale_data.testing.full_state_dict(loaders) with the loaders of all ranks."
        )
