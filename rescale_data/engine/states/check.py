"""Compares a state with a loader: when the state is loaded, or before a checkpoint is loaded.

A plain ``dcp.load`` raises by itself if the number of logical shards or columns differs ("Size mismatch between saved ... and
current ..."). It does so before our code runs, and does not say what to do. So `check` reads the header alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rescale_data.engine.recipe import STAMP
from rescale_data.engine.schema import NodeParameters
from rescale_data.engine.states.change import ChangedChild, fixed_parameters, node_changes
from rescale_data.engine.states.codec import fields_in
from rescale_data.engine.states.differences import differences, without_functions
from rescale_data.engine.states.growth import Growth, compare_sources
from rescale_data.engine.stream import HasStream, Stream, stream_of
from rescale_data.errors import DataStateError, require_type
from rescale_data.state import slot_offsets


@dataclass(frozen=True)
class StateTranslation:
    """The parameters of the pipeline in a state, translated to the current pipeline, and the changes since the save.

    Args:
        added, removed: The child nodes that have come and gone. Nodes that have come have delivered nothing.
        growth: The changes of the data.
    """

    pipeline: NodeParameters
    added: list[ChangedChild]
    removed: list[ChangedChild]
    growth: Growth


def check_state_fits(header: Mapping[str, Any], loader: HasStream) -> None:
    """Raise ``DataStateError`` if a saved data state does not fit the loader, or only `load_changed` can load it."""
    require_type(HasStream, "the loader that is to load it", loader=loader)
    stream = stream_of(loader)
    translation = require_fit(stream, header)
    if slot_offsets(fields_in(header))[-1] == stream.table.shape[1] + 1:
        return
    added, removed = ([child.name for child in children] for children in (translation.added, translation.removed))
    raise DataStateError(
        f"The checkpoint keeps the table of the sources in another shape than the loader does: {added} are new and {removed} "
        f'gone. dcp.load refuses that ("Size mismatch"). Leave the loader out of the dict that dcp.load is given, and call '
        f"rescale_data.checkpoint.load_changed(path, loader): new sources begin with their first row, the others go on."
    )


def require_fit(stream: Stream, header: Mapping[str, Any]) -> StateTranslation:
    """Raise ``DataStateError`` if a state belongs to another run: its N, seed, columns, sources or pipeline differ."""
    current = {"num_logical_shards": stream.layout.num_logical_shards, "seed": stream.setup.recipe.seed}
    for name, advice in _FIXED_VALUE_ADVICE.items():
        if header[name] != current[name]:
            raise DataStateError(
                f"The state was saved with {name}={header[name]}, the loader has {name}={current[name]}. {advice}"
            )
    schema, pipeline = stream.schema, stream.schema.pipeline
    removed, added = node_changes(schema, header["pipeline"])

    def translation(saved: Mapping[str, Any], current: Mapping[str, Any]) -> dict[str, Any]:
        common = {key: value for key, value in saved.items() if not any(child.owns(key) for child in removed)}
        return {**common, **{key: value for key, value in current.items() if any(child.owns(key) for child in added)}}

    saved_fields, fields = (
        {field.key: field.describe() for field in fields} for fields in (fields_in(header), (STAMP, *schema.fields))
    )
    _require_same("fields", translation(saved_fields, fields), fields)
    growth = compare_sources(schema, translation(header["sources"], json.loads(schema.sources_json)))
    saved_pipeline = translation(header["pipeline"], pipeline)
    pipelines = without_functions(saved_pipeline, pipeline)
    _require_same("parameters of the pipeline", *(fixed_parameters(schema, nodes) for nodes in pipelines))
    return StateTranslation(saved_pipeline, added, removed, growth)


def _require_same(name: str, saved: Any, current: Any) -> None:
    different = differences(saved, current)
    if different:
        raise DataStateError(
            f"The {name} differ from those of the checkpoint: {'; '.join(different)}. {_DIFFERENCE_ADVICE[name]}"
        )


_FIXED_VALUE_ADVICE = {
    "num_logical_shards": "It is fixed for a whole run, and its default follows global_batch_size: give the loader the saved "
    "one (the world size, the workers, the micro batch and the global batch may all change).",
    "seed": "Another seed is another order: build the loader with the saved one, or begin a new run.",
}
_DIFFERENCE_ADVICE = {
    "fields": "The pipeline keeps other state than the one that was saved. Build the pipeline that was saved, with the saved "
    "verify= (True keeps a digest a reader), or begin a new run.",
    "parameters of the pipeline": "They change the order or the content of samples: use the saved ones, or begin a new run. "
    "What may change between segments may not below other nodes of torchdata than Mapper: these keep what they have read.",
}
