"""The data loader's state in a checkpoint, without a model and without other ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from rescale_data.checkpoint.entries import Path, nested, value_at
from rescale_data.checkpoint.loading import refuse_damaged
from rescale_data.checkpoint.plain import load_plain
from rescale_data.checkpoint.ranks import Ranks
from rescale_data.checkpoint.storage.commit import replaced_by_a_killed_save
from rescale_data.checkpoint.storage.lease import reading
from rescale_data.checkpoint.storage.reader import CheckpointReader
from rescale_data.checkpoint.storage.store import StrPath, open_store


def read_data_state(
    path: StrPath, *, name: str | None = None, checksums: bool = True, storage_options: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The state of the data loader that was saved in the checkpoint at ``path``, all N rows of it.

    Runs on one process, whatever saved, and runs no code from the checkpoint: a data state is tensors, integers and strings.

    Args:
        name: Of the loader in the saved state; default the only one that there is.

    Returns:
        ``{"shards": {field: Tensor[N, ...]}, "samples": int, ...}``, as ``loader.state_dict()`` makes it.

    Raises:
        FileNotFoundError: no checkpoint at ``path``.
        ValueError: no data state in it, several and no ``name``, or damaged files.
    """
    store, folder = open_store(path, storage_options)
    folder = replaced_by_a_killed_save(store, folder) or folder
    with reading(store, folder):
        refuse_damaged(store, folder, Ranks.alone(), checksums=checksums)
        reader = CheckpointReader(store, folder, trusted=False)
        metadata = reader.read_metadata()
        root = _root(folder, metadata, name)
        plain = placeholders(metadata, root)
        load_plain(plain, reader)
    return dict(value_at(plain, root))


def data_states(metadata: Metadata) -> list[Path]:
    """Where in a checkpoint data states are."""
    paths = [tuple(map(str, path)) for path in (metadata.planner_data or {}).values()]
    with_shards = {path[: path.index("shards")] for path in paths if "shards" in path}
    return sorted(path[:-1] for path in paths if path[-1] == "num_logical_shards" and path[:-1] in with_shards)


def placeholders(metadata: Metadata, root: Path) -> dict[str, Any]:
    """What DCP loads all that is under ``root`` into: whole tensors on the CPU."""
    mappings = metadata.planner_data or {}
    saved = [(tuple(mappings.get(key, (key,))), meta) for key, meta in metadata.state_dict_metadata.items()]
    return nested([(path, _empty(meta)) for path, meta in saved if path[: len(root)] == root])


def _empty(meta: Any) -> Any:
    return torch.empty(meta.size, dtype=meta.properties.dtype) if isinstance(meta, TensorStorageMetadata) else None


def _root(path: str, metadata: Metadata, name: str | None) -> Path:
    found = {".".join(root): root for root in data_states(metadata)}
    if name is None and len(found) == 1:
        return next(iter(found.values()))
    if name in found:
        return found[name]
    if not found:
        raise ValueError(f"The checkpoint {path} holds no data state: no loader was in the state that was saved.")
    asked = "" if name is None else f", and none is named {name!r}"
    raise ValueError(
        f"The checkpoint {path} holds the data states {sorted(found)}{asked}. Pass name= with one of them."
    )
