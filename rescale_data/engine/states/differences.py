"""Describes the differences between a saved state and a pipeline as text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Set
from typing import Any

from rescale_data.engine.recipe import path_name
from rescale_data.engine.schema import NodeParameters
from rescale_data.engine.stream import Stream
from rescale_data.nodes.below import may_change
from rescale_data.nodes.function import CODE_KEY, VERSION
from rescale_data.nodes.sample_format import EARLIER_PARAMETERS_KEY

_MAX_SHOWN_LINES = 5


def differences(saved: Any, current: Any) -> list[str]:
    """Return the first few differences of two JSON values, as ``"source: shuffle: saved 3, now 4"``."""
    diff_lines = [] if saved == current else _compare("", saved, current)
    return diff_lines[:_MAX_SHOWN_LINES] + (
        [f"and {len(diff_lines) - _MAX_SHOWN_LINES} more"] if len(diff_lines) > _MAX_SHOWN_LINES else []
    )


def without_parameters(nodes: NodeParameters, ignored: Mapping[str, Set[str]]) -> NodeParameters:
    """Return the parameters of a pipeline without the ones that ``ignored`` names for each node, by the path of the node."""
    return {name: {k: v for k, v in node.items() if k not in ignored.get(name, ())} for name, node in nodes.items()}


def without_history(nodes: NodeParameters) -> NodeParameters:
    """Return the parameters of a pipeline without its earlier sample formats."""
    return without_parameters(nodes, {path: {EARLIER_PARAMETERS_KEY} for path in nodes})


def without_functions(saved: NodeParameters, current: NodeParameters) -> tuple[NodeParameters, NodeParameters]:
    """Return two pipelines' parameters without the code of functions, and without a ``version`` that only one of them has."""
    versioned = {name for name in saved.keys() & current.keys() if VERSION in saved[name] and VERSION in current[name]}
    ignored = {name: {CODE_KEY} if name in versioned else {CODE_KEY, VERSION} for name in saved.keys() & current.keys()}
    return without_parameters(saved, ignored), without_parameters(current, ignored)


def log_changes(stream: Stream, saved: NodeParameters) -> None:
    """Log the differences between a saved state and the current pipeline that a load accepts."""
    current = stream.schema.pipeline
    function_keys = {name: {CODE_KEY, VERSION} for name in saved.keys() & current.keys()}
    function_changes = _param_changes(saved, current, function_keys)
    exempt = {path_name(path): may_change(node) for path, node in stream.schema.root.walk() if path_name(path) in saved}
    changed_settings = _param_changes(saved, current, exempt)
    if function_changes:
        stream.ranks.warn(
            "Functions of the pipeline are not those of the state, by name or source: %s. Give them version=: it is compared.",
            "; ".join(function_changes),
        )
    if changed_settings:
        stream.ranks.info("Changed since the state was saved: %s.", "; ".join(changed_settings))


def _compare(path: str, saved: Any, current: Any) -> list[str]:
    saved, current = _named_items_to_dict(saved), _named_items_to_dict(current)
    if isinstance(saved, dict) and isinstance(current, dict):
        diff_lines: list[str] = []
        for key in sorted({*saved, *current}):
            key_path = f"{path}: {key}" if path else key
            if key not in current:
                diff_lines.append(f"{key_path} was saved and is not there now")
            elif key not in saved:
                diff_lines.append(f"{key_path} is new")
            else:
                diff_lines += _compare(key_path, saved[key], current[key])
        return diff_lines
    return [] if saved == current else [f"{path}: saved {_shortened_json(saved)}, now {_shortened_json(current)}"]


def _named_items_to_dict(value: Any) -> Any:
    """Return a list of ``[name, ...]`` entries, such as files in a manifest, as a dict by name; other values unchanged."""
    is_list_of_named_items = isinstance(value, list) and all(
        isinstance(item, list) and item and isinstance(item[0], str) for item in value
    )
    return {item[0]: item[1:] for item in value} if is_list_of_named_items and value else value


def _shortened_json(value: Any) -> str:
    json_text = json.dumps(value)
    return json_text if len(json_text) <= 80 else f"{json_text[:77]}..."


def _param_changes(old: NodeParameters, new: NodeParameters, keys: Mapping[str, Set[str]]) -> list[str]:
    """Return the differences in the given parameters of each node; nodes that have none of them in ``old`` count as equal."""
    compared_nodes = [
        {name: {k: v for k, v in nodes[name].items() if k in keys[name]} for name in keys} for nodes in (old, new)
    ]
    return differences(*({name: nodes[name] for name in keys if compared_nodes[0][name]} for nodes in compared_nodes))
