"""Changes of a pipeline between the segments of a run: the allowed ones, and the translation of a state.

Parameters that a node names may change, children may come and go, and samples may get another format (`HasFormat`): a longer
``seq_len``, labels, another dtype. A state is first translated to the current pipeline, and then compared like any other state.
The header of a state keeps the earlier formats, with the number of samples and tokens delivered by then.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rescale_data.engine.recipe import FIRST_SLOT, SAMPLES, VersionLog, path_name
from rescale_data.engine.schema import NodeParameters, Schema
from rescale_data.engine.states.differences import without_parameters
from rescale_data.engine.stream import Stream
from rescale_data.nodes import changing
from rescale_data.nodes.abilities import HasFormat, Mixes
from rescale_data.nodes.base import Node
from rescale_data.nodes.below import may_change
from rescale_data.nodes.sample_format import EARLIER_PARAMETERS_KEY, WINDOW_PARAMETERS
from rescale_data.state import Ints

NodePath = tuple[str, ...]
_MAX_EARLIER_FORMATS = 2  # a window may have been packed in so many earlier formats


@dataclass(frozen=True)
class ChangedChild:
    """A child node that was added to the pipeline, or removed from it, since the state was saved.

    Args:
        path: The path of the child.
        kept_fields: The fields that the node above keeps for the child, by their names in a checkpoint.
    """

    path: NodePath
    kept_fields: frozenset[str]

    @property
    def name(self) -> str:
        return ".".join(self.path)

    def owns(self, key: str) -> bool:
        """True if the field, source or node with the name ``key`` belongs to the child."""
        return key in self.kept_fields or key == self.name or key.startswith(self.name + ".")


def fixed_parameters(schema: Schema, pipeline: NodeParameters) -> NodeParameters:
    """Return the parameters of a pipeline that must stay the same for the whole run."""
    changeable: defaultdict[str, set[str]] = defaultdict(set)
    for path, node in schema.root.walk():
        can_change = _all_parents_meet(schema.root, path, lambda node: changing.resume_unit(node) is not None)
        changeable_now = may_change(node) if can_change else frozenset[str]()
        keys = node.FORMAT if isinstance(node, HasFormat) and _is_never_reread(schema.root, path) else frozenset[str]()
        if changeable_now or keys:
            changeable[path_name(path)] |= {*changeable_now, *keys, EARLIER_PARAMETERS_KEY}
    return without_parameters(pipeline, changeable)


def apply_changes(schema: Schema, table: Ints) -> int:
    """Let changes take effect in each logical shard that is not within a partly delivered document or window.

    Returns:
        The number of logical shards that begin a document or window again. They cannot go on in it without the sources or the
        blocklist that are gone.
    """
    return sum(changing.apply_changes_at(schema.root, row[FIRST_SLOT:].data) for row in table)


def _is_never_reread(root: Node[Any], path: NodePath) -> bool:
    """True if no node above the one at ``path`` reads its samples a second time."""
    return _all_parents_meet(root, path, lambda _: False)


def _all_parents_meet(root: Node[Any], path: NodePath, condition: Callable[[Node[Any]], bool]) -> bool:
    """True if each node above the one at ``path`` is ours, and reads nothing a second time unless it meets a condition."""
    node = root
    for name in path:
        if name not in node.children or (node.READS_AHEAD and not condition(node)):
            return False
        node = node.children[name]
    return True


def node_changes(schema: Schema, saved_parameters: Mapping[str, Any]) -> tuple[list[ChangedChild], list[ChangedChild]]:
    """Return the child nodes removed from the pipeline, and the ones added to it, since a state was saved."""
    removed: list[ChangedChild] = []
    added: list[ChangedChild] = []
    for path, node in schema.root.walk():
        if isinstance(node, Mixes) and path_name(path) in saved_parameters:
            saved_children, current_children = set(_saved_child_names(path, saved_parameters)), set(node.children)
            removed += [_make_changed_child(path, node, name) for name in sorted(saved_children - current_children)]
            added += [_make_changed_child(path, node, name) for name in sorted(current_children - saved_children)]
    return removed, added


def _make_changed_child(path: NodePath, node: Node[Any], child: str) -> ChangedChild:
    parent_paths = {field.path[:-1] for field in node.FIELDS if field.path[-1] in node.children}
    return ChangedChild((*path, child), frozenset(".".join((*path, *parent, child)) for parent in parent_paths))


def _saved_child_names(path: NodePath, saved_parameters: Mapping[str, Any]) -> Iterator[str]:
    path_prefix = "".join(f"{name}." for name in path)
    for name in saved_parameters:
        child = name.removeprefix(path_prefix)
        if name.startswith(path_prefix) and "." not in child and name != path_name(()):
            yield child


# Positions


def adapt_positions(stream: Stream, saved_parameters: NodeParameters, table: Ints) -> dict[str, VersionLog]:
    """Adapt positions to the current weights and format of samples (such as ``seq_len``), and log changes of the format.

    Args:
        saved_parameters: The parameters of the pipeline in the state.
        table: The positions; the ones that depend on the format are changed in place.

    Returns:
        The earlier formats and weights that nodes still need, by the path of the node.

    Raises:
        DataStateError: A changed parameter of a node does not fit the samples drawn so far.
    """
    schema, samples = stream.schema, int(table[:, SAMPLES].sum())
    histories: dict[str, VersionLog] = {}
    format_changes: list[str] = []
    for path, node, positions in schema.nodes_with_slots(table):
        history: VersionLog = []
        name = path_name(path)
        saved = saved_parameters.get(name)
        if saved is not None and isinstance(node, Mixes):
            node.check_change(saved, positions)
            history = list(node.earlier_parameters(saved, positions))
        # samples that are read again keep their format
        if saved is not None and isinstance(node, HasFormat) and _is_never_reread(schema.root, path):
            new_parameters = schema.pipeline[name]
            history = [(int(sample), earlier) for sample, earlier in saved.get(EARLIER_PARAMETERS_KEY, ())]
            changed_keys = [key for key in sorted(node.FORMAT) if saved.get(key) != new_parameters.get(key)]
            format_changes += [
                f"{name}: {key} was {saved.get(key)} up to sample {samples}, and is {new_parameters.get(key)} from there"
                for key in changed_keys
            ]
            if not set(WINDOW_PARAMETERS).isdisjoint(changed_keys):
                old_format = _old_format(saved, history, samples, len(table))
                history = [*history, (samples, old_format)][-_MAX_EARLIER_FORMATS:]
                node.convert_sample_format(positions)
        if history:
            histories[name] = history
    if format_changes:
        stream.ranks.warn(
            "Samples have another form than when the state was saved: %s. No token is lost or repeated.",
            "; ".join(format_changes),
        )  # fmt: skip
    return histories


def _old_format(parameters: Mapping[str, Any], history: VersionLog, samples: int, num_shards: int) -> dict[str, Any]:
    first_sample, num_tokens = (history[-1][0], history[-1][1]["tokens"]) if history else (0, 0)
    format_values = {key: parameters[key] for key in WINDOW_PARAMETERS if key in parameters}
    num_tokens += (samples - first_sample) * parameters["seq_len"]
    return {**format_values, "tokens": num_tokens, "shards": num_shards}
