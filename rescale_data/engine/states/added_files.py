"""Decides at which epoch files join that were added to a source: the next one of which no shard has begun or reads a row again.

A resumed shard reads again to go on within windows and documents that were delivered in part. Their data must stay the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from rescale_data.engine.ranks.ranks import call_on_all_ranks
from rescale_data.engine.recipe import (
    EPOCH_ENDED,
    FIRST_SLOT,
    NO_REMAINDER,
    REMAINDER_COLUMN,
    VersionLog,
    VersionLogs,
    path_name,
)
from rescale_data.engine.schema import Schema, set_histories
from rescale_data.engine.states.growth import Growth, reader_positions
from rescale_data.engine.stream import Stream
from rescale_data.nodes import changing
from rescale_data.nodes.abilities import RereadsDocument
from rescale_data.nodes.base import Node
from rescale_data.nodes.below import is_endless, readers_of
from rescale_data.nodes.reader import Reader
from rescale_data.state import Ints, position_slots


def join_added_files(stream: Stream, growth: Growth, table: Ints, formats: VersionLogs) -> dict[str, VersionLog]:
    """Return the manifests of each source by epoch, with the epoch at which added files join (collective).

    Args:
        table: Changed in place if the remainder of an epoch was planned without files that join it: it is planned again.
        formats: The earlier formats and weights that nodes still need.
    """
    if not growth.added_files:
        return growth.histories
    schema, paths = stream.schema, list(growth.added_files)
    epochs_read = _last_epochs_read(stream, table, {**growth.all_histories(schema), **formats}, paths)
    paths_and_epochs = zip(paths, epochs_read, strict=True)
    epochs = {path: max(_first_undrawn_epoch(schema, table, path), epoch + 1) for path, epoch in paths_and_epochs}
    if any((reader_positions(schema, table, path)[:, 0] >= epoch).any() for path, epoch in epochs.items()):
        table[:, REMAINDER_COLUMN][table[:, REMAINDER_COLUMN] != EPOCH_ENDED] = NO_REMAINDER
    for path, added in growth.added_files.items():
        stream.ranks.warn(
            "%d files were added to the source %s since the state was saved (%s): they join at epoch %d, the next that no "
            "logical shard has begun.", len(added), path, ", ".join(added[:3]) + ("" if len(added) <= 3 else ", ..."),
            epochs[path],
        )  # fmt: skip
    return growth.all_histories(schema, epochs)


def _last_epochs_read(stream: Stream, table: Ints, histories: VersionLogs, paths: Sequence[str]) -> list[int]:
    """Return for each source the last epoch of which a shard has to read rows again to resume, -1 for none (collective)."""
    ranks = stream.ranks.for_purpose("load")
    shards = range(len(table)) if ranks.simulated else stream.ends.owned.tolist()

    def find_last_epochs() -> list[int]:
        epochs_by_shard = [_last_epochs_of(stream, shard, table[[shard]], histories) for shard in shards]
        return [max((epochs.get(path, -1) for epochs in epochs_by_shard), default=-1) for path in paths]

    return ranks.gather_ints(call_on_all_ranks(ranks, find_last_epochs)).max(axis=0).tolist()


def _last_epochs_of(stream: Stream, shard: int, row: Ints, histories: VersionLogs) -> dict[str, int]:
    """Return, for each source, the last epoch that a shard reads again to resume within a window or document.

    Args:
        row: ``int64[1, columns]``, a copy of the shard's row in the table that is loaded.
        histories: The data of each source, for that table.
    """
    if not _begun_nodes(stream.schema, stream.schema.root, row):
        return {}
    root = stream.setup.recipe.build(shard)
    set_histories(root, histories)
    changing.apply_changes_at(root, row[0, FIRST_SLOT:].data)  # what needs an old list begins again, and is not read
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

    A node that `reveals_next_token` does as soon as it has moved in its epoch: a sample says something of the next one.
    """
    begun_nodes: list[tuple[Node[Any], Ints]] = []
    fresh_nodes = schema.nodes_with_slots(schema.fresh_table(1))
    for (_, node, positions), (*_, fresh_positions) in zip(
        schema.nodes_with_slots(row, root), fresh_nodes, strict=True
    ):
        if not node.READS_AHEAD:
            continue
        is_begun = bool(positions[:, position_slots(node.FIELDS)].any())
        if isinstance(node, RereadsDocument) and node.reveals_next_token:
            # The last sample of an epoch says nothing of the next epoch
            is_in_epoch = is_endless(node) or any(positions[0, slot + 1] for _, slot in readers_of(node, 0))
            is_begun |= is_in_epoch and bool((positions != fresh_positions).any())
        if is_begun:
            begun_nodes.append((node, positions[0]))
    return begun_nodes


def _first_undrawn_epoch(schema: Schema, table: Ints, path: str) -> int:
    """Return the first epoch of a source in which no logical shard has drawn a row."""
    epochs_and_rows = reader_positions(schema, table, path)
    return int((epochs_and_rows[:, 0] + (epochs_and_rows[:, 1] > 0)).max())
