"""How a checkpoint is opened: its store, the lease of who reads it, and the check of its files before anything is read."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, TypeVar, cast

from rescale_data.checkpoint.ranks import Ranks
from rescale_data.checkpoint.storage import local
from rescale_data.checkpoint.storage.commit import replaced_by_a_killed_save
from rescale_data.checkpoint.storage.dcp import CheckpointReader
from rescale_data.checkpoint.storage.integrity import problems
from rescale_data.checkpoint.storage.lease import reading
from rescale_data.checkpoint.storage.manifest import MANIFEST
from rescale_data.checkpoint.storage.store import Store, StrPath, join, split
from rescale_data.errors import DamagedCheckpointError

T = TypeVar("T")


class ReplacedError(ValueError):
    """While it was read the checkpoint was replaced or deleted."""


def open_store(
    path: StrPath, storage_options: Mapping[str, Any] | None = None, *, to_write: bool = False
) -> tuple[Store, str]:
    """The store that ``path`` is in, and ``path`` as that store spells it.

    Args:
        path: A local path, or a URL that fsspec knows (``s3://bucket/run``, ``gs://``, ``az://``, ``memory://``).
        storage_options: Passed on to fsspec.
        to_write: A link is then what is written anew. Else a link to a checkpoint is the checkpoint.

    Raises:
        TypeError: ``path`` is neither a string nor path-like.
        ValueError: the scheme is unknown, what it needs is not installed, or a URL came as a ``pathlib.Path``.
    """
    if not isinstance(cast(object, path), str | os.PathLike):
        raise TypeError(f"A checkpoint's path is a str or os.PathLike, not {type(path).__name__}.")
    text = os.fspath(path)
    if not isinstance(path, str) and re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", text):
        raise ValueError(f"{text!r} was a URL: pathlib has taken one of its slashes. Give a URL as a str.")
    if "://" in text and not text.startswith("file://"):
        from rescale_data.checkpoint.storage.objects import ObjectStore

        return ObjectStore(text, storage_options), text.rstrip("/")
    found = os.path.abspath(text.removeprefix("file://"))
    if to_write:
        folder, name = split(found)
        return local.LocalStore(), join(os.path.realpath(folder), name)
    return local.LocalStore(), os.path.realpath(found)


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
    with reading(store, folder, wanted=ranks.is_first):
        reader = CheckpointReader(store, folder, trusted=trusted)
        try:
            found, reader.manifest = problems(store, folder, ranks, reader.read_metadata, checksums=checksums)
            if found:
                listed = "\n  ".join(found)
                raise DamagedCheckpointError(
                    f"The checkpoint {folder} is damaged:\n  {listed}\nNothing was loaded. Load an earlier checkpoint.",
                    found,
                )
            yield reader
        except Exception as error:
            absent = isinstance(error, FileNotFoundError)
            if ranks.on_first(lambda: reader.is_replaced() or (absent and store.is_file(join(asked, MANIFEST)))):
                # Or it was looked for between two renames, and is there now.
                raise ReplacedError(f"{asked} was replaced or deleted while it was read.") from error
            raise


def read_checkpoint(path: StrPath, work: Callable[[CheckpointReader], T], ranks: Ranks | None = None, **how: Any) -> T:
    """What ``work`` makes of the checkpoint that is ``opened``, done anew where another takes its place in the meantime."""
    for _ in range(4):
        with suppress(ReplacedError), opened(path, ranks, **how) as reader:
            return work(reader)
    with opened(path, ranks, **how) as reader:
        return work(reader)


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
