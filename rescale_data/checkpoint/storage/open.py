"""Open a checkpoint to read it: find its store, take a lease, and check its files."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, TypeVar, cast

from rescale_data.checkpoint.ranks import Ranks
from rescale_data.checkpoint.storage import dcp
from rescale_data.checkpoint.storage.claims import STEP_PATTERN, SaveId, find_save, save_of
from rescale_data.checkpoint.storage.manifest import METADATA, SAVE_ID_PREFIX, Manifest, NewerFormatError, read_manifest
from rescale_data.checkpoint.storage.metadata import read_metadata
from rescale_data.checkpoint.storage.readers import lease_on_checkpoint
from rescale_data.checkpoint.storage.records import UnknownClassError
from rescale_data.checkpoint.storage.store import DiskStore, FileRecord, ObjectStore, Store, StrPath, join, split
from rescale_data.errors import DamagedCheckpointError, checks_argument_types

T = TypeVar("T")


class NoCheckpointError(FileNotFoundError):
    """Error raised because a path holds no valid checkpoint, although no request failed."""


_MAX_ATTEMPTS = 5
"""Number of attempts to read a checkpoint that is replaced meanwhile."""


class CheckpointReader(dcp.FilesReader):
    """Reader of a DCP folder that runs no code from its metadata.

    Attributes:
        found_save: The save that is the checkpoint at ``path``; None for a folder of another tool.
        manifest: The manifest of that save.
    """

    def __init__(self, store: Store, path: str) -> None:
        super().__init__(store, path)
        self.store = store
        self.found_save: SaveId | None = None
        self.manifest: Manifest | None = None

    def read_metadata(self) -> dcp.Metadata:
        metadata_name = self.manifest.metadata_name if self.manifest else METADATA
        metadata_bytes = self.store.read(join(self.path, metadata_name))
        if (saved_crc32 := self.crc32s(metadata_name)) and saved_crc32 != f"{zlib.crc32(metadata_bytes):08x}":
            raise damaged_error(self.path, [f"{metadata_name} is not what was saved: it has another checksum"])
        try:
            return read_metadata(metadata_bytes)
        except ValueError as error:
            raise type(error)(f"{self.path} cannot be read: {error}") from error

    def crc32s(self, name: str) -> str:
        file_record = self.manifest.files.get(name) if self.manifest else None
        return file_record.crc32s if file_record else ""

    def is_replaced(self) -> bool:
        """True if the checkpoint was replaced by another save or deleted since it was opened."""
        with suppress(OSError, ValueError):
            return find_save(self.store, self.path) != self.found_save
        return False


def open_store(
    path: StrPath, storage_options: Mapping[str, Any] | None = None, *, to_write: bool = False
) -> tuple[Store, str]:
    """Return the store that holds ``path``, and ``path`` in the form that this store uses.

    Args:
        path: A local path, or a URL that fsspec knows (``s3://bucket/run``, ``gs://``, ``az://``, ``memory://``).
        to_write: A link is then what is written anew. Else a link to a checkpoint is the checkpoint.
    """
    if not isinstance(cast(object, path), str | os.PathLike):
        raise TypeError(
            f"A checkpoint's path is a str or os.PathLike, not a {type(path).__name__}. It is the first argument: "
            f"save(path, state), load(path, state)."
        )
    path_text = os.fspath(path)
    if not isinstance(path, str) and re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", path_text):
        raise ValueError(f"{path_text!r} was a URL: pathlib has taken one of its slashes. Give a URL as a str.")
    protocol, _, local_path = path_text.rpartition("://")
    if protocol not in ("", "file", "local"):
        return ObjectStore(path_text, storage_options), path_text.rstrip("/")
    absolute_path = os.path.abspath(local_path)
    if to_write:
        folder, name = split(absolute_path)
        return DiskStore(), join(os.path.realpath(folder), name)
    return DiskStore(), os.path.realpath(absolute_path)


def memory_mappable_path(path: StrPath) -> str:
    """Return a path on this machine, whose file can be memory-mapped; ``ValueError`` for an object store."""
    store, path_text = open_store(path)
    if not store.can_rename:
        raise ValueError(
            f"{path_text} is in an object store, and its files are mapped to be read. Copy it to a local disk first."
        )
    return path_text


def read_checkpoint(
    path: StrPath,
    work: Callable[[CheckpointReader], T],
    ranks: Ranks | None = None,
    *,
    allow_other_tools: bool = True,
    storage_options: Mapping[str, Any] | None = None,
) -> T:
    """Return `work(reader)` for the checkpoint at ``path``, with a lease and after its file sizes were checked.

    A reader that may not write has no lease. If the checkpoint is replaced while such a one reads it, `work` begins anew.

    Args:
        allow_other_tools: False for checkpoints that have a manifest alone.

    Raises:
        NoCheckpointError: a ``FileNotFoundError``: no checkpoint at ``path``.
        DamagedCheckpointError: a ``ValueError`` that names every file that is not what was saved.
    """
    ranks = ranks or Ranks(single_process=True)
    store, folder = open_store(path, storage_options)
    num_attempts = 0
    while True:
        num_attempts += 1
        reader = CheckpointReader(store, folder)
        with ExitStack() as stack:
            reader.found_save = ranks.run_on_first(partial(_hold_lease, stack, reader))
            if reader.found_save is None and not allow_other_tools:
                raise NoCheckpointError(f"No checkpoint at {folder}: it has no manifest that counts.")
            try:
                reader.manifest, defects = ranks.run_on_first(partial(_manifest_and_defects, reader))
                if defects:
                    raise damaged_error(folder, defects)
                return work(reader)
            except Exception:
                if num_attempts == _MAX_ATTEMPTS or not ranks.run_on_first(reader.is_replaced):
                    raise


def _hold_lease(stack: ExitStack, reader: CheckpointReader) -> SaveId | None:
    """Return the valid save of a checkpoint (or None), and hold a lease on it until the stack ends, if possible."""
    lease, save = stack.enter_context(lease_on_checkpoint(reader.store, reader.path))
    if lease is not None:
        reader.before_each_file = lease.require_not_lost
    return save


@checks_argument_types
def verify(path: StrPath, *, storage_options: Mapping[str, Any] | None = None) -> list[str]:
    """Return the defects of the checkpoint at ``path``, one sentence a file; empty if it is sound. Reads every file.

    A checkpoint of another tool has no checksums.

    Raises:
        FileNotFoundError: there is no checkpoint at ``path``.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from rescale_data import checkpoint
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     checkpoint.save(f"{folder}/step-1", {"weight": torch.ones(2)})
        ...     checkpoint.verify(f"{folder}/step-1")
        []
    """
    try:
        return read_checkpoint(path, _damaged_files, storage_options=storage_options)
    except DamagedCheckpointError as error:
        return error.problems


def damaged_error(
    path: str, problems: list[str], consequence: str = "Nothing was loaded. Load an earlier checkpoint."
) -> Exception:
    """Return the error that lists the defects of a checkpoint."""
    problem_lines = "\n  ".join(problems)
    return DamagedCheckpointError(f"The checkpoint {path} is damaged:\n  {problem_lines}\n{consequence}", problems)


def _manifest_and_defects(reader: CheckpointReader) -> tuple[Manifest | None, list[str]]:
    """Return the manifest of a checkpoint (or None), and a message for each file of wrong size.

    Of a checkpoint of another tool there is no manifest, and the files are at least as long as its metadata tells.
    """
    store, path = reader.store, reader.path
    try:
        manifest = None if reader.found_save is None else read_manifest(store, path, reader.found_save)
        file_records = manifest.files if manifest else _files_of_another_tool(reader)
    except (NewerFormatError, UnknownClassError):
        raise
    except ValueError as error:
        return None, [str(error)]
    return manifest, list(wrong_sizes(store, path, file_records, exact_size=manifest is not None).values())


def _files_of_another_tool(reader: CheckpointReader) -> dict[str, FileRecord]:
    store, path = reader.store, reader.path
    if store.is_file(path):
        raise FileNotFoundError(
            f"No checkpoint at {path}: it is a file, and a checkpoint is a folder. Make one of a file of torch.save or of "
            f"safetensors by rescale-data convert {path} FOLDER."
        )
    if not store.is_file(join(path, METADATA)):
        names = [name for name in store.names(path) if name[0] != "."]
        content_text = f"it holds {names[:5]}" if store.exists(path) else "there is nothing at this path"
        newest_first = sorted(
            names, key=lambda name: (bool(STEP_PATTERN.fullmatch(name)), len(name), name), reverse=True
        )
        candidates = (name for name in newest_first if save_of(name) is None)  # a save's data alone are no checkpoint
        step_name = next((name for name in candidates if store.is_file(join(path, name, METADATA))), None)
        advice = (
            f" It is the folder of a run: give one of its checkpoints, {join(path, step_name)}." if step_name else ""
        )
        raise NoCheckpointError(f"No checkpoint at {path}: {content_text}.{advice}")
    metadata = reader.metadata
    if dcp.save_id_of(metadata).startswith(SAVE_ID_PREFIX):
        raise ValueError(
            f"{path} has no manifest that counts: it is a copy that was never finished or left it out, a save that was "
            f"superseded, or a step that was deleted here or taken away, and put back. It is not loaded: copy it to another "
            f"folder, where it counts if it is whole."
        )
    return {name: FileRecord(end) for name, end in dcp.min_file_bytes(metadata).items()}


def wrong_sizes(store: Store, path: str, files: Mapping[str, FileRecord], *, exact_size: bool = True) -> dict[str, str]:
    """Return a message for each file of wrong size, by name, from one listing for each folder.

    Args:
        exact_size: False where files may be longer than what is known of them.
    """
    folders = {split(join(path, name))[0] for name in files}
    found_sizes = {join(folder, name): size for folder in folders for name, size in store.file_sizes(folder).items()}
    size_errors: dict[str, str] = {}
    for name, record in files.items():
        file_path, bound_text = join(path, name), "" if exact_size else "at least "
        if (size := found_sizes.get(file_path)) is None:
            size_errors[name] = f"{file_path} is missing; {bound_text}{record.size} bytes were saved"
        elif size < record.size or (exact_size and size > record.size):
            size_errors[name] = f"{file_path} has {size} bytes; {bound_text}{record.size} were saved"
    return size_errors


def _damaged_files(reader: CheckpointReader) -> list[str]:
    """Return a message for each file whose content is damaged, after reading all of them."""
    pieces_by_file = reader.piece_checksums

    def find_defect(name: str) -> str | None:
        buffer = dcp.Memory.empty(max(size for _, size in pieces_by_file[name]))
        try:
            with reader.store.open_read(join(reader.path, name)) as stream:
                for (start, size), crc32 in pieces_by_file[name].items():
                    dcp.read_piece(stream, name, start, size, crc32, buffer)
        except OSError as error:
            return f"{name} cannot be read: {error}"
        except DamagedCheckpointError as error:
            return str(error)
        return None

    with ThreadPoolExecutor(max_workers=4) as pool:
        return [*filter(None, pool.map(find_defect, pieces_by_file))]
