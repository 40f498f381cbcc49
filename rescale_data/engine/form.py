"""Samples that change their form between the legs of a run: a longer ``seq_len``, labels, another dtype (`Node.FORM`).

What forms there were, with the samples and tokens delivered by then, are scalars in the JSON of a state, under "before".
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from typing import Any

from rescale_data.engine.change import Path, without
from rescale_data.engine.recipe import EXCLUDED_STEPS, IN_STEP, SAMPLES, History, path_name
from rescale_data.engine.schema import Schema
from rescale_data.engine.stream import Stream
from rescale_data.nodes.base import Node
from rescale_data.nodes.form import BEFORE, LASTING
from rescale_data.state import Ints

_MOST = 2  # as many as a window may have been packed in


def reform(stream: Stream, saved: str, table: Ints) -> dict[str, History]:
    """Let samples have the form of now.

    Args:
        saved: The parameters of the pipeline in the state.
        table: The positions, changed where they depend on the form.

    Returns:
        The forms that there were, by the path of the node.
    """
    forms, said = _reform(stream.schema, saved, table)
    if said:
        stream.ranks.log(
            logging.WARNING, "Samples have another form than when the state was saved: %s. No token is lost or repeated.",
            "; ".join(said),
        )  # fmt: skip
    return forms


def _reform(schema: Schema, saved: str, table: Ints) -> tuple[dict[str, History], list[str]]:
    before, now = json.loads(saved), json.loads(schema.pipeline_json)
    found: dict[str, History] = {}
    said: list[str] = []
    for path, node in _formed(schema):
        name = path_name(path)
        old, new = before.get(name), now[name]
        if old is None:
            continue
        history: History = [(int(samples), form) for samples, form in old.get(BEFORE, ())]
        changed = [key for key in sorted(node.FORM) if old.get(key) != new.get(key)]
        samples = int(table[:, SAMPLES].sum())
        said += [
            f"{name}: {key} was {old.get(key)} up to sample {samples}, and is {new.get(key)} from there"
            for key in changed
        ]
        if not set(LASTING).isdisjoint(changed):
            history = [*history, (samples, _form(old, history, samples, len(table)))][-_MOST:]
            rows = schema.slots_at(table, path)
            if rows is not None:
                node.reform(rows)
        if history:
            found[name] = history
    return found, said


def without_form(schema: Schema, pipeline: str) -> str:
    """A pipeline's parameters without those of the form of its samples, and the forms before."""
    kept = {path_name(path): {*node.FORM, BEFORE} for path, node in _formed(schema)}
    return without(pipeline, {**kept, path_name(()): {*kept.get(path_name(()), ()), EXCLUDED_STEPS, IN_STEP}})


def _form(old: Mapping[str, Any], history: History, samples: int, num_shards: int) -> dict[str, Any]:
    since, tokens = (history[-1][0], history[-1][1]["tokens"]) if history else (0, 0)
    form = {key: old[key] for key in LASTING if key in old}
    return {**form, "tokens": tokens + (samples - since) * old["seq_len"], "shards": num_shards}


def _formed(schema: Schema) -> Iterator[tuple[Path, Node[Any]]]:
    """The nodes whose samples nobody above reads again: the form of the others stays."""
    return ((path, node) for path, node in schema.root.walk() if node.FORM and _is_drawn_once(schema.root, path))


def _is_drawn_once(root: Node[Any], path: Path) -> bool:
    node = root
    for name in path:
        if node.READS_AHEAD or name not in node.children:
            return False
        node = node.children[name]
    return True
