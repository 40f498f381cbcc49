"""`Schema`: properties of a pipeline that are the same for all logical shards, taken from the first shard."""

from __future__ import annotations

import json
import operator
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np

from rescale_data.engine.recipe import FIRST_SLOT, LOADER_FIELDS, NO_REMAINDER, SAMPLES, STAMP, VersionLogs, path_name
from rescale_data.nodes.abilities import NeedsHistory, Prefetches, Reports
from rescale_data.nodes.base import Node, initial, slots_of
from rescale_data.nodes.below import epoch_end, has_provenance
from rescale_data.nodes.foreign import Foreign
from rescale_data.nodes.sample_format import EARLIER_PARAMETERS_KEY
from rescale_data.sources.source import BaseSource
from rescale_data.state import Ints, encode, field_of, flatten, position_slots, state_of

NodeParameters: TypeAlias = Mapping[str, Mapping[str, Any]]
"""The parameters of each node of a pipeline, by the path of the node."""


def _require_same_provenance(root: Node[Any]) -> None:
    """Raise ``ValueError`` if some readers of the pipeline give the provenance of their rows and others do not."""
    has_origin = {path_name(path): has_provenance(node) for path, node in root.walk() if node.reads is not None}
    if len(set(has_origin.values())) > 1:
        paths_with = [path for path, gives in has_origin.items() if gives]
        paths_without = [path for path, gives in has_origin.items() if not gives]
        raise ValueError(
            f"The rows of {paths_with} come with their provenance, those of {paths_without} do not. Give provenance=True to "
            f"every rd.Reader of the pipeline, or to none."
        )


