"""Growth of the data during a run: the files of a state are compared with the present ones, which may be more.

The *history* of a source gives its manifests, each by the epoch from which it holds. A state keeps the history under "sources":
the manifest itself if there is only one, else ``{"by_epoch": [[epoch, manifest], ...]}``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from rescale_data.engine.recipe import VersionLog, VersionLogs, path_name
from rescale_data.engine.schema import Schema, json_round_trip
from rescale_data.engine.states.differences import differences
from rescale_data.errors import DataStateError
from rescale_data.sources.fragmented import FILES, FOLDERS, short_manifest
from rescale_data.sources.source import FiledSource
from rescale_data.state import Ints

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
    histories, sources, new_manifests = {path: history_of(value) for path, value in saved.items()}, schema.sources(), {}
    if saved == json.loads(schema.sources_json):
        return Growth(histories, {})
    old_manifests, added_files = {path: history[-1][1] for path, history in histories.items()}, dict[str, list[str]]()
    for path, manifest in schema.manifests.items():
        new_manifests[path] = manifest
        if path in old_manifests and isinstance(sources[path], FiledSource) and old_manifests[path] != manifest:
            old_manifests[path], manifest = _file_manifests(sources[path], old_manifests[path], manifest)
            added = _added_file_names(old_manifests[path], manifest)
            new_manifests[path] = _without_files(manifest, added)
            added_files |= {path: added} if added else {}
    changes = differences(json_round_trip(old_manifests), json_round_trip(new_manifests))
    if any(FOLDERS in old_manifests[path] and old_manifests[path] != new_manifests.get(path) for path in old_manifests):
        changes.append("the index that lists the files of then is no longer in index_dir")
    if changes:
        if any(_is_below_another_root(old_manifests.get(path, {}), now) for path, now in schema.manifests.items()):
            changes.append(
                "files of a list are named below the folder that all share, now another one; a folder or a glob keeps its names"
            )
        raise DataStateError(
            f"The sources differ from those of the checkpoint: {'; '.join(changes)}. Positions in other data mean other rows: "
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
    old_files, current_files = source.file_manifest(old), source.file_manifest(current)
    if old_files is None or current_files is None:
        return short_manifest(old), short_manifest(current)
    return old_files, current_files


def needed_manifests(histories: VersionLogs, schema: Schema, table: Ints) -> dict[str, VersionLog]:
    """Return the manifests of each source by epoch, without the ones that all logical shards have passed."""
    return {path: _drop_passed_epochs(history, schema, table, path) for path, history in histories.items()}


def _drop_passed_epochs(history: VersionLog, schema: Schema, table: Ints, path: str) -> VersionLog:
    if len(history) == 1:
        return history
    lowest_epoch = int(reader_positions(schema, table, path)[:, 0].min())
    with_next = zip(history, [*history[1:], None], strict=True)
    return [entry for entry, next_entry in with_next if not next_entry or next_entry[0] > lowest_epoch]


def history_of(value: Any) -> VersionLog:
    """Return the history of a source, ``(first epoch, manifest)`` pairs, from its value in a state."""
    return [(int(epoch), manifest) for epoch, manifest in value["by_epoch"]] if "by_epoch" in value else [(0, value)]


def reader_positions(schema: Schema, table: Ints, path: str) -> Ints:
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
