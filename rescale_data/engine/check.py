"""Whether a checkpoint's data state fits a loader, in our words and before anything is loaded.

A plain ``dcp.load`` finds another number of logical shards ("Size mismatch between saved ... and current ...") and a field
that was added ("Missing key in checkpoint state_dict: ...") by itself, before our code runs, and in words that
tell nobody what to do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from rescale_data.engine.change import Changed, fit
from rescale_data.engine.recipe import STAMP
from rescale_data.engine.statedict import OTHER_FIELDS, require_fit
from rescale_data.engine.stream import HasStream
from rescale_data.errors import DataStateError
from rescale_data.state import Field

V = TypeVar("V")


def check(saved: Mapping[str, Any], head: Mapping[str, Any], loader: HasStream) -> None:
    """``DataStateError`` where a data state does not fit the loader.

    Args:
        saved: DCP's metadata of each field of the table.
        head: The state without its table.
    """
    stream = loader.stream
    _check_num_logical_shards(saved, stream.layout.num_logical_shards)
    head = {**head, "shards": {}}
    fitted = fit(stream.schema, head)
    fields = {field.key: field for field in (*stream.schema.fields, STAMP)}
    _check_fields(_without(saved, fitted.removed), _without(fields, fitted.added))
    require_fit(stream, head)
    _check_added(fitted.added)


def _without(by_key: Mapping[str, V], children: Sequence[Changed]) -> dict[str, V]:
    return {key: value for key, value in by_key.items() if not any(child.has(key) for child in children)}


def _check_added(children: Sequence[Changed]) -> None:
    if children:
        raise DataStateError(
            f"The loader's pipeline has the sources {[child.name for child in children]}, which the checkpoint lacks; dcp.load "
            f'refuses that ("Missing key in checkpoint state_dict"). Leave the loader out of the dict that dcp.load is given, '
            f"and call rescale_data.load_changed(path, loader): these sources then begin with their first row."
        )


def _check_num_logical_shards(saved: Mapping[str, Any], num_logical_shards: int) -> None:
    rows = saved[STAMP.key].size[0]
    if rows != num_logical_shards:
        raise DataStateError(
            f"The checkpoint has num_logical_shards={rows}, the loader {num_logical_shards}. It is fixed for a whole run: "
            f"build the loader with num_logical_shards={rows} (ranks, workers, micro batch and global batch may all change)."
        )


def _check_fields(saved: dict[str, Any], fields: dict[str, Field]) -> None:
    added, removed = sorted(set(fields) - set(saved)), sorted(set(saved) - set(fields))
    if added or removed:
        raise DataStateError(
            f"The loader's pipeline keeps the fields {added} that the checkpoint lacks, and the checkpoint has {removed} that "
            f"the pipeline lacks. {OTHER_FIELDS}"
        )
    for key, field in fields.items():
        entry, shape = saved[key], field.shape or ()
        if not isinstance(entry, TensorStorageMetadata):
            raise DataStateError(f"The field {key!r} of the checkpoint is no tensor: it was not saved by this library.")
        if (tuple(entry.size[1:]), entry.properties.dtype) != (shape, field.dtype):
            raise DataStateError(
                f"The field {key!r} has shape {tuple(entry.size[1:])} and {entry.properties.dtype} a row in the checkpoint, "
                f"{shape} and {field.dtype} in the pipeline. Build the pipeline that was saved."
            )