class Schema:
    """The properties of a pipeline that hold for every logical shard: table columns, sources and node parameters.

    A schema is made of the pipeline of one shard, before any data is read. From then on the loader asks the schema in place of
    that pipeline.
    """

    def __init__(self, root: Node[Any]) -> None:
        _require_same_provenance(root)
        self.root, self._seeds = root, _seeds(root)
        self.histories: VersionLogs = {}
        self.fields = (*LOADER_FIELDS, *root.fields)
        field_keys = [field.key for field in (*self.fields, STAMP)]
        duplicates = sorted({key for key in field_keys if field_keys.count(key) > 1})
        if duplicates:
            raise TypeError(
                f"The pipeline's state has the paths {duplicates}, which the table of all logical shards uses itself or which "
                f"occur twice. Rename these fields of your node."
            )

    def fresh_table(self, num_logical_shards: int) -> Ints:
        """Return the table of a run that has delivered nothing: ``int64[N, columns]``."""
        initial_row = np.concatenate([[0, NO_REMAINDER], np.array(initial(self.root), dtype=np.int64)])
        return np.tile(initial_row, (num_logical_shards, 1))

    def require_same_fields(self, node: Node[Any], shard: int) -> None:
        """Raise ``TypeError`` if the pipeline of a shard has other state fields, ``ValueError`` if it has other seeds."""
        if node.fields != self.root.fields:
            raise TypeError(
                f"The pipeline of logical shard {shard} has the state {_field_formats(node)}, the first one has "
                f"{_field_formats(self.root)}. Paths, dtypes and shapes are the same for every shard."
            )
        if _seeds(node) != self._seeds:
            raise ValueError(
                f"The readers of logical shard {shard} have the seeds {_seeds(node)}, those of shard 0 {self._seeds}: each "
                f"would divide another order, and rows would come twice or never. Give all shards one seed."
            )

    def require_same_state(self, node: Node[Any], shard: int) -> None:
        """Raise ``TypeError`` if the pipeline of a shard begins in another state, or as `require_same_fields` does."""
        self.require_same_fields(node, shard)
        first_shard_leaves, leaves = (flatten(state_of(root.fields, initial(root))) for root in (self.root, node))
        for (path, first_value), (_, value) in zip(first_shard_leaves, leaves, strict=True):
            if encode(field_of(path, first_value), first_value) != encode(field_of(path, value), value):
                raise TypeError(
                    f"The state {'.'.join(path)!r} begins as {value} in logical shard {shard} and as {first_value} in shard "
                    f"0, but is the same for every shard. Give the nodes of all shards the same weights and the same "
                    f"blocklist."
                )

    def epoch_end(self, table: Ints) -> tuple[Ints, Ints] | None:
        """Return each shard's samples left in the epoch and its position after it; `None` if only reading can find them."""
        return epoch_end(self.root, table[:, FIRST_SLOT:], np.arange(len(table), dtype=np.int64))

    def unsized_nodes(self, table: Ints) -> list[str]:
        """Return the class names of nodes that do not know their number of samples, although all nodes below them do."""
        shard_numbers = np.arange(len(table), dtype=np.int64)
        nodes: list[tuple[tuple[str, ...], Node[Any]]] = []
        for path, node, positions in self.nodes_with_slots(table):
            if epoch_end(node, positions, shard_numbers) is None:
                nodes = [(prefix, parent) for prefix, parent in nodes if path[: len(prefix)] != prefix] + [(path, node)]
        return sorted({type(node.wrapped_node if isinstance(node, Foreign) else node).__name__ for _, node in nodes})

    @property
    def position_in_epoch_columns(self) -> list[int]:
        """The indices of the table columns that give the position of a shard within its epoch."""
        return [FIRST_SLOT + slot for slot in position_slots(self.root.fields, include_epochs=False)]

    def samples_per_epoch(self, table: Ints) -> int | None:
        """Return the number of samples in the current epoch, delivered or not; `None` if only reading can find it."""
        epoch_start_table, columns = table.copy(), self.position_in_epoch_columns
        epoch_start_table[:, columns] = self.fresh_table(len(table))[:, columns]
        end_of_epoch = self.epoch_end(epoch_start_table)
        return None if end_of_epoch is None else int(end_of_epoch[0].sum())

    def sources(self) -> dict[str, BaseSource]:
        """Return the sources of the pipeline, by the path of the node that reads each."""
        return {path_name(path): node.reads for path, node in self.root.walk() if node.reads is not None}

    def progress(self, table: Ints, shards: Ints) -> dict[str, float]:
        """Return the counters of the given shards, by name; counters of several readers of one source are added up."""
        counters: dict[str, float] = {}
        shared_names, owned_table = self._shared_source_names(), table[shards]
        for path, node, positions in self.nodes_with_slots(owned_table):
            if not isinstance(node, Reports):
                continue
            for key, value in node.progress(positions, shards, owned_table[:, SAMPLES]).items():
                if node.reads is not None and node.reads.name in shared_names and key.endswith(f"/{node.reads.name}"):
                    key += f" ({path_name(path)})"
                reduce = min if key.startswith("epoch_min/") else max if key.startswith("epoch_max/") else float.__add__
                counters[key] = reduce(counters[key], float(value)) if key in counters else float(value)
        return counters

    def _shared_source_names(self) -> set[str]:
        """Return the names that several sources of the pipeline share."""
        source_by_name: dict[str, BaseSource] = {}
        return {src.name for src in self.sources().values() if source_by_name.setdefault(src.name, src) is not src}

    def use_histories(self, histories: VersionLogs) -> None:
        """Set the manifests of the sources and the earlier sample formats that hold from now on."""
        if histories != self.histories:
            for name in ("sources_json", "pipeline_json"):
                vars(self).pop(name, None)  # they are made anew
        self.histories = histories
        set_histories(self.root, histories)

    def nodes_with_slots(
        self, table: Ints, root: Node[Any] | None = None
    ) -> Iterator[tuple[tuple[str, ...], Node[Any], Ints]]:
        """Yield each node that is not inside a foreign node, with its path and its position columns, a view of the table.

        Args:
            root: The pipeline whose nodes are yielded; default: that of the first shard.
        """
        for path, node in (self.root if root is None else root).walk():
            if (node_slots := slots_of(self.root, path)) is not None:
                yield path, node, table[:, FIRST_SLOT:][:, node_slots]

    def prefetch_shards(self, table: Ints, shards: Ints) -> None:
        """Begin to fetch the data that the given shards need first."""
        for _, node, positions in self.nodes_with_slots(table[shards]):
            if isinstance(node, Prefetches):
                node.prefetch(positions, shards)

    @cached_property
    def manifests(self) -> Mapping[str, Mapping[str, Any]]:
        """The current manifest (description of the data) of each source, by the path of its reader; computed once."""
        return {path: dict(source.manifest()) for path, source in self.sources().items()}

    @cached_property
    def sources_json(self) -> str:
        histories = {path: self.histories.get(path, ()) for path in self.manifests}
        by_epoch = {path: {"by_epoch": history} for path, history in histories.items() if len(history) > 1}
        return to_json({**self.manifests, **by_epoch})

    @cached_property
    def pipeline_json(self) -> str:
        parameters_by_path = {path_name(path): _checked_parameters(path, node) for path, node in self.root.walk()}
        for path, node in self.root.walk():
            if node.reads is None and (earlier_formats := self.histories.get(path_name(path))):
                parameters_by_path[path_name(path)][EARLIER_PARAMETERS_KEY] = earlier_formats
        return to_json(parameters_by_path)

    @property
    def pipeline(self) -> NodeParameters:
        """The parameters of each node of the pipeline, by the path of the node, as read from JSON."""
        return json.loads(self.pipeline_json)

    @cached_property
    def columns_json(self) -> str:
        """The table columns of a state as JSON (name, dtype and shape), in the order of the table."""
        return to_json([{"name": field.key, **field.describe()} for field in (STAMP, *self.fields)])

    @property
    def header_texts(self) -> dict[str, str]:
        """The JSON texts in the header of a state: its columns, parameters and sources."""
        return {"columns": self.columns_json, "pipeline": self.pipeline_json, "sources": self.sources_json}


def _seeds(node: Node[Any]) -> list[int]:
    return [inner_node.of_shard.seed for _, inner_node in node.walk() if inner_node.of_shard is not None]


def _field_formats(node: Node[Any]) -> dict[str, str]:
    return {field.key: "{dtype}{shape}".format(**field.describe()) for field in node.fields}


def _checked_parameters(path: tuple[str, ...], node: Node[Any]) -> dict[str, Any]:
    parameters = {"node": type(node).__name__, **node.parameters()}
    try:
        to_json(parameters)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{type(node).__name__} ({path_name(path)}) has parameters() that JSON cannot hold: {error}. Return strings, "
            f"numbers, and lists and dicts of these."
        ) from error
    return parameters


def set_histories(root: Node[Any], histories: VersionLogs) -> None:
    """Give nodes of a pipeline the manifests that their sources have had in the run, or their earlier sample formats."""
    for path, node in root.walk():
        if isinstance(node, NeedsHistory):
            node.use_history(histories.get(path_name(path), ()))


def to_json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=operator.index)


def json_round_trip(value: Any) -> Any:
    """Return a value as it is after a round trip through JSON."""
    return json.loads(to_json(value))
