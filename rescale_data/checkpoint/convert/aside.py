"""What a conversion writes: aside first, then under its name, so that a kill leaves nothing that looks whole.

local folder    .OUT.saving-<id>  --rename-->  OUT         the next conversion to OUT removes what a killed one left
object store    OUT                                        an object appears when it is whole
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Generator, Mapping
from typing import Any, BinaryIO

from rescale_data.checkpoint.api import begin, write
from rescale_data.checkpoint.ranks import Ranks
from rescale_data.checkpoint.storage.commit import SAVING, Workspace, abandon, hidden, make_locked, remove_leftovers
from rescale_data.checkpoint.storage.dcp import CheckpointWriter, SaveInfo
from rescale_data.checkpoint.storage.manifest import checked_metrics
from rescale_data.checkpoint.storage.open import open_store
from rescale_data.checkpoint.storage.store import Store, StrPath, join, split


@contextlib.contextmanager
def aside(store: Store, final: str) -> Generator[str]:
    """The path to write to in place of ``final``, a file or a folder, and to rename; what is there in the end is removed.

    Raises:
        ValueError: another process writes to ``final``.
    """
    if not store.renames:
        yield final
        return
    folder, name = split(final)
    remove_leftovers(store, final)
    save_id = uuid.uuid4().hex
    workspace = Workspace(final=final, working=join(folder, hidden(name, SAVING, save_id)), save_id=save_id)
    make_locked(store, workspace)
    try:
        yield join(workspace.working, "out")
        store.sync_folder(folder)
    finally:
        abandon(store, workspace)


def local(path: StrPath) -> str:
    """A path of this machine; ``ValueError`` for a URL of an object store."""
    store, text = open_store(path)
    if not store.renames:
        raise ValueError(
            f"{text} is in an object store, and its files are mapped to be read. Copy it to a local disk first."
        )
    return text


def written(store: Store, path: str, work: Callable[[BinaryIO], object]) -> None:
    """Write one file, whole and synced, or not at all."""
    stream = store.open_write(path)
    try:
        work(stream)
        stream.flush()
        store.sync_file(stream)
        stream.close()
    except BaseException:
        store.discard(stream, path)
        raise


def save_alone(path: StrPath, plain: dict[str, Any], storage_options: Mapping[str, Any] | None) -> None:
    """Save plain values and tensors from this process, whatever process groups there are."""
    store, final = open_store(path, storage_options, to_write=True)
    ranks = Ranks.alone()
    workspace = begin(store, final, ranks, overwrite=False)
    write(plain, CheckpointWriter(store, workspace, SaveInfo(metrics=checked_metrics(None))), ranks)
