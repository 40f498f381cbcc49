"""Data that changes in the course of a run: files that were added join at an epoch that no logical shard has begun.

A source's *history* says of what it consisted, by the epoch from which that holds. It is what a state keeps under "sources":
the manifest itself while there is one, else ``{"by_epoch": [[epoch, manifest], ...]}``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from rescale_data.engine.recipe import DEALT, FIRST_SLOT, UNDEALT, History, path_name
from rescale_data.engine.schema import Schema, as_json
from rescale_data.engine.states.differences import differences
from rescale_data.errors import DataStateError
from rescale_data.nodes.mixture.sampler import WeightedSampler
from rescale_data.rounds import ranges_of, shard_sizes
from rescale_data.sources.folders import FILES, FOLDERS, FoldingSource, fold, listed_in, num_rows
from rescale_data.sources.source import GrowingSource
from rescale_data.state import Ints, offsets, place_slots

Manifest: TypeAlias = Mapping[str, Any]

_NEVER = 1 << 40


@dataclass(frozen=True)
class Growth:
    """What has become of the data since a state was saved.

    Args:
        histories: As they were saved, by the path of the node that reads the source.
        grown: The sources that have other files now, with the names of those that were added.
        changed: Which of their files were removed or changed, in words; positions among those rows mean nothing now.
    """

    histories: dict[str, History]
    grown: dict[str, list[str]]
    changed: list[str]


def compare(schema: Schema, saved: Mapping[str, Any] | None) -> Growth:
    """Compare the data of a state with that of now; ``DataStateError`` where it is something else.

    Args:
        saved: By the path of the node that reads it; `None`: it is that of now.
    """
    if saved is None:
        return Growth({path: _history(schema, path) for path in schema.manifests}, {}, [])
    histories = {path: parse(value) for path, value in saved.items()}
    sources = schema.sources()
    last = {path: history[-1][1] for path, history in histories.items()}
    now = dict(schema.manifests)
    for path in last.keys() & now.keys():
        last[path], now[path] = _with_files(sources[path], last[path], now[path])
    growing = {path for path, source in sources.items() if isinstance(source, GrowingSource)}
    grown = {
        path: _added(last[path], now[path])
        for path in sorted(growing & last.keys())
        if last[path] != now[path] and _same_kind(last[path], now[path])
    }
    known = {**now, **{path: _without(now[path], added) for path, added in grown.items()}}
    found = differences(as_json(last), as_json(known))
    fatal = differences(*(as_json({k: v for k, v in each.items() if k not in grown}) for each in (last, known)))
    if fatal:
        raise DataStateError(_message(fatal))
    if any(FOLDERS in last[path] for path in grown):
        found.append("the index that lists the files of then is no longer in index_dir")
    return Growth(histories, grown, found)


def _with_files(source: object, last: Manifest, now: Manifest) -> tuple[Manifest, Manifest]:
    """Both in full where they differ and the lists are to be had, else both folded."""
    if last == now or not isinstance(source, FoldingSource):
        return last, now
    full = source.unfold(last), source.unfold(now)
    return (fold(last), fold(now)) if full[0] is None or full[1] is None else (full[0], full[1])


def refuse_changes(growth: Growth) -> None:
    """``DataStateError`` where files were removed or changed."""
    if growth.changed:
        raise DataStateError(_message(growth.changed, _LEAVE_OUT))


def joined(
    growth: Growth, schema: Schema, table: Ints, reached: Callable[[dict[str, History], Sequence[str]], list[int]]
) -> dict[str, History]:
    """The histories from now on: what was added joins at the next epoch that no logical shard has begun.

    Args:
        reached: By such histories and of some sources, the last epoch of each of which a window or document has read that is
            within something delivered: that is read again, and has to be what it was.
    """

    def since(epochs: Mapping[str, int]) -> dict[str, History]:
        return {
            path: _grow(history, epochs[path], schema.manifests[path]) if path in epochs else history
            for path, history in growth.histories.items()
        }

    paths = list(growth.grown)
    last = reached(since(dict.fromkeys(paths, _NEVER)), paths)
    return since(
        {path: max(next_epoch(schema, table, path), epoch + 1) for path, epoch in zip(paths, last, strict=True)}
    )


def begin_next_epoch(growth: Growth, schema: Schema, table: Ints) -> tuple[dict[str, History], int]:
    """Leave out what is left of the epochs that have begun, as some of it is gone.

    Args:
        table: Changed: each logical shard stands at the beginning of one and the same epoch of each source. What mixtures
            have drawn in the run stays: their schedules and caps go by it.

    Returns:
        The histories from now on, and the rows that were left out.
    """
    since = {path: _first_whole(schema, table, path) for path in growth.histories}
    left, fresh = 0, schema.fresh_table(len(table))
    seed = next(node.of_shard.seed for _, node in schema.root.walk() if node.of_shard is not None)
    _keep_counts(schema, table, fresh)
    for path, history in growth.histories.items():
        rows = _reader_rows(schema, table, path)
        left += _rows_until(since[path], history, rows, seed)
        _reader_rows(schema, fresh, path)[:, 0] = since[path]
    table[:, FIRST_SLOT:] = fresh[:, FIRST_SLOT:]
    table[:, DEALT] = UNDEALT
    histories = {p: _grow(history, since[p], schema.manifests[p]) for p, history in growth.histories.items()}
    return histories, left


def _first_whole(schema: Schema, table: Ints, path: str) -> int:
    """As `next_epoch`, but of this source alone: others of a mixture may have begun."""
    rows, fresh = _reader_rows(schema, table, path), schema.fresh_table(len(table))
    reader = next(found for found, _ in schema.root.walk() if path_name(found) == path)
    begun = table[:, DEALT] >= 0
    for above, node in schema.root.walk():
        own, first = schema.slots_at(table, above), schema.slots_at(fresh, above)
        if isinstance(node, WeightedSampler) or reader[: len(above)] != above:
            continue  # where a mixture stands says nothing of one source
        if own is not None and first is not None:
            slots = place_slots(node.own_fields(), epochs=False)
            begun |= (own[:, slots] != first[:, slots]).any(axis=1)
    return int((rows[:, 0] + begun).max())


def _keep_counts(schema: Schema, table: Ints, fresh: Ints) -> None:
    """Write into fresh rows what mixtures have counted since the run began."""
    for path, node in schema.root.walk():
        rows, begun = schema.slots_at(table, path), schema.slots_at(fresh, path)
        if isinstance(node, WeightedSampler) and rows is not None and begun is not None:
            num = offsets(node.own_fields())[-1]
            begun[:, :num] = rows[:, :num]
            node.begin_epoch(begun)


def _rows_until(until: int, history: History, rows: Ints, seed: int) -> int:
    """Rows of a source of files that all shards have before an epoch, from the epoch and row of each."""
    if not listed_in(history[-1][1]):
        return 0
    left, n = -int(rows[:, 1].sum()), len(rows)
    for epoch in range(int(rows[:, 0].min()), until):
        manifest = [manifest for since, manifest in history if since <= epoch][-1]
        total = num_rows(listed_in(manifest))
        behind = np.flatnonzero(rows[:, 0] <= epoch)
        left += int(shard_sizes(ranges_of(behind, np.full_like(behind, epoch), total, n, seed), total, n).sum())
    return left


def needed(histories: Mapping[str, History], schema: Schema, table: Ints) -> dict[str, History]:
    """The histories without what is before the epochs of all logical shards: the list of its files may be gone."""
    return {path: _since(history, schema, table, path) for path, history in histories.items()}


def _since(history: History, schema: Schema, table: Ints, path: str) -> History:
    if len(history) == 1:
        return history
    lowest = int(_reader_rows(schema, table, path)[:, 0].min())
    return [entry for entry, after in zip(history, [*history[1:], None], strict=True) if not after or after[0] > lowest]


def next_epoch(schema: Schema, table: Ints, path: str) -> int:
    """The first epoch of a source that no logical shard has begun."""
    rows = _reader_rows(schema, table, path)
    within = schema.columns_within  # epochs may differ although nothing of one has been drawn
    begun = (table[:, within] != schema.fresh_table(len(table))[:, within]).any(axis=1)
    begun |= table[:, DEALT] >= 0  # the epoch is planned: what each shard has left of it is part of the state
    return int((rows[:, 0] + begun).max())


def parse(value: Any) -> History:
    """A history as it stands in a state."""
    return [(int(epoch), manifest) for epoch, manifest in value["by_epoch"]] if "by_epoch" in value else [(0, value)]


def _history(schema: Schema, path: str) -> History:
    """That which a schema would save."""
    known = schema.histories.get(path, ())
    return list(known) if len(known) > 1 else [(0, schema.manifests[path])]


def _grow(history: History, since: int, manifest: Manifest) -> History:
    return [*((epoch, old) for epoch, old in history if epoch < since), (since, dict(manifest))]


def _reader_rows(schema: Schema, table: Ints, path: str) -> Ints:
    """The slots of the node that reads a source, a view: its epoch, then its row."""
    for node_path, _ in schema.root.walk():
        if path_name(node_path) == path:
            rows = schema.slots_at(table, node_path)
            if rows is not None:
                return rows
    raise DataStateError(
        f"Files were added to the source {path!r}, which is read inside a torchdata node that keeps its position to itself. "
        f"Use the nodes of rescale_data around it, or go on with the files that there were."
    )


def _same_kind(last: Manifest, now: Manifest) -> bool:
    of_last, of_now = ({k: v for k, v in each.items() if k not in (FILES, FOLDERS)} for each in (last, now))
    return of_last == of_now


def _added(last: Manifest, now: Manifest) -> list[str]:
    names = {name for name, *_ in last.get(FILES, ())}
    return [name for name, *_ in now.get(FILES, ()) if name not in names]


def _without(now: Manifest, added: Sequence[str]) -> Manifest:
    names = set(added)
    return {**now, FILES: [file for file in now[FILES] if file[0] not in names]} if added else now


_LEAVE_OUT = "give on_source_change='next_epoch' to leave out what is left of the epoch, "


def _message(found: Sequence[str], cure: str = "") -> str:
    return (
        f"The sources differ from those of the checkpoint: {'; '.join(found)}. Positions in other data mean other rows: "
        f"restore the files, {cure}or begin a new run."
    )
