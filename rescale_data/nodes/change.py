"""What may change in a pipeline between the legs of a run: parameters that a node names, and children that come and go.

A saved state is first made into what the pipeline of now would have saved, and then loaded like any other.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rescale_data.nodes.base import Node
from rescale_data.nodes.recipe import FIRST_SLOT, STRINGS, Schema, path_name
from rescale_data.state import Ints, to_tensors

Path = tuple[str, ...]


@dataclass(frozen=True)
class Changed:
    """A child that came or went.

    Args:
        path: Of the child.
        own: The fields that the node above keeps for it, as they are named in a checkpoint.
    """

    path: Path
    own: frozenset[str]

    @property
    def name(self) -> str:
        return ".".join(self.path)

    def has(self, key: str) -> bool:
        """Whether a field, a source or a node belongs to it."""
        return key in self.own or key == self.name or key.startswith(self.name + ".")


def fit(schema: Schema, state: Mapping[str, Any]) -> tuple[dict[str, Any], list[Changed], list[Changed]]:
    """The state as the pipeline of now would have saved it, and the children that have come and that have gone.

    Those that have come are where they are in a run that has delivered nothing. What differs otherwise is as it was.
    """
    removed, added = _changes(schema, json.loads(state["pipeline"]))
    fresh = to_tensors(schema.fields, schema.fresh_table(int(state["num_logical_shards"]))) if added else {}
    shards = {key: value for key, value in state["shards"].items() if not any(c.has(key) for c in removed)}
    missing = {key: value for key, value in fresh.items() if any(c.has(key) for c in added) and key not in shards}
    strings = {name: _merged(state[name], getattr(schema, f"{name}_json"), removed, added) for name in STRINGS}
    return {**state, **strings, "shards": {**shards, **missing}}, added, removed


def without_free(schema: Schema, pipeline: str) -> str:
    """A pipeline's parameters without those that may change."""
    nodes = json.loads(pipeline)
    for path, node in schema.root.walk():
        for parameter in node.MAY_CHANGE:
            nodes.get(path_name(path), {}).pop(parameter, None)
    return json.dumps(nodes, sort_keys=True)


def adapt(schema: Schema, table: Ints, pipeline: str) -> None:
    """Tell the nodes whose parameters have changed since ``table`` was saved."""
    saved, now = json.loads(pipeline), json.loads(schema.pipeline_json)
    for path, node in schema.root.walk():
        name = path_name(path)
        if any(saved[name].get(parameter) != now[name][parameter] for parameter in node.MAY_CHANGE):
            node.adapt(schema.root.columns(table[:, FIRST_SLOT:], path))


def _changes(schema: Schema, saved: Mapping[str, Any]) -> tuple[list[Changed], list[Changed]]:
    removed: list[Changed] = []
    added: list[Changed] = []
    for path, node in schema.root.walk():
        if node.CHILDREN_MAY_CHANGE and path_name(path) in saved:
            before, now = set(_children(path, saved)), set(node.children)
            removed += [_changed(path, node, name) for name in sorted(before - now)]
            added += [_changed(path, node, name) for name in sorted(now - before)]
    return removed, added


def _changed(path: Path, node: Node[Any], child: str) -> Changed:
    kept = {field.path[:-1] for field in node.own_fields() if field.path[-1] in node.children}
    return Changed((*path, child), frozenset(".".join((*path, *own, child)) for own in kept))


def _children(path: Path, saved: Mapping[str, Any]) -> Iterator[str]:
    """The names of the nodes right below a path."""
    above = "".join(f"{name}." for name in path)
    for name in saved:
        rest = name.removeprefix(above)
        if name.startswith(above) and "." not in rest and name != path_name(()):
            yield rest


def _merged(saved: str, now: str, removed: list[Changed], added: list[Changed]) -> str:
    old, new = json.loads(saved), json.loads(now)
    kept = {key: value for key, value in old.items() if not any(change.has(key) for change in removed)}
    found = {key: value for key, value in new.items() if any(change.has(key) for change in added)}
    return json.dumps({**kept, **found}, sort_keys=True, separators=(",", ":"))
