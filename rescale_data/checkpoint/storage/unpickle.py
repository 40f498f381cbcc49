"""DCP's metadata from someone else: unpickled with nothing but the classes that it is made of."""

from __future__ import annotations

import io
import math
import pickle
from typing import Any, cast

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

_DCP = "torch.distributed.checkpoint"
_ALLOWED: dict[str, set[str]] = {
    f"{_DCP}.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    f"{_DCP}.filesystem": {"_StorageInfo"},
    "torch": {"Size", "device", "dtype"},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PosixPath", "PurePath", "PurePosixPath", "PureWindowsPath", "WindowsPath"},
    "pathlib._local": {"Path", "PosixPath", "PurePath", "PurePosixPath", "PureWindowsPath", "WindowsPath"},
}


class RestrictedUnpickler(pickle.Unpickler):
    """Reads DCP metadata; ``ValueError`` at the first name that metadata does not need."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if module_name == "torch" and global_name in _dtypes():
            return super().find_class(module_name, global_name)
        if global_name not in _ALLOWED.get(module_name, set()):
            raise ValueError(
                f"the metadata names {module_name}.{global_name}, which DCP's metadata does not need. It is refused with "
                f"trusted=False; pass trusted=True only if you would run code from whoever wrote the checkpoint."
            )
        return super().find_class(module_name, global_name)


def read_metadata(content: bytes, *, trusted: bool) -> Metadata:
    """DCP's metadata.

    Raises:
        ValueError: it is damaged, or with ``trusted=False`` names anything but the known classes.
    """
    unpickler = pickle.Unpickler if trusted else RestrictedUnpickler
    try:
        metadata = unpickler(io.BytesIO(content)).load()
        if isinstance(metadata, Metadata):
            _touch(metadata)
    except ValueError:
        raise
    except Exception as error:  # what a changed byte makes of a pickle is not to be foreseen
        raise ValueError(f"its DCP metadata is damaged: {type(error).__name__}: {error}") from error
    if not isinstance(metadata, Metadata):
        raise ValueError(f"its DCP metadata is a {type(cast(object, metadata)).__name__}")
    return metadata


def _touch(metadata: Metadata) -> None:
    """Use all that a load will use, so that what is not there or of another type is found here."""
    tensors = [saved for saved in metadata.state_dict_metadata.values() if isinstance(saved, TensorStorageMetadata)]
    for saved in tensors:
        math.prod([*saved.size, saved.properties.dtype.itemsize])
        for chunk in saved.chunks:
            math.prod([*chunk.offsets, *chunk.sizes])
    for place in metadata.storage_data.values():
        math.prod([len(place.relative_path.split("/")), place.offset, place.length])
    for path in (metadata.planner_data or {}).values():
        ".".join(map(str, path))


def _dtypes() -> set[str]:
    import torch

    return {name for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
