"""The command ``audit``: steps that served a document, or documents of some steps, as plain values."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rescale_data.audit.audit import Audit
from rescale_data.engine.as_pipeline import as_pipeline
from rescale_data.engine.recipe import Pipeline


def audit(run: str, pipelines: Sequence[str], find: str | None, steps: str | None, **as_loaded: Any) -> dict[str, Any]:
    """Return the audit's result: ``served`` samples and ``steps``; with ``find`` how many ``rows`` match and were ``drawn``.

    Args:
        pipelines: ``module:function``, or a source or dataset; looked for in the working directory, too.
        find, steps: One of them, as `Audit.find` and ``FIRST:STOP``.

    Raises:
        ValueError: Neither of them or both, no such function, document or step.
    """
    if (find is None) == (steps is None):
        raise ValueError("Give one of --find SOURCE:ROW or --steps FIRST:STOP.")
    audit = Audit(run, *map(_import_pipeline, pipelines), **as_loaded)
    if find is not None:
        return asdict(audit.find(find))
    first_step, colon, stop_step = str(steps).partition(":")
    if not (first_step.isdigit() and (stop_step.isdigit() or not colon)):
        raise ValueError(f"--steps {steps}: give a step, or FIRST:STOP, the first and the one after the last.")
    step_bounds = int(first_step), int(stop_step) if colon else int(first_step) + 1
    return {"served": [asdict(served) for served in audit.documents(*step_bounds)], "steps": step_bounds}


def _import_pipeline(object_name: str) -> Pipeline:
    try:
        return as_pipeline(import_object(object_name))
    except (TypeError, ValueError) as error:
        raise ValueError(f"--pipeline {object_name}: {error}") from error


def import_object(object_name: str) -> Any:
    """Import the object that ``MODULE:NAME`` names; raise ``ValueError`` if there is none."""
    module, colon, attribute_path = object_name.partition(":")
    if not (module and colon and attribute_path):
        raise ValueError(f"{object_name!r} names nothing: give MODULE:NAME, train:pipeline for `pipeline` in train.py.")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        value: Any = importlib.import_module(module)
        for attribute in attribute_path.split("."):
            value = getattr(value, attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{error}. Give MODULE:NAME, as `import` and Python name them.") from error
    return value
