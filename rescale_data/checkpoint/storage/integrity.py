"""Whether the files of a checkpoint are those that were saved."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

from torch.distributed.checkpoint.metadata import Metadata

from rescale_data.checkpoint.ranks import Ranks
from rescale_data.checkpoint.storage.commit import SAVE_ID_PREFIX
from rescale_data.checkpoint.storage.manifest import MANIFEST, METADATA, Manifest, NewerError, read_manifest
from rescale_data.checkpoint.storage.metadata import UnknownClassError
from rescale_data.checkpoint.storage.progress import Progress
from rescale_data.checkpoint.storage.store import FileRecord, Store, join, split

_BLOCK = 4 << 20


def problems(
    store: Store, path: str, ranks: Ranks, read_metadata: Callable[[], Metadata], *, checksums: bool
) -> tuple[list[str], Manifest | None]:
    """What is wrong, one sentence a file, and the manifest: on every rank, with the files dealt over all of them."""
    manifest, complaints = ranks.on_first(lambda: _manifest_or_complaints(store, path, read_metadata))
    if manifest is None:
        return complaints, None
    mine = sorted(manifest.files)[ranks.rank :: ranks.size]
    files = {name: manifest.files[name] for name in mine}
    found = ranks.on_each(lambda: problems_of(store, path, files, checksums=checksums))
    return [problem for per_rank in found for problem in per_rank], manifest


def _manifest_or_complaints(
    store: Store, path: str, read_metadata: Callable[[], Metadata]
) -> tuple[Manifest | None, list[str]]:
    """The manifest, or what is wrong; neither for a checkpoint of another tool, as far as its metadata tells.

    Raises:
        FileNotFoundError: no checkpoint at ``path``.
    """
    try:
        manifest = read_manifest(store, path)
        return (manifest, []) if manifest is not None else (None, _without_manifest(store, path, read_metadata))
    except (NewerError, UnknownClassError):
        raise
    except ValueError as error:
        return None, [str(error)]


def _without_manifest(store: Store, path: str, read_metadata: Callable[[], Metadata]) -> list[str]:
    """A save that was never finished, or files of another tool that are shorter than its metadata says."""
    if store.is_file(path):
        raise FileNotFoundError(
            f"No checkpoint at {path}: it is a file, and a checkpoint is a folder. Make one of a file of torch.save or of "
            f"safetensors by rescale-data convert {path} FOLDER."
        )
    if not store.is_file(join(path, METADATA)):
        here = f"it holds {store.names(path)[:5]}" if store.exists(path) else "there is nothing at this path"
        raise FileNotFoundError(f"No checkpoint at {path}: {here}.")
    metadata = read_metadata()
    if metadata.storage_meta is not None and (metadata.storage_meta.save_id or "").startswith(SAVE_ID_PREFIX):
        return [f"{path} has no {MANIFEST}: its save or its deletion was never finished. It is not loaded."]
    ends: dict[str, int] = {}
    for place in cast(dict[Any, Any], metadata.storage_data or {}).values():
        ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
    return [problem for name, end in sorted(ends.items()) if (problem := _too_short(store, join(path, name), end))]


def problems_of(store: Store, path: str, files: Mapping[str, FileRecord], *, checksums: bool) -> list[str]:
    """Of these files alone, on this process alone."""
    if not files:
        return []
    progress = Progress(f"Checking {path}", sum(record.size for record in files.values())) if checksums else None
    with ThreadPoolExecutor(max_workers=4) as pool:
        found = [pool.submit(_problem, store, join(path, name), record, progress) for name, record in files.items()]
        return [problem for future in found if (problem := future.result())]


def changed_sizes(store: Store, path: str, files: Mapping[str, FileRecord]) -> list[str]:
    """``problems_of`` by size alone and from listings: few requests, whatever the number of files."""
    folders = {split(join(path, name))[0] for name in files}
    found = {join(folder, name): size for folder in folders for name, size in store.sizes(folder).items()}
    sizes = {name: (found.get(join(path, name)), record.size) for name, record in files.items()}
    return [
        f"{join(path, name)} is missing" if size is None else f"{join(path, name)} has {size} bytes; {saved} were saved"
        for name, (size, saved) in sizes.items()
        if size != saved
    ]


def _problem(store: Store, name: str, record: FileRecord, progress: Progress | None) -> str | None:
    try:
        size = store.size(name)
        if size != record.size:
            return f"{name} has {size} bytes; {record.size} were saved"
        if progress is not None and _crc32(store, name, size, progress) != record.crc32:
            return f"{name} is not what was saved: its {size} bytes have another checksum"
    except FileNotFoundError:
        return f"{name} is missing; {record.size} bytes were saved"
    except OSError as error:
        return f"{name} cannot be read: {error}"
    return None


def _crc32(store: Store, name: str, size: int, progress: Progress) -> int:
    crc32 = 0
    with store.open_read(name) as stream:
        # No further than the size says: a device has none, and no end.
        while block := stream.read(min(_BLOCK, size)):
            crc32, size = zlib.crc32(block, crc32), size - len(block)
            progress.add(len(block))
    return crc32


def _too_short(store: Store, name: str, end: int) -> str | None:
    try:
        size = store.size(name)
    except FileNotFoundError:
        return f"{name} is missing; at least {end} bytes were saved"
    return f"{name} has {size} bytes; at least {end} were saved" if size < end else None
