"""Between DCP folders and files of ``torch.save``, a bounded number of bytes at a time."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO, TypeVar

from rescale_data.checkpoint.api import begin, write
from rescale_data.checkpoint.convert.stored import BUDGET, StoredCheckpoint
from rescale_data.checkpoint.convert.torch_file import map_file
from rescale_data.checkpoint.convert.torch_zip import Pending, write_torch_file
from rescale_data.checkpoint.ranks import Ranks
from rescale_data.checkpoint.storage.dcp import CheckpointWriter, SaveInfo
from rescale_data.checkpoint.storage.local import LocalStore
from rescale_data.checkpoint.storage.manifest import checked_metrics
from rescale_data.checkpoint.storage.open import open_store
from rescale_data.checkpoint.storage.store import StrPath
from rescale_data.checkpoint.tree import tree_of

T = TypeVar("T")


def to_torch_save(
    path: StrPath,
    file: StrPath,
    *,
    name: str | None = None,
    budget: int = BUDGET,
    checksums: bool = True,
    storage_options: Mapping[str, Any] | None = None,
) -> None:
    """Write a DCP folder as one file that ``torch.load(file, mmap=True, weights_only=True)`` reads.

    Everything travels: tensors, plain values and the loader's state. Memory stays within ``budget`` bytes, or the largest
    tensor and its largest stored piece, whatever the size of the checkpoint. Call it on one rank.

    Args:
        path: Of the checkpoint.
        file: Local; it appears when it is whole, and replaces one that was there.
        name: Of one top-level entry, which is then the file's content, without its name.

    Raises:
        FileNotFoundError: no checkpoint at ``path``.
        ValueError: damaged files, nothing named ``name``, or values that only unpickling code could read.
    """
    with StoredCheckpoint(path, name=name, checksums=checksums, storage_options=storage_options) as stored:
        pending = {key: Pending(meta.size, meta.properties.dtype) for key, meta in stored.tensors.items()}
        tree = tree_of(stored.paths, stored.values() | pending, stored.lost)
        names = {id(leaf): key for key, leaf in pending.items()}
        order = [names[id(leaf)] for leaf in _pending_in(tree)]
        write_aside(file, lambda stream: write_torch_file(stream, tree, stored.stream(order, budget)))


def from_torch_save(
    file: StrPath, path: StrPath, *, name: str | None = None, storage_options: Mapping[str, Any] | None = None
) -> None:
    """Write a file of ``torch.save`` as a DCP folder, with its tensors mapped and not loaded. Call it on one rank.

    Args:
        file: Local, in the zip format, with tensors and plain values only.
        path: Of the checkpoint, which must not exist.
        name: Put all of it under this top-level name, as ``load`` will ask for it: ``"model"``.

    Raises:
        FileNotFoundError: no such file.
        ValueError: it is no such file, or holds code; or ``path`` is taken.
    """
    content = map_file(os.fspath(file))
    save_alone(path, content if name is None else {name: content}, storage_options)


def save_alone(path: StrPath, plain: dict[str, Any], storage_options: Mapping[str, Any] | None) -> None:
    """Save plain values and tensors from this process, whatever process groups there are."""
    store, final = open_store(path, storage_options, to_write=True)
    ranks = Ranks.alone()
    workspace = begin(store, final, ranks, overwrite=False)
    write(plain, CheckpointWriter(store, workspace, SaveInfo(metrics=checked_metrics(None))), ranks)


def write_aside(file: StrPath, work: Callable[[BinaryIO], T]) -> T:
    """Write a local file that appears under its name when it is whole."""
    store, final = LocalStore(), os.path.abspath(os.fspath(file))
    aside = f"{final}.{uuid.uuid4().hex}"
    stream = store.open_write(aside)
    try:
        result = work(stream)
        stream.flush()
        store.sync_file(stream)
        stream.close()
        store.rename(aside, final)
    except BaseException:
        store.discard(stream, aside)
        raise
    return result


def _pending_in(tree: Any) -> list[Pending]:
    """In the order in which pickling meets them."""
    if isinstance(tree, Pending):
        return [tree]
    if isinstance(tree, dict):
        return [leaf for value in tree.values() for leaf in _pending_in(value)]
    if isinstance(tree, list | tuple):
        return [leaf for value in tree for leaf in _pending_in(value)]
    return []
