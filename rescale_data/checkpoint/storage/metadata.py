"""DCP's metadata, from anyone: nothing that it names is ever run, and what a load uses of it is made anew from it.

The pickle becomes records, which hold what was given to them and do nothing. Of these DCP's own classes are built here. So
the classes of any torch are read, also those of 2.1, and no byte of the file reaches an object that is shared.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any, cast

import torch

from rescale_data.checkpoint.storage import dcp
from rescale_data.checkpoint.storage.manifest import refuse_to_leave

_KNOWN = re.compile(
    r"torch\.distributed\.(checkpoint\.metadata|checkpoint\.filesystem|_shard\.sharded_tensor\.metadata)\.\w+|"
    r"pathlib\.(_local\.)?\w*Path|torch\.(Size|device|serialization\._get_layout)|collections\.OrderedDict"
)


class UnknownClassError(ValueError):
    """The metadata names something that DCP's metadata does not need."""


def read_metadata(content: bytes, *, trusted: bool = False) -> dcp.Metadata:
    """DCP's metadata.

    Args:
        trusted: Where it names unknown classes, import and run them, as ``pickle`` does. Without that, classes that
            ``torch.serialization.add_safe_globals`` was given are read as records, too.
    """
    try:
        try:
            read = _Unpickler(io.BytesIO(content)).load()
        except UnknownClassError:
            if not trusted:
                raise
            read = pickle.loads(content)
        return _metadata(read)
    except UnknownClassError:
        raise
    except Exception as error:  # what a changed byte makes of a pickle is not to be foreseen
        raise ValueError(f"its DCP metadata is damaged: {type(error).__name__}: {error}") from error


class _Record:
    """An object of the pickle: what was given to its class, and its state. It does nothing."""

    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any, **_: Any) -> _Record:
        record = super().__new__(cls)
        record.args, record.state = args, None
        return record

    def __setstate__(self, state: Any) -> None:
        vars(self).update(cast(Mapping[str, Any], state) if isinstance(state, dict) else {"state": state})


class _Unpickler(pickle.Unpickler):
    """Makes records of all classes, each of a class of this unpickler alone: a pickle may set attributes of classes, too."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._classes: dict[str, Any] = {}

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        name = f"{module_name}.{global_name}"
        if module_name == "torch" and isinstance(getattr(torch, global_name, None), torch.dtype):
            return name
        if name not in self._classes:
            if not _KNOWN.fullmatch(name) and name not in _safe_globals():
                raise UnknownClassError(
                    f"the metadata names {name}, which DCP's metadata does not need. It is refused with trusted=False. If it "
                    f"is a class of yours, allow it by torch.serialization.add_safe_globals([{global_name}]); pass "
                    f"trusted=True only if you would run code from whoever wrote the checkpoint."
                )
            self._classes[name] = type(global_name, (_Record,), {})
        return dict if name == "collections.OrderedDict" else self._classes[name]


def _safe_globals() -> set[str]:
    allowed = [entry[0] if isinstance(entry, tuple) else entry for entry in torch.serialization.get_safe_globals()]
    return {f"{entry.__module__}.{entry.__qualname__}" for entry in allowed}


def _metadata(read: Any) -> dcp.Metadata:
    meta = getattr(read, "storage_meta", None)
    return dcp.Metadata(
        {_text(name): _saved(value) for name, value in read.state_dict_metadata.items()},
        planner_data=_paths(read.planner_data),
        storage_data={_index(key): _place(place) for key, place in (read.storage_data or {}).items()},
        storage_meta=dcp.StorageMeta(save_id=getattr(meta, "save_id", None)),
    )


def _saved(value: Any) -> dcp.TensorStorageMetadata | dcp.BytesStorageMetadata:
    if not hasattr(value, "chunks"):
        return dcp.BytesStorageMetadata()
    chunks = [dcp.ChunkStorageMetadata(_size(chunk.offsets), _size(chunk.sizes)) for chunk in value.chunks]
    return dcp.TensorStorageMetadata(dcp.TensorProperties(dtype=_dtype(value.properties)), _size(value.size), chunks)


def _dtype(properties: Any) -> torch.dtype:
    state = getattr(properties, "state", None)
    found = state[0] if isinstance(state, tuple) else properties.dtype
    dtype = getattr(torch, found.removeprefix("torch.")) if isinstance(found, str) else found
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{found!r} is no dtype")
    return dtype


def _index(key: Any) -> dcp.MetadataIndex:
    offset, index = getattr(key, "offset", None), getattr(key, "index", None)  # torch leaves None out
    return dcp.MetadataIndex(
        _text(key.fqn), None if offset is None else _size(offset), None if index is None else int(index)
    )


def _place(place: Any) -> SimpleNamespace:
    """Where in a file a value lies, as DCP's reader asks for it."""
    name = _text(place.relative_path)
    refuse_to_leave(name)
    transforms = getattr(place, "transform_descriptors", None)
    return SimpleNamespace(
        relative_path=name,
        offset=int(place.offset),
        length=int(place.length),
        transform_descriptors=None if transforms is None else tuple(transforms),
    )


def _paths(planner_data: Any) -> dict[str, tuple[str | int, ...]]:
    return {
        _text(name): tuple(key if type(key) is int else _text(key) for key in path)
        for name, path in (planner_data or {}).items()
    }


def _size(value: Any) -> torch.Size:
    numbers = value.args[0] if isinstance(value, _Record) else value
    return torch.Size([int(number) for number in cast(Iterable[Any], numbers)])


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no name")
    return value
