"""Whether a checkpoint's data state fits a loader, in our words and before anything is loaded.

A plain ``dcp.load`` finds another number of logical shards ("Size mismatch between saved ... and current ...") and a field
that was added ("Missing key in checkpoint state_dict: ...") by itself, before our code runs, and in words that
tell nobody what to do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from rescale_data.engine.change import Changed, Fitted, fit
from rescale_data.engine.load import OTHER_FIELDS, require_fit
from rescale_data.engine.recipe import STAMP, Schema
from rescale_data.engine.stream import HasStream
from rescale_data.engine.table import IN_ONE, fields_in, stored, version_of
from rescale_data.errors import DataStateError
from rescale_data.state import Field

V = TypeVar("V")
Row: TypeAlias = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a tensor without its dim of N."""


def check(saved: Mapping[str, Any], head: Mapping[str, Any], loader: HasStream) -> None:
    """``DataStateError`` where a data state does not fit the loader.

    Args:
        saved: DCP's metadata of each tensor of the table.
        head: The state without its table.
    """
    schema = loader.stream.schema
    _check_num_logical_shards(saved, loader.stream.layout.num_logical_shards)
    rows = {key: _row(key, entry) for key, entry in saved.items()}
    fitted = fit(schema, head)
    fields = {field.key: _row_of(field) for field in (*schema.fields, STAMP)}
    _check_fields(_without(_by_field(rows, head), fitted.removed), _without(fields, fitted.added))
    require_fit(loader.stream, head)
    _check_plain_load(rows, schema, fitted)


def _row(key: str, entry: Any) -> Row:
    if not isinstance(entry, TensorStorageMetadata):
        raise DataStateError(f"The field {key!r} of the checkpoint is no tensor: it was not saved by this library.")
    return tuple(entry.size[1:]), entry.properties.dtype


def _row_of(field: Field) -> Row:
    return field.shape or (), field.dtype


def _by_field(rows: dict[str, Row], head: Mapping[str, Any]) -> dict[str, Row]:
    if head["version"] != IN_ONE:
        return rows
    return {STAMP.key: rows[STAMP.key], **{field.key: _row_of(field) for field in fields_in(head)}}


def _without(by_key: Mapping[str, V], children: Sequence[Changed]) -> dict[str, V]:
    return {key: value for key, value in by_key.items() if not any(child.has(key) for child in children)}


def _check_plain_load(rows: Mapping[str, Row], schema: Schema, fitted: Fitted) -> None:
    """``DataStateError`` where ``dcp.load`` refuses what `load_changed` takes."""
    if all(rows.get(field.key) == _row_of(field) for field in stored(version_of(schema), schema.fields)):
        return
    added, removed = ([child.name for child in children] for children in (fitted.added, fitted.removed))
    differs = f"{added} are new and {removed} gone" if added or removed else "it was saved by an older rescale_data"
    raise DataStateError(
        f"The checkpoint keeps the table of the sources in another shape than the loader does: {differs}. dcp.load refuses "
        f'that ("Missing key in checkpoint state_dict" or "Size mismatch"). Leave the loader out of the dict that dcp.load is '
        f"given, and call rescale_data.load_changed(path, loader): new sources begin with their first row, the others go on."
    )


def _check_num_logical_shards(saved: Mapping[str, Any], num_logical_shards: int) -> None:
    rows = saved[STAMP.key].size[0]
    if rows != num_logical_shards:
        raise DataStateError(
            f"The checkpoint has num_logical_shards={rows}, the loader {num_logical_shards}. It is fixed for a whole run: "
            f"build the loader with num_logical_shards={rows} (ranks, workers, micro batch and global batch may all change)."
        )


def _check_fields(saved: dict[str, Row], fields: dict[str, Row]) -> None:
    added, removed = sorted(set(fields) - set(saved)), sorted(set(saved) - set(fields))
    if added or removed:
        raise DataStateError(
            f"The loader's pipeline keeps the fields {added} that the checkpoint lacks, and the checkpoint has {removed} that "
            f"the pipeline lacks. {OTHER_FIELDS}"
        )
    for key, row in fields.items():
        if saved[key] != row:
            raise DataStateError(
                f"The field {key!r} has shape and dtype {saved[key]} a row in the checkpoint, {row} in the pipeline. Build the "
                f"pipeline that was saved."
            )
