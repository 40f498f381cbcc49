"""Conversion by what source and target are called."""

from __future__ import annotations

from typing import Any

from rescale_data.checkpoint.convert import safetensors, torch_save
from rescale_data.checkpoint.storage.manifest import manifest_at
from rescale_data.checkpoint.storage.open import open_store
from rescale_data.checkpoint.storage.store import Store, split


def convert(source: str, target: str, *, to: str | None, name: str | None, max_shard_size: int) -> dict[str, Any]:
    """Convert, and say what was written: ``source``, ``target``, ``format``, ``files`` (names), ``bytes``.

    Args:
        to: ``"torch"``, ``"safetensors"`` or ``"dcp"``; default by what ``target`` is called.
    """
    kind = to or _format_of(target)
    (here, there), (store, final) = open_store(source), open_store(target)
    if kind != "safetensors" and store.is_file(final):
        raise ValueError(f"{target} exists already. Give another name, or remove it first.")
    if kind == "torch":
        torch_save.to_torch_save(source, target, name=name)
    elif kind == "dcp" and here.is_file(there) and not source.endswith(".safetensors"):
        torch_save.from_torch_save(source, target, name=name)
    elif kind == "dcp":
        safetensors.from_safetensors(source, target, name=name)
    else:
        safetensors.to_safetensors(source, target, name=name, max_shard_size=max_shard_size)
    sizes = _sizes(store, final)
    return {"source": source, "target": target, "format": kind, "files": [*sizes], "bytes": sum(sizes.values())}


def _sizes(store: Store, final: str) -> dict[str, int]:
    """Return the bytes of each file of a checkpoint or another folder, by its name in there, or of a file."""
    folder, name = split(final)
    if manifest := manifest_at(store, final):
        return {file: record.size for file, record in manifest.files.items()}
    return store.sizes(final) or {name: store.sizes(folder)[name]}


def _format_of(target: str) -> str:
    if target.endswith((".pt", ".pth", ".bin", ".ckpt")):
        return "torch"
    return "safetensors" if target.rstrip("/").endswith("safetensors") else "dcp"
