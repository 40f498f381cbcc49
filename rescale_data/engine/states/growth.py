"""Growth of the data during a run: added files are read from the first epoch that no logical shard has begun yet.

The *history* of a source gives its manifests, each by the epoch from which it holds. A state keeps the history under "sources":
the manifest itself if there is only one, else ``{"by_epoch": [[epoch, manifest], ...]}``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

from rescale_data.engine.ranks.ranks import call_on_all_ranks
from rescale_data.engine.recipe import EPOCH_ENDED, FIRST_SLOT, NO_REMAINDER, REMAINDER_COLUMN, VersionLog, path_name
from rescale_data.engine.schema import Schema, json_round_trip, set_histories
from rescale_data.engine.states.differences import differences
from rescale_data.engine.stream import Stream
from rescale_data.errors import DataStateError
from rescale_data.nodes import changing
from rescale_data.nodes.abilities import RereadsDocument
from rescale_data.nodes.base import Node
from rescale_data.nodes.below import is_endless, readers_of
from rescale_data.nodes.reader import Reader
from rescale_data.sources.fragmented import FILES, FOLDERS, short_manifest
from rescale_data.sources.source import FiledSource
from rescale_data.state import Ints, position_slots

Manifest: TypeAlias = Mapping[str, Any]

_UNREACHED_EPOCH = 1 << 40


@dataclass(frozen=True)
class Growth:
    """The changes of the data since a state was saved: the saved manifests, and the added files.

    Args:
        histories: The saved histories, by the path of the node that reads the source.
        added_files: The names of the added files, by the path of the node, for each source that has more files now.
    """

    histories: dict[str, VersionLog]
    added_files: dict[str, list[str]]

    def all_histories(self, schema: Schema, epochs: Mapping[str, int] | None = None) -> dict[str, VersionLog]:
        """Return the manifests of each source by epoch: the saved ones, and those with the added files.

        Args:
            epochs: The epoch at which the added files of each source join; `None` if they join in no epoch, to read as before.
        """
        all_histories = dict(self.histories)
        for path in self.added_files:
            first_epoch = _UNREACHED_EPOCH if epochs is None else epochs[path]
            earlier_entries = [(epoch, manifest) for epoch, manifest in self.histories[path] if epoch < first_epoch]
            all_histories[path] = [*earlier_entries, (first_epoch, dict(schema.manifests[path]))]
        return all_histories


def compare_sources(schema: Schema, saved: Mapping[str, Any]) -> Growth:
    """Return the files that were added since a state was saved; raise ``DataStateError`` if the data changed otherwise.

    Args:
        saved: The saved sources, by the path of the node that reads each.
    """
    histories, sources, own_manifests = {path: parse(value) for path, value in saved.items()}, schema.sources(), {}
    if saved == json.loads(schema.sources_json):
        return Growth(histories, {})
    old_manifests, added_files = {path: history[-1][1] for path, history in histories.items()}, dict[str, list[str]]()
    for path, manifest in schema.manifests.items():
        own_manifests[path] = manifest
        if path in old_manifests and isinstance(sources[path], FiledSource) and old_manifests[path] != manifest:
            old_manifests[path], manifest = _file_manifests(sources[path], old_manifests[path], manifest)
            added = _added_file_names(old_manifests[path], manifest)
            own_manifests[path] = _without_files(manifest, added)
            added_files |= {path: added} if added else {}
    changed = differences(json_round_trip(old_manifests), json_round_trip(own_manifests))
    if any(FOLDERS in old_manifests[path] and old_manifests[path] != own_manifests.get(path) for path in old_manifests):
        changed.append("the index that lists the files of then is no longer in index_dir")
    if changed:
        if any(_is_below_another_root(old_manifests.get(path, {}), now) for path, now in schema.manifests.items()):
            changed.append(
                "files of a list are named below the folder that all share, now another one; a folder or a glob keeps its names"
            )
        raise DataStateError(
            f"The sources differ from those of the checkpoint: {'; '.join(changed)}. Positions in other data mean other rows: "
            f"restore the files, or begin a new run."
        )
    return Growth(histories, added_files)


def _is_below_another_root(old: Manifest, current: Manifest) -> bool:
    """True if the files lie below another root now: no name is an old one, but one is an old one with folders before it."""
    old_names, names = ({name for name, *_ in manifest.get(FILES, ())} for manifest in (old, current))
    old_suffix = f"/{min(old_names, default='')}"
    return old_names.isdisjoint(names) and any(name.endswith(old_suffix) for name in names)


def _file_manifests(source: object, old: Manifest, current: Manifest) -> tuple[Manifest, Manifest]:
    """Return two manifests with full lists of files if both lists can be read, else both with digests of the lists."""
    if old == current or not isinstance(source, FiledSource):
        return old, current
    full = source.file_manifest(old), source.file_manifest(current)
    return (short_manifest(old), short_manifest(current)) if full[0] is None or full[1] is None else (full[0], full[1])


def join_added_files(
    stream: Stream, growth: Growth, table: Ints, formats: Mapping[str, VersionLog]
) -> dict[str, VersionLog]:
    """Return the manifests of each source by epoch; added files are read from the next epoch that no shard has begun.

    Windows and documents that were delivered in part are read again, so their data must stay the same (collective).

    Args:
        table: Changed in place if the remainder of an epoch was planned without files that join it: it is planned again.
        formats: The earlier formats and weights that nodes still need.
    """
    if not growth.added_files:
        return growth.histories
    schema, paths = stream.schema, list(growth.added_files)
    epochs_read = _last_epochs_read(stream, table, {**growth.all_histories(schema), **formats}, paths)
    pairs = zip(paths, epochs_read, strict=True)
    epochs = {path: max(next_epoch(schema, table, path), epoch + 1) for path, epoch in pairs}
    if any((_reader_positions(schema, table, path)[:, 0] >= epoch).any() for path, epoch in epochs.items()):
        table[:, REMAINDER_COLUMN][table[:, REMAINDER_COLUMN] != EPOCH_ENDED] = NO_REMAINDER
    for path, added in growth.added_files.items():
        stream.ranks.warn(
            "%d files were added to the source %s since the state was saved (%s): they join at epoch %d, the next that no "
            "logical shard has begun.", len(added), path, ", ".join(added[:3]) + ("" if len(added) <= 3 else ", ..."),
            epochs[path],
        )  # fmt: skip
    return growth.all_histories(schema, epochs)


def _last_epochs_read(
    stream: Stream, table: Ints, histories: Mapping[str, VersionLog], paths: Sequence[str]
) -> list[int]:
    """Return for each source the last epoch of which a shard has to read rows again to resume, -1 for none (collective).

    Shards read again to go on within windows and documents that were delivered in part.
    """
    ranks = stream.ranks.for_purpose("load")
    shards = range(len(table)) if ranks.simulated else stream.ends.owned.tolist()

    def own_last_epochs() -> list[int]:
        by_shard = [_last_epochs_of(stream, shard, table[[shard]], histories) for shard in shards]
        return [max((epochs.get(path, -1) for epochs in by_shard), default=-1) for path in paths]

    return ranks.gather_ints(call_on_all_ranks(ranks, own_last_epochs)).max(axis=0).tolist()


def _last_epochs_of(stream: Stream, shard: int, row: Ints, histories: Mapping[str, VersionLog]) -> dict[str, int]:
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


def needed_manifests(histories: Mapping[str, VersionLog], schema: Schema, table: Ints) -> dict[str, VersionLog]:
    """Return the manifests of each source by epoch, without the ones that all logical shards have passed."""
    return {path: _drop_passed_epochs(history, schema, table, path) for path, history in histories.items()}


def _drop_passed_epochs(history: VersionLog, schema: Schema, table: Ints, path: str) -> VersionLog:
    if len(history) == 1:
        return history
    lowest = int(_reader_positions(schema, table, path)[:, 0].min())
    return [entry for entry, later in zip(history, [*history[1:], None], strict=True) if not later or later[0] > lowest]


def next_epoch(schema: Schema, table: Ints, path: str) -> int:
    """Return the first epoch of a source in which no logical shard has drawn a row."""
    epochs_and_rows = _reader_positions(schema, table, path)
    return int((epochs_and_rows[:, 0] + (epochs_and_rows[:, 1] > 0)).max())


def parse(value: Any) -> VersionLog:
    """Return the history of a source, ``(first epoch, manifest)`` pairs, from its value in a state."""
    return [(int(epoch), manifest) for epoch, manifest in value["by_epoch"]] if "by_epoch" in value else [(0, value)]


def _reader_positions(schema: Schema, table: Ints, path: str) -> Ints:
    """Return the epoch and the row that each shard has reached in a source, a view of the table: ``int64[N, slots]``."""
    for node_path, _, reader_rows in schema.nodes_with_slots(table):
        if path_name(node_path) == path:
            return reader_rows
    raise DataStateError(
        f"Files were added to the source {path!r}, which is read inside a torchdata node that keeps its position to itself. "
        f"Use the nodes of rescale_data around it, or go on with the files that there were."
    )


def _added_file_names(old: Manifest, current: Manifest) -> list[str]:
    old_names = {name for name, *_ in old.get(FILES, ())}
    return [name for name, *_ in current.get(FILES, ()) if name not in old_names]


def _without_files(current: Manifest, added: Sequence[str]) -> Manifest:
    added_names = set(added)
    return {**current, FILES: [file for file in current[FILES] if file[0] not in added_names]} if added else current
