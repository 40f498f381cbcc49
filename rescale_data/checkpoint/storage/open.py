"""How a checkpoint is opened and read: its store, the lease of who reads it, and the check of its files before that."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, TypeVar, cast

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.storage import StorageReader

from rescale_data.checkpoint.devices import cut
from rescale_data.checkpoint.ranks import Ranks, clear_error
from rescale_data.checkpoint.storage import dcp
from rescale_data.checkpoint.storage.commit import is_ours, replaced_by_a_killed_save
from rescale_data.checkpoint.storage.lease import STEP, reading
from rescale_data.checkpoint.storage.manifest import MANIFEST, METADATA, Manifest, NewerError, read_manifest
from rescale_data.checkpoint.storage.metadata import UnknownClassError, read_metadata
from rescale_data.checkpoint.storage.progress import Progress
from rescale_data.checkpoint.storage.store import FileRecord, LocalStore, ObjectStore, Store, StrPath, join, split
from rescale_data.errors import DamagedCheckpointError, checks_kinds

T = TypeVar("T")
_BLOCK = 4 << 20


class ReplacedError(ValueError):
    """While it was read the checkpoint at a path was replaced or deleted."""

    def __str__(self) -> str:
        return f"{super().__str__()} was replaced or deleted while it was read. Start again."


class CheckpointReader(dcp.FilesReader):
    """Reads a DCP folder, and its metadata without trusting it.

    Args:
        trusted: True runs what its metadata names, where that is not known.

    Attributes:
        manifest: Of the checkpoint that is read, so that it is seen when another takes its place.
    """

    def __init__(self, store: Store, path: str, *, trusted: bool = False) -> None:
        super().__init__(store, path)
        self.store, self.trusted = store, trusted
        self.manifest: Manifest | None = None
        self._metadata: dcp.Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.Metadata:
        if self._metadata is None:
            name = self.manifest.metadata if self.manifest else METADATA
            try:
                self._metadata = read_metadata(self.store.read(join(self.path, name)), trusted=self.trusted)
            except ValueError as error:
                raise type(error)(f"{self.path} cannot be read: {error}") from error
        return self._metadata

    def is_replaced(self) -> bool:
        """Whether another checkpoint was saved here, or this one was taken away, since the reader was made."""
        try:
            manifest = read_manifest(self.store, self.path)
        except (OSError, ValueError):
            return False
        return self.manifest is not None and (manifest is None or manifest.save_id != self.manifest.save_id)


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


def load_values(
    values: dict[str, Any], reader: StorageReader, ranks: Ranks | None = None, *, doing: str = "Reading the checkpoint"
) -> dict[str, Any]:
    """What a reader has under these flattened names: tensors are loaded in place, all else is in what is returned.

    An error says what was being done, or that another checkpoint took the place of this one.

    Args:
        ranks: That call it together, each with its own names; default this process alone.
    """
    ranks = ranks or Ranks.alone()
    values = cut(values, "to_load")
    try:
        if values or ranks.distributed:
            dcp.load(values, reader, ranks, trusted=getattr(reader, "trusted", False), progress=Progress(doing))
    except (Exception, CheckpointException) as error:
        _refuse_replaced(reader, ranks)
        raise clear_error(error, doing) from error
    _refuse_replaced(reader, ranks)
    return values


def placeholders(saved: Mapping[str, torch.Tensor | None], names: Iterable[str]) -> dict[str, Any]:
    """Tensors on the CPU to load whole ones into, and None for plain values."""
    return {name: None if (tensor := saved[name]) is None else torch.empty_like(tensor, device="cpu") for name in names}


def _refuse_replaced(reader: StorageReader, ranks: Ranks) -> None:
    if isinstance(reader, CheckpointReader) and ranks.on_first(reader.is_replaced):
        raise ReplacedError(reader.path)


def problems(reader: CheckpointReader, ranks: Ranks, *, checksums: bool) -> list[str]:
    """What is wrong, one sentence a file, on every rank, with the files dealt over all of them; and the reader's manifest."""
    reader.manifest, files, wrong = ranks.on_first(lambda: _expected(reader))
    if not checksums or reader.manifest is None:
        return wrong
    mine = {name: files[name] for name in sorted(files)[ranks.rank :: ranks.size]}
    return [*wrong, *(problem for found in ranks.on_each(lambda: _unlike(reader, mine)) for problem in found)]


