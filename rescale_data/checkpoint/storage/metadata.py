"""Read DCP's metadata from untrusted files: nothing named there is run, and every object is built anew.

The pickle becomes records, which hold what was given to them and do nothing. Of these DCP's own classes are built here. So
the classes of any torch are read, also those of 2.1, and no byte of the file reaches an object that is shared.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import torch

from rescale_data.checkpoint.storage import dcp
from rescale_data.checkpoint.storage.manifest import refuse_outside_path
from rescale_data.checkpoint.storage.records import (
    Record,
    RecordType,
    RecordUnpickler,
    UnknownClassError,
    checked,
    checked_sizes,
    dtype_of,
    user_safe_globals,
)

_ALLOWED_NAMES = re.compile(
    r"torch\.distributed\.(checkpoint\.metadata|checkpoint\.filesystem|_shard\.sharded_tensor\.metadata)\.\w+|"
    r"pathlib\.(_local\.)?\w*Path|torch\.(device|serialization\._get_layout)|"
    r"builtins\.getattr"  # members of enums, where Python 3.11.0 to 3.11.3 wrote them
)


def read_metadata(content: bytes) -> dcp.Metadata:
    """Return DCP's metadata from the bytes of its file, without running code that the file names."""
    try:
        return _build_metadata(_Unpickler(content, _is_known_class).load())
    except UnknownClassError as error:
        raise UnknownClassError(_UNKNOWN_CLASS_MESSAGE.format(error, str(error).rpartition(".")[2])) from error
    except Exception as error:  # what a changed byte makes of a pickle is not to be foreseen
        raise ValueError(f"its DCP metadata is damaged: {type(error).__name__}: {error}") from error


_UNKNOWN_CLASS_MESSAGE = (
    "the metadata names {0}, which DCP's metadata does not need, and is refused: it could run code. If it is a class of "
    "yours, allow it by torch.serialization.add_safe_globals([{1}])."
)


def _is_known_class(name: str) -> bool:
    return bool(_ALLOWED_NAMES.fullmatch(name)) or dtype_of(name) is not None or name in user_safe_globals()


class _Unpickler(RecordUnpickler):
    """Unpickler that makes the most frequent records without a Python call for each."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if f"{module_name}.{global_name}" in _FREQUENT_CLASSES:
            return _FREQUENT_CLASSES[f"{module_name}.{global_name}"]
        return super().find_class(module_name, global_name)


_FREQUENT_CLASSES: dict[str, Any] = {
    "torch.Size": torch.Size,
    "collections.OrderedDict": dict,
    **{
        f"torch.distributed.checkpoint.{module}.{name}": RecordType(name, (), {})
        for module, name in (
            ("metadata", "ChunkStorageMetadata"),
            ("metadata", "MetadataIndex"),
            ("filesystem", "_StorageInfo"),
        )
    },
}


def _build_metadata(metadata_record: Any) -> dcp.Metadata:
    fields = _fields(metadata_record)
    storage_fields = _fields(fields.get("storage_meta"))
    return dcp.Metadata(
        {checked(name, str): _build_value_metadata(value) for name, value in fields["state_dict_metadata"].items()},
        planner_data=_paths_by_name(fields.get("planner_data")),
        storage_data={
            _index_key(vars(key)): _location(vars(location)) for key, location in (fields["storage_data"] or {}).items()
        },
        storage_meta=dcp.StorageMeta(save_id=storage_fields.get("save_id")),
    )


def _fields(record: Any) -> dict[str, Any]:
    """Return the fields of a dataclass that was unpickled as a record."""
    state = record.state if isinstance(record, Record) else getattr(record, "__dict__", {})
    return cast("dict[str, Any]", state) if isinstance(state, dict) else {}


def _build_value_metadata(value: Any) -> dcp.TensorStorageMetadata | dcp.BytesStorageMetadata:
    fields = _fields(value)
    if "chunks" not in fields:
        return dcp.BytesStorageMetadata()
    chunks = [dcp.ChunkStorageMetadata(_size(c["offsets"]), _size(c["sizes"])) for c in map(vars, fields["chunks"])]
    return dcp.TensorStorageMetadata(_build_properties(fields["properties"]), _size(fields["size"]), chunks)


def _build_properties(properties: Any) -> dcp.TensorProperties:
    state: Any = getattr(properties, "state", None)
    dtype_record = cast("tuple[Any, ...]", state)[0] if isinstance(state, tuple) else _fields(properties)["dtype"]
    dtype = dtype_of(dtype_record.pickled_name) if isinstance(dtype_record, RecordType) else dtype_record
    return dcp.TensorProperties(dtype=checked(dtype, torch.dtype))


def _index_key(key: Mapping[str, Any]) -> dcp.MetadataIndex:
    offset, index = key.get("offset"), key.get("index")  # torch leaves None out
    return dcp.MetadataIndex(
        checked(key["fqn"], str), None if offset is None else _size(offset), None if index is None else int(index)
    )


def _location(location: Mapping[str, Any]) -> SimpleNamespace:
    """Return the file, offset and length of a saved value, with checked types."""
    file_name = checked(location["relative_path"], str)
    refuse_outside_path(file_name)
    transforms = location.get("transform_descriptors")
    return SimpleNamespace(
        relative_path=file_name,
        offset=int(location["offset"]),
        length=int(location["length"]),
        transform_descriptors=None if transforms is None else tuple(checked(text, str) for text in transforms),
    )


def _paths_by_name(planner_data: Any) -> dict[str, tuple[str | int, ...]]:
    return {
        checked(name, str): tuple(key if type(key) is int else checked(key, str) for key in path)
        for name, path in (planner_data or {}).items()
    }


def _size(value: Any) -> torch.Size:
    return value if type(value) is torch.Size else torch.Size(checked_sizes(value))
