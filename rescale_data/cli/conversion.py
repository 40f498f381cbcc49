"""The command ``convert``: converts a checkpoint between formats, which the names of source and target show."""

from __future__ import annotations

from typing import Any

from rescale_data.checkpoint.convert import safetensors, torch_save
from rescale_data.checkpoint.storage.manifest import manifest_at
from rescale_data.checkpoint.storage.open import open_store
from rescale_data.checkpoint.storage.store import Store, split


def convert(source: str, target: str, *, to: str | None, name: str | None, max_shard_size: int) -> dict[str, Any]:
    """Convert a checkpoint; return ``source``, ``target``, ``format``, ``files`` (names) and ``bytes``.

    Args:
        to: ``"torch"``, ``"safetensors"`` or ``"dcp"``; default by what ``target`` is called.
    """
    format_name = to or _format_from_name(target)
    (source_store, source_path), (store, target_path) = open_store(source), open_store(target)
    if format_name != "safetensors" and store.is_file(target_path):
        raise ValueError(f"{target} exists already. Give another name, or remove it first.")
    if format_name == "torch":
        torch_save.to_torch_save(source, target, name=name)
    elif format_name == "dcp" and source_store.is_file(source_path) and not source.endswith(".safetensors"):
        torch_save.from_torch_save(source, target, name=name)
    elif format_name == "dcp":
        safetensors.from_safetensors(source, target, name=name)
    else:
        safetensors.to_safetensors(source, target, name=name, max_shard_size=max_shard_size)
    sizes = _file_sizes(store, target_path)
    return {"source": source, "target": target, "format": format_name, "files": [*sizes], "bytes": sum(sizes.values())}


def _file_sizes(store: Store, target_path: str) -> dict[str, int]:
    """Return the size in bytes of each file of a checkpoint or folder, by its name there, or of a single file."""
    folder, name = split(target_path)
    if manifest := manifest_at(store, target_path):
        return {file: record.size for file, record in manifest.files.items()}
    return store.file_sizes(target_path) or {name: store.file_sizes(folder)[name]}


def _format_from_name(target: str) -> str:
    if target.endswith((".pt", ".pth", ".bin", ".ckpt")):
        return "torch"
    return "safetensors" if target.rstrip("/").endswith("safetensors") else "dcp"