def _expected(reader: CheckpointReader) -> tuple[Manifest | None, Mapping[str, FileRecord], list[str]]:
    """The manifest, the files that have their sizes, and what is wrong with all else.

    Of a checkpoint of another tool there is no manifest, and the files are at least as long as its metadata tells.
    """
    store, path = reader.store, reader.path
    try:
        manifest = read_manifest(store, path)
        files = manifest.files if manifest else _files_of_another_tool(reader)
    except (NewerError, UnknownClassError):
        raise
    except ValueError as error:
        return None, {}, [str(error)]
    wrong = wrong_sizes(store, path, files, exact=manifest is not None)
    return manifest, {name: record for name, record in files.items() if name not in wrong}, list(wrong.values())


def _files_of_another_tool(reader: CheckpointReader) -> dict[str, FileRecord]:
    store, path = reader.store, reader.path
    if store.is_file(path):
        raise FileNotFoundError(
            f"No checkpoint at {path}: it is a file, and a checkpoint is a folder. Make one of a file of torch.save or of "
            f"safetensors by rescale-data convert {path} FOLDER."
        )
    if not store.is_file(join(path, METADATA)):
        names = [name for name in store.names(path) if name[0] != "."]
        here = f"it holds {names[:5]}" if store.exists(path) else "there is nothing at this path"
        newest_first = sorted(names, key=lambda name: (bool(STEP.fullmatch(name)), len(name), name), reverse=True)
        run = next((name for name in newest_first if store.is_file(join(path, name, METADATA))), None)
        cure = f" It is the folder of a run: give one of its checkpoints, {join(path, run)}." if run else ""
        raise FileNotFoundError(f"No checkpoint at {path}: {here}.{cure}")
    metadata = reader.read_metadata()
    if is_ours(metadata):
        raise ValueError(f"{path} has no {MANIFEST}: its save or its deletion was never finished. It is not loaded.")
    return {name: FileRecord(end, 0) for name, end in dcp.ends_of(metadata).items()}


def wrong_sizes(store: Store, path: str, files: Mapping[str, FileRecord], *, exact: bool = True) -> dict[str, str]:
    """What is wrong by size alone, by name, and from listings: few requests, whatever the number of files.

    Args:
        exact: False where files may be longer than what is known of them.
    """
    folders = {split(join(path, name))[0] for name in files}
    sizes = {join(folder, name): size for folder in folders for name, size in store.sizes(folder).items()}
    wrong: dict[str, str] = {}
    for name, record in files.items():
        place, least = join(path, name), "" if exact else "at least "
        if (size := sizes.get(place)) is None:
            wrong[name] = f"{place} is missing; {least}{record.size} bytes were saved"
        elif size < record.size or (exact and size > record.size):
            wrong[name] = f"{place} has {size} bytes; {least}{record.size} were saved"
    return wrong


def _unlike(reader: CheckpointReader, files: Mapping[str, FileRecord]) -> list[str]:
    """What is wrong with these files' content, on this process alone."""
    progress = Progress(f"Checking {reader.path}", sum(record.size for record in files.values()))
    with ThreadPoolExecutor(max_workers=4) as pool:
        found = [
            pool.submit(_problem, reader.store, join(reader.path, name), of, progress) for name, of in files.items()
        ]
        return [problem for future in found if (problem := future.result())]


def _problem(store: Store, file: str, record: FileRecord, progress: Progress) -> str | None:
    crc32, left = 0, record.size
    try:
        with store.open_read(file) as stream:
            # No further than the size says: a device has none, and no end.
            while block := stream.read(min(_BLOCK, left)):
                crc32, left = zlib.crc32(block, crc32), left - len(block)
                progress.add(len(block))
    except OSError as error:
        return f"{file} cannot be read: {error}"
    return (
        None
        if crc32 == record.crc32
        else f"{file} is not what was saved: its {record.size} bytes have another checksum"
    )
