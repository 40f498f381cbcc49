"""Whether the files of a checkpoint are those that were saved."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

from rescale_data.checkpoint.ranks import Ranks
from rescale_data.checkpoint.storage.commit import replaced_by_a_killed_save
from rescale_data.checkpoint.storage.lease import reading
from rescale_data.checkpoint.storage.manifest import MANIFEST, METADATA, Manifest, read_manifest
from rescale_data.checkpoint.storage.ownership import SAVE_ID_PREFIX
from rescale_data.checkpoint.storage.reader import CheckpointReader
from rescale_data.checkpoint.storage.store import Store, StrPath, join, open_store
from rescale_data.checkpoint.storage.streams import FileRecord

_BLOCK = 4 << 20


def verify(path: StrPath, *, checksums: bool = True, storage_options: Mapping[str, Any] | None = None) -> list[str]:
    """What is wrong with the checkpoint at ``path``, one sentence a file; empty where nothing is.

    Args:
        checksums: Read every file; False compares sizes alone.

    Raises:
        FileNotFoundError: there is no checkpoint at ``path``.
    """
    store, folder = open_store(path, storage_options)
    folder = replaced_by_a_killed_save(store, folder) or folder
    with reading(store, folder):
        return problems(store, folder, Ranks.alone(), checksums=checksums)


def problems(store: Store, path: str, ranks: Ranks, *, checksums: bool) -> list[str]:
    """``verify`` with the files dealt over all ranks; every rank gets the whole list."""
    manifest, complaint = ranks.on_first(lambda: _manifest_or_complaint(store, path))
    if complaint:
        return [complaint]
    if manifest is None:
        return ranks.on_first(lambda: _problems_without_manifest(store, path))
    mine = sorted(manifest.files)[ranks.rank :: ranks.size]
    found = ranks.on_each(lambda: _problems_of(store, path, {name: manifest.files[name] for name in mine}, checksums))
    return [problem for per_rank in found for problem in per_rank]


def _manifest_or_complaint(store: Store, path: str) -> tuple[Manifest | None, str]:
    try:
        return require_committed(store, path), ""
    except FileNotFoundError:
        raise
    except ValueError as error:
        return None, str(error)


def require_committed(store: Store, path: str) -> Manifest | None:
    """The manifest; None for a checkpoint that another tool wrote, whose files cannot be checked.

    Raises:
        FileNotFoundError: no checkpoint at ``path``.
        ValueError: a save to ``path`` was never finished, or the manifest is damaged or was removed.
    """
    manifest = read_manifest(store, path)
    if manifest is not None:
        return manifest
    if store.is_file(path):
        raise FileNotFoundError(
            f"No checkpoint at {path}: it is a file, and a checkpoint is a folder. Make one of a file of torch.save or of "
            f"safetensors by rescale-data convert {path} FOLDER."
        )
    if not store.is_file(join(path, METADATA)):
        here = f"it holds {store.names(path)[:5]}" if store.exists(path) else "there is nothing at this path"
        raise FileNotFoundError(f"No checkpoint at {path}: {here}.")
    meta = CheckpointReader(store, path, trusted=False).read_metadata().storage_meta
    if meta is not None and (meta.save_id or "").startswith(SAVE_ID_PREFIX):
        raise ValueError(
            f"{path} has no {MANIFEST}: its save was never finished, or the file was removed. It is not loaded."
        )
    return None


def _problems_of(store: Store, path: str, files: Mapping[str, FileRecord], checksums: bool) -> list[str]:
    if not files:
        return []
    with ThreadPoolExecutor(max_workers=4) as pool:
        found = [pool.submit(_problem, store, join(path, name), record, checksums) for name, record in files.items()]
        return [problem for future in found if (problem := future.result())]


def _problem(store: Store, name: str, record: FileRecord, checksums: bool) -> str | None:
    try:
        size = store.size(name)
        if size != record.size:
            return f"{name} has {size} bytes; {record.size} were saved"
        if checksums and _crc32(store, name) != record.crc32:
            return f"{name} is not what was saved: its {size} bytes have another checksum"
    except FileNotFoundError:
        return f"{name} is missing; {record.size} bytes were saved"
    except OSError as error:
        return f"{name} cannot be read: {error}"
    return None


def _crc32(store: Store, name: str) -> int:
    crc32 = 0
    with store.open_read(name) as stream:
        while block := stream.read(_BLOCK):
            crc32 = zlib.crc32(block, crc32)
    return crc32


def _problems_without_manifest(store: Store, path: str) -> list[str]:
    """Of a checkpoint of another tool: files that are shorter than its metadata says."""
    ends: dict[str, int] = {}
    for place in cast(dict[Any, Any], CheckpointReader(store, path).read_metadata().storage_data or {}).values():
        ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
    return [problem for name, end in sorted(ends.items()) if (problem := _too_short(store, join(path, name), end))]


def _too_short(store: Store, name: str, end: int) -> str | None:
    try:
        size = store.size(name)
    except FileNotFoundError:
        return f"{name} is missing; at least {end} bytes were saved"
    return f"{name} has {size} bytes; at least {end} were saved" if size < end else None
