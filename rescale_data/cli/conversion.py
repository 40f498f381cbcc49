"""Conversion by what source and target are called."""

from __future__ import annotations

from typing import Any

from rescale_data.checkpoint.convert import torch_save
from rescale_data.checkpoint.storage.manifest import manifest_at
from rescale_data.checkpoint.storage.open import open_store
from rescale_data.checkpoint.storage.store import Store, join, split


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
        return _about(store, source, target, kind, final, [])
    if kind == "dcp" and here.is_file(there) and not source.endswith(".safetensors"):
        torch_save.from_torch_save(source, target, name=name)
        return _about(store, source, target, kind, final, _files_of(store, final))
    from rescale_data.checkpoint.convert import safetensors

    if kind == "dcp":
        safetensors.from_safetensors(source, target, name=name)
        return _about(store, source, target, kind, final, _files_of(store, final))
    files = safetensors.to_safetensors(source, target, name=name, max_shard_size=max_shard_size)
    return _about(store, source, target, kind, final, files)


def _files_of(store: Store, final: str) -> list[str]:
    """The names of the files of a checkpoint, relative to its folder, or of a folder."""
    manifest = manifest_at(store, final)
    return store.names(final) if manifest is None else sorted(manifest.files)


def _about(store: Store, source: str, target: str, kind: str, final: str, names: list[str]) -> dict[str, Any]:
    """A target without names is a file itself."""
    paths = [join(final, name) for name in names] or [final]
    num_bytes = sum(store.size(path) for path in paths if store.is_file(path))
    files = names or [split(final)[1]]
    return {"source": source, "target": target, "format": kind, "files": files, "bytes": num_bytes}


def _format_of(target: str) -> str:
    if target.endswith((".pt", ".pth", ".bin", ".ckpt")):
        return "torch"
    return "safetensors" if target.rstrip("/").endswith("safetensors") else "dcp"
