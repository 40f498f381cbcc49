"""Whether a state fits a loader: what is compared when it is loaded, and of a checkpoint before anything is.

A plain ``dcp.load`` finds another number of logical shards ("Size mismatch between saved ... and current ...") and a field
that was added ("Missing key in checkpoint state_dict: ...") by itself, before our code runs, and in words that tell nobody
what to do; so `check` reads the metadata alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from rescale_data.engine.recipe import STAMP
from rescale_data.engine.states.change import Fitted, fit, fixed_by_others, lasting
from rescale_data.engine.states.differences import differences, without_functions
from rescale_data.engine.states.growth import compare, refuse_changes
from rescale_data.engine.states.table import BY_FIELD, IN_ONE, stored, version_of
from rescale_data.engine.stream import HasStream, Stream
from rescale_data.errors import DataStateError, require

_READS = (1, BY_FIELD, IN_ONE)


def check(saved: Mapping[str, Any], head: Mapping[str, Any], loader: HasStream) -> None:
    """``DataStateError`` where a data state does not fit the loader, or ``dcp.load`` refuses what `load_changed` takes.

    Args:
        saved: The table's tensors; those on the meta device will do.
        head: The state without its table.
    """
    require(HasStream, "the loader that is to load it", loader=loader)
    schema, n = loader.stream.schema, loader.stream.layout.num_logical_shards
    fitted = require_fit(loader.stream, head)
    found = {key: (tuple(value.shape), value.dtype) for key, value in saved.items() if isinstance(value, torch.Tensor)}
    wanted = (STAMP, *stored(version_of(schema), schema.fields))
    if all(found.get(field.key) == ((n, *(field.shape or ())), field.dtype) for field in wanted):
        return
    added, removed = ([child.name for child in children] for children in (fitted.added, fitted.removed))
    differs = f"{added} are new and {removed} gone" if added or removed else "it was saved by an older rescale_data"
    raise DataStateError(
        f"The checkpoint keeps the table of the sources in another shape than the loader does: {differs}. dcp.load refuses "
        f'that ("Missing key in checkpoint state_dict" or "Size mismatch"). Leave the loader out of the dict that dcp.load is '
        f"given, and call rescale_data.load_changed(path, loader): new sources begin with their first row, the others go on."
    )


def require_fit(stream: Stream, saved: Mapping[str, Any]) -> Fitted:
    """``DataStateError`` where a state belongs to another run: format, N, seed, fields, sources or pipeline.

    Returns:
        The state as the pipeline of now would have saved it.
    """
    now = {"num_logical_shards": stream.layout.num_logical_shards, "seed": stream.setup.recipe.seed}
    if saved["version"] not in _READS:
        raise DataStateError(
            f"The state has format version {saved['version']}, this rescale_data reads the versions {_READS}. Load it with the "
            f"release that saved it."
        )
    for name, cure in _FIXED.items():
        if saved[name] != now[name]:
            raise DataStateError(
                f"The state was saved with {name}={saved[name]}, the loader has {name}={now[name]}. {cure}"
            )
    schema, fitted = stream.schema, fit(stream.schema, saved)
    _require_same("fields", fitted.fields, json.loads(schema.fields_json))
    growth = compare(schema, fitted.sources)
    if stream.on_source_change == "error":
        refuse_changes(growth)
    pipelines = without_functions(fitted.pipeline, schema.pipeline)
    _require_same("pipeline", *(lasting(schema, each) for each in pipelines), fixed=fixed_by_others(schema))
    return replace(fitted, growth=growth)


def _require_same(name: str, saved: Any, now: Any, fixed: Sequence[str] = ()) -> None:
    found = differences(saved, now)
    if not found:
        return
    message = f"The {name} differ from those of the checkpoint: {'; '.join(found)}. {_DESCRIBED[name]}"
    held = [parameter for parameter in fixed if any(difference.startswith(parameter) for difference in found)]
    if held:
        message += (
            f" {held} could change if all nodes above were of rescale_data, or a Mapper of torchdata: others keep what is "
            f"below them as it was saved."
        )
    raise DataStateError(message)


_FIXED = {
    "num_logical_shards": "It is fixed for a whole run: build the loader with the saved one (the world size, the workers, the "
    "micro batch and the global batch may all change).",
    "seed": "Another seed is another order: build the loader with the saved one, or begin a new run.",
}
_DESCRIBED = {
    "fields": "The pipeline keeps other state than the one that was saved. Build the pipeline that was saved, with the saved "
    "verify= (True keeps a digest a reader), or begin a new run.",
    "pipeline": "These parameters change the order or the content of the samples: use the saved ones, or begin a new run.",
}
