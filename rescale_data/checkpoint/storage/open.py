"""How a checkpoint is opened: its store, the lease of who reads it, and the check of its files before anything is read."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, TypeVar, cast

from rescale_data.checkpoint.ranks import Ranks
from rescale_data.checkpoint.storage.commit import is_ours, replaced_by_a_killed_save
from rescale_data.checkpoint.storage.dcp import CheckpointReader, ReplacedError
from rescale_data.checkpoint.storage.lease import reading
from rescale_data.checkpoint.storage.manifest import MANIFEST, METADATA, Manifest, NewerError, read_manifest
from rescale_data.checkpoint.storage.metadata import UnknownClassError
from rescale_data.checkpoint.storage.progress import Progress
from rescale_data.checkpoint.storage.store import FileRecord, LocalStore, ObjectStore, Store, StrPath, join, split
from rescale_data.errors import DamagedCheckpointError, checks_kinds

T = TypeVar("T")
_BLOCK = 4 << 20


def open_store(
    path: StrPath, storage_options: Mapping[str, Any] | None = None, *, to_write: bool = False
) -> tuple[Store, str]:
    """The store that ``path`` is in, and ``path`` as that store spells it.

    Args:
        path: A local path, or a URL that fsspec knows (``s3://bucket/run``, ``gs://``, ``az://``, ``memory://``).
        to_write: A link is then what is written anew. Else a link to a checkpoint is the checkpoint.
    """
    if not isinstance(cast(object, path), str | os.PathLike):
        raise TypeError(f"A checkpoint's path is a str or os.PathLike, not {type(path).__name__}.")
    text = os.fspath(path)
    if not isinstance(path, str) and re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", text):
        raise ValueError(f"{text!r} was a URL: pathlib has taken one of its slashes. Give a URL as a str.")
    if "://" in text and not text.startswith("file://"):
        return ObjectStore(text, storage_options), text.rstrip("/")
    found = os.path.abspath(text.removeprefix("file://"))
    if to_write:
        folder, name = split(found)
        return LocalStore(), join(os.path.realpath(folder), name)
    return LocalStore(), os.path.realpath(found)


def mapped_path(path: StrPath) -> str:
    """A path of this machine; ``ValueError`` for a URL of an object store."""
    store, text = open_store(path)
    if not store.renames:
        raise ValueError(
            f"{text} is in an object store, and its files are mapped to be read. Copy it to a local disk first."
        )
    return text


@contextmanager
def opened(
    path: StrPath,
    ranks: Ranks | None = None,
    *,
    checksums: bool,
    trusted: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> Generator[CheckpointReader]:
    """A reader of the checkpoint at ``path``, whose files are in order; it has a lease while this is entered.

    Raises:
        FileNotFoundError: no checkpoint at ``path``.
        DamagedCheckpointError: a ``ValueError`` that names every file that is not what was saved.
        ReplacedError: another checkpoint took its place: ``read_checkpoint`` reads that one.
    """
    ranks = ranks or Ranks.alone()
    store, asked = open_store(path, storage_options)
    folder = ranks.on_first(lambda: replaced_by_a_killed_save(store, asked) or asked)
    with reading(store, folder) if ranks.is_first else nullcontext():
        reader = CheckpointReader(store, folder, trusted=trusted)
        try:
            if found := problems(reader, ranks, checksums=checksums):
                listed = "\n  ".join(found)
                raise DamagedCheckpointError(
                    f"The checkpoint {folder} is damaged:\n  {listed}\nNothing was loaded. Load an earlier checkpoint.",
                    found,
                )
            yield reader
        except ReplacedError:
            raise
        except Exception as error:
            absent = isinstance(error, FileNotFoundError)
            if ranks.on_first(lambda: reader.is_replaced() or (absent and store.is_file(join(asked, MANIFEST)))):
                # Or it was looked for between two renames, and is there now.
                raise ReplacedError(asked) from error
            raise


def read_checkpoint(path: StrPath, work: Callable[[CheckpointReader], T], ranks: Ranks | None = None, **how: Any) -> T:
    """What ``work`` makes of the checkpoint that is ``opened``, done anew where another takes its place in the meantime."""
    for _ in range(4):
        with suppress(ReplacedError), opened(path, ranks, **how) as reader:
            return work(reader)
    with opened(path, ranks, **how) as reader:
        return work(reader)


@checks_kinds
def verify(path: StrPath, *, checksums: bool = True, storage_options: Mapping[str, Any] | None = None) -> list[str]:
    """What is wrong with the checkpoint at ``path``, one sentence a file; empty where nothing is.

    Args:
        checksums: Read every file; False compares sizes alone. A checkpoint of another tool has no checksums.

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
        return read_checkpoint(path, lambda _: list[str](), checksums=checksums, storage_options=storage_options)
    except DamagedCheckpointError as error:
        return error.problems


def problems(reader: CheckpointReader, ranks: Ranks, *, checksums: bool) -> list[str]:
    """What is wrong, one sentence a file, on every rank, with the files dealt over all of them; and the reader's manifest."""
    reader.manifest, files, complaints = ranks.on_first(lambda: _expected(reader))
    mine = {name: files[name] for name in sorted(files)[ranks.rank :: ranks.size]}
    found = ranks.on_each(lambda: _problems_of(reader, mine, checksums and reader.manifest is not None))
    return [*complaints, *(problem for per_rank in found for problem in per_rank)]


def _expected(reader: CheckpointReader) -> tuple[Manifest | None, Mapping[str, FileRecord], list[str]]:
    """The manifest, the files as they must be, and what is wrong before these are looked at.

    Of a checkpoint of another tool there is no manifest, and the files are at least as long as its metadata tells.
    """
    store, path = reader.fs, reader.path
    try:
        manifest = read_manifest(store, path)
        if manifest is not None:
            return manifest, manifest.files, []
        if store.is_file(path):
            raise FileNotFoundError(
                f"No checkpoint at {path}: it is a file, and a checkpoint is a folder. Make one of a file of torch.save or of "
                f"safetensors by rescale-data convert {path} FOLDER."
            )
        if not store.is_file(join(path, METADATA)):
            names = [name for name in store.names(path) if name[0] != "."][:5]
            here = f"it holds {names}" if store.exists(path) else "there is nothing at this path"
            run = next((name for name in names if store.is_file(join(path, name, METADATA))), None)
            cure = f" It is the folder of a run: give one of its checkpoints, {join(path, run)}." if run else ""
            raise FileNotFoundError(f"No checkpoint at {path}: {here}.{cure}")
        metadata = reader.read_metadata()
    except (NewerError, UnknownClassError):
        raise
    except ValueError as error:
        return None, {}, [str(error)]
    if is_ours(metadata):
        return None, {}, [f"{path} has no {MANIFEST}: its save or its deletion was never finished. It is not loaded."]
    ends: dict[str, int] = {}
    for place in cast(dict[Any, Any], metadata.storage_data or {}).values():
        ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
    return None, {name: FileRecord(end, 0) for name, end in ends.items()}, []


def _problems_of(reader: CheckpointReader, files: Mapping[str, FileRecord], checksums: bool) -> list[str]:
    """Of these files alone, on this process alone."""
    progress = Progress(f"Checking {reader.path}", sum(record.size for record in files.values())) if checksums else None
    with ThreadPoolExecutor(max_workers=4) as pool:
        found = [pool.submit(_problem, reader, *file, progress) for file in files.items()]
        return [problem for future in found if (problem := future.result())]


def _problem(reader: CheckpointReader, file: str, record: FileRecord, progress: Progress | None) -> str | None:
    store, name, least = reader.fs, join(reader.path, file), "" if reader.manifest else "at least "
    try:
        size = store.size(name)
        if size < record.size or (size > record.size and not least):
            return f"{name} has {size} bytes; {least}{record.size} were saved"
        if progress is not None and _crc32(store, name, size, progress) != record.crc32:
            return f"{name} is not what was saved: its {size} bytes have another checksum"
    except FileNotFoundError:
        return f"{name} is missing; {least}{record.size} bytes were saved"
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
