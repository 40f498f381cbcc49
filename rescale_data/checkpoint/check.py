"""Whether a checkpoint's data state fits a loader, in our words and before anything is loaded.

A plain ``dcp.load`` finds another number of logical shards ("Size mismatch between saved ... and current ...") and a field
that was added ("Missing key in checkpoint state_dict: ...") by itself, before our code runs, and in words that
tell nobody what to do.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import StorageReader

from rescale_data.engine.change import Changed, fit
from rescale_data.engine.recipe import STAMP, STRINGS
from rescale_data.engine.statedict import INTS, OTHER_FIELDS, require_fit
from rescale_data.engine.stream import HasStream
from rescale_data.errors import DataStateError
from rescale_data.state import Field

TABLE = "shards."
V = TypeVar("V")


def check_checkpoint(path: str | os.PathLike[str] | StorageReader, loader: HasStream, key: str | None = None) -> None:
    """Explain why the data state of a DCP checkpoint does not fit a loader; return if it does.

    Reads the checkpoint's metadata and the few numbers and strings of the data state; no tensor, and on this process alone.

    Args:
        path: The checkpoint's folder, or a DCP `StorageReader`.
        loader: A `DataLoader`, `LogicalShards` or ``rescale_data.xla.DeviceLoader``.
        key: Where the loader's state is in the checkpoint, ``"loader"``; default: found by its fields.

    Raises:
        FileNotFoundError: There is no DCP checkpoint.
        DataStateError: It holds no data state, or one of another N, seed, dataset or pipeline.
    """
    reader, entries = open_checkpoint(path)
    prefix = find_prefix(entries, key)
    stream = loader.stream
    saved = {
        name.removeprefix(prefix + TABLE): entry for name, entry in entries.items() if name.startswith(prefix + TABLE)
    }
    _check_num_logical_shards(saved, stream.layout.num_logical_shards)
    head = {**read_header(reader, prefix), "shards": {}}
    fitted = fit(stream.schema, head)
    fields = {field.key: field for field in (*stream.schema.fields, STAMP)}
    _check_fields(_without(saved, fitted.removed), _without(fields, fitted.added))
    require_fit(stream, head)
    _check_added(fitted.added)


def open_checkpoint(path: str | os.PathLike[str] | StorageReader) -> tuple[StorageReader, dict[str, Any]]:
    """A reader of a DCP checkpoint, and what the checkpoint holds by name; ``FileNotFoundError`` where there is none."""
    reader = path if isinstance(path, StorageReader) else FileSystemReader(path)
    try:
        entries = reader.read_metadata().state_dict_metadata
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{path} holds no DCP checkpoint (a folder with a .metadata file).") from error
    return reader, dict(entries)


def _without(by_key: Mapping[str, V], children: Sequence[Changed]) -> dict[str, V]:
    return {key: value for key, value in by_key.items() if not any(child.has(key) for child in children)}


def _check_added(children: Sequence[Changed]) -> None:
    if children:
        raise DataStateError(
            f"The loader's pipeline has the sources {[child.name for child in children]}, which the checkpoint lacks; dcp.load "
            f'refuses that ("Missing key in checkpoint state_dict"). Leave the loader out of the dict that dcp.load is given, '
            f"and call rescale_data.load_changed(path, loader): these sources then begin with their first row."
        )


def find_prefix(entries: dict[str, Any], key: str | None) -> str:
    mark = TABLE + STAMP.key
    found = [name.removesuffix(mark) for name in entries if name == mark or name.endswith("." + mark)]
    wanted = found if key is None else [prefix for prefix in found if prefix == f"{key}."]
    if len(wanted) != 1:
        given = "" if key is None else f" under key={key!r}"
        raise DataStateError(
            f"The checkpoint holds {len(wanted)} states of a rescale_data loader{given}; they are under "
            f"{[prefix.rstrip('.') for prefix in found]}. Save the loader in the dict that goes to dcp.save, and name its key."
        )
    return wanted[0]


def _check_num_logical_shards(saved: dict[str, Any], num_logical_shards: int) -> None:
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


def read_header(reader: StorageReader, prefix: str) -> dict[str, Any]:
    names = [prefix + name for name in (*INTS, *STRINGS)]
    state: dict[str, Any] = {name: "" if name.endswith(STRINGS) else 0 for name in names}
    load(state, storage_reader=reader, no_dist=True)
    return {name.removeprefix(prefix): value for name, value in state.items()}
