"""What differs between a state and a pipeline, in words; and what of it is but said: functions, blocklists, weights."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Set
from typing import Any, TypeAlias

from rescale_data.engine.recipe import EXCLUDED_STEPS, path_name
from rescale_data.engine.stream import Stream
from rescale_data.errors import DataStateError
from rescale_data.nodes.function import CODE, VERSION

Nodes: TypeAlias = Mapping[str, Mapping[str, Any]]
_SHOWN = 5


def differences(saved: str, now: str) -> list[str]:
    """The first few differences, ``"source.files.b.parquet: saved 3, now 4"``; empty where the documents are equal."""
    if saved == now:
        return []
    found = _compare("", json.loads(saved), json.loads(now))
    return found[:_SHOWN] + ([f"and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else [])


def without_functions(saved: str, now: str) -> tuple[str, str]:
    """Two pipelines' parameters without the functions' names and sources, and without versions that only one has."""
    one, other = json.loads(saved), json.loads(now)
    for name in one.keys() & other.keys():
        both = VERSION in one[name] and VERSION in other[name]
        for node in (one[name], other[name]):
            node.pop(CODE, None)
            node.pop(VERSION, None) if not both else None
    return json.dumps(one), json.dumps(other)


def say_changes(stream: Stream, saved: str) -> None:
    """Log what differs, and is let pass."""
    one, other = json.loads(saved), json.loads(stream.schema.pipeline_json)
    functions = _of_parameters(one, other, {name: {CODE, VERSION} for name in one.keys() & other.keys()})
    free = {path_name(path): node.MAY_CHANGE for path, node in stream.schema.root.walk() if path_name(path) in one}
    settings = _of_parameters(one, other, free)
    if functions:
        stream.ranks.log(
            logging.WARNING,
            "Functions of the pipeline are not those of the state, by name or source: %s. Give them version=: it is compared.",
            "; ".join(functions),
        )
    if settings:
        stream.ranks.log(logging.INFO, "Changed since the state was saved: %s.", "; ".join(settings))


def steps_left_out(stream: Stream, saved: str, step: int) -> list[tuple[int, int]]:
    """Those of the state and those of the loader; ``DataStateError`` where some of the loader's have passed."""
    before = [(int(first), int(stop)) for first, stop in json.loads(saved)[path_name(())].get(EXCLUDED_STEPS, ())]
    late = [each for each in stream.schema.excluded_steps if each not in before and each[0] < step]
    if late:
        raise DataStateError(
            f"The state is that of step {step}: the steps {late} were to be left out and have passed. Load an older "
            f"checkpoint, or leave them out of exclude_steps()."
        )
    return [*before, *stream.schema.excluded_steps]


def _compare(path: str, saved: Any, now: Any) -> list[str]:
    saved, now = _by_name(saved), _by_name(now)
    if isinstance(saved, dict) and isinstance(now, dict):
        found: list[str] = []
        for key in sorted({*saved, *now}):
            here = f"{path}: {key}" if path else key
            if key not in now:
                found.append(f"{here} was saved and is not there now")
            elif key not in saved:
                found.append(f"{here} is new")
            else:
                found += _compare(here, saved[key], now[key])
        return found
    return [] if saved == now else [f"{path}: saved {_short(saved)}, now {_short(now)}"]


def _by_name(value: Any) -> Any:
    """A list of ``[name, ...]``, as manifests have of files, as a dict of the names."""
    named = isinstance(value, list) and all(
        isinstance(item, list) and item and isinstance(item[0], str) for item in value
    )
    return {item[0]: item[1:] for item in value} if named and value else value


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _of_parameters(one: Nodes, other: Nodes, keys: Mapping[str, Set[str]]) -> list[str]:
    """Of some parameters of each node; of a node of which the state says none of them, nothing."""
    picked = [
        {name: {k: v for k, v in nodes[name].items() if k in keys[name]} for name in keys} for nodes in (one, other)
    ]
    return differences(*(json.dumps({name: node[name] for name in keys if picked[0][name]}) for node in picked))
