"""Between DCP folders and files of ``torch.save``, a bounded number of bytes at a time.

A file is mapped, not loaded: every rank that loads it copies its own rows out of it. The pages are read from disk once a host,
however many ranks it has; there is no communication, so nothing hangs where ranks ask for different names.
"""

from __future__ import annotations

import errno
import pickle
from collections.abc import Mapping
from typing import Any, cast

import torch

from rescale_data.checkpoint.convert.stored import BUDGET, StoredCheckpoint
from rescale_data.checkpoint.convert.torch_zip import TorchFile
from rescale_data.checkpoint.saving import save_alone
from rescale_data.checkpoint.storage.commit import aside
from rescale_data.checkpoint.storage.open import mapped_path, open_store
from rescale_data.checkpoint.storage.store import StrPath
from rescale_data.checkpoint.tree import tree_of


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
        file: A local path or a URL; it appears when it is whole, and replaces one that was there.
        name: Of one top-level entry, which is then the file's content, without its name.
        storage_options: Passed on to fsspec, for ``path`` and for ``file``.

    Raises:
        FileNotFoundError: no checkpoint at ``path``.
        ValueError: damaged files, nothing named ``name``, or values that only unpickling code could read.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from rescale_data import checkpoint
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     checkpoint.save(f"{folder}/step-1", {"weight": torch.ones(2)})
        ...     checkpoint.to_torch_save(f"{folder}/step-1", f"{folder}/step-1.pt")
        ...     torch.load(f"{folder}/step-1.pt")
        {'weight': tensor([1., 1.])}
    """
    store, final = open_store(file, storage_options, to_write=True)
    with (
        StoredCheckpoint(path, name=name, checksums=checksums, storage_options=storage_options) as stored,
        aside(store, final) as working,
    ):
        content = TorchFile({key: (meta.size, meta.properties.dtype) for key, meta in stored.tensors.items()})
        tree = tree_of(stored.paths, stored.values() | content.tensors, stored.lost)
        store.write(working, lambda stream: content.write(stream, tree, lambda names: stored.stream(names, budget)))
        if working != final:
            store.rename(working, final)


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

    Example:
        >>> import tempfile
        >>> import torch
        >>> from rescale_data import checkpoint
        >>> state = {"weight": torch.zeros(2)}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     torch.save({"weight": torch.ones(2)}, f"{folder}/model.pt")
        ...     checkpoint.from_torch_save(f"{folder}/model.pt", f"{folder}/step-0")
        ...     report = checkpoint.load(f"{folder}/step-0", state)
        >>> state["weight"]
        tensor([1., 1.])
    """
    content = map_file(mapped_path(file))
    save_alone(path, content if name is None else {name: content}, storage_options)


def map_file(file: str) -> dict[str, Any]:
    """What ``torch.save`` wrote, with tensors that are read when they are used.

    Raises:
        ValueError: it is no such file, holds code, or is not a dict.
    """
    try:
        content = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, OSError) as error:
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # torch seeks before a cut file's start
            raise
        raise ValueError(
            f"{file} cannot be read: {error}. It must be a file of torch.save in its zip format (the default since 1.6) that "
            f"holds tensors and plain values only."
        ) from error
    if not isinstance(content, Mapping):
        raise ValueError(
            f"{file} holds a {type(cast(object, content)).__name__}; a checkpoint is a dict of names to values."
        )
    return dict(cast(Mapping[str, Any], content))
