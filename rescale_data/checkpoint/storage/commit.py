"""How a checkpoint comes to exist: written aside, then committed.

    local folder    .step-100.saving-<id>/  --rename-->  step-100/
    object store    step-100/rescale_data-<id>/...  --then-->  step-100/.metadata  --last-->  step-100/rescale_data.json

A kill at any moment leaves the checkpoint that was, the checkpoint that will be, or none; never a mix of the two. Where a
checkpoint in an object store is replaced, a kill leaves none between two small requests: its manifest is removed, and .metadata
and the new manifest are put.
"""

from __future__ import annotations

import contextlib
import logging
import uuid
from collections.abc import Collection
from dataclasses import dataclass

from rescale_data.checkpoint.storage.manifest import MANIFEST, METADATA, Manifest, read_manifest
from rescale_data.checkpoint.storage.ownership import (
    DELETED,
    REPLACED,
    SAVE_ID_PREFIX,
    SAVING,
    hidden,
    hidden_of,
    is_remainder,
)
from rescale_data.checkpoint.storage.store import Store, join, split

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Workspace:
    """Where one save writes.

    Args:
        final: The checkpoint's path once it is committed.
        working: Where its files are written.
        prefix: What the names of data files begin with, once the checkpoint is committed.
        save_id: Of this save.
    """

    final: str
    working: str
    prefix: str = ""
    save_id: str


def prepare(store: Store, final: str, save_id: str, *, overwrite: bool) -> Workspace:
    """Check that ``final`` may be written, remove what earlier saves to it left over, and make the workspace.

    Raises:
        ValueError: ``final`` is a file, holds a checkpoint and ``overwrite`` is False, or holds something else.
    """
    remove_leftovers(store, final)
    _refuse_unless_free(store, final, overwrite)
    folder, name = split(final)
    if store.renames:
        workspace = Workspace(final=final, working=join(folder, hidden(name, SAVING, save_id)), save_id=save_id)
    else:
        own = SAVE_ID_PREFIX + save_id
        workspace = Workspace(final=final, working=join(final, own), prefix=f"{own}/", save_id=save_id)
    store.make_folder(workspace.working)
    return workspace


def commit(store: Store, workspace: Workspace, manifest: Manifest) -> None:
    """Make the checkpoint exist. All other files are written and synced."""
    if store.renames:
        _rename(store, workspace, manifest)
    else:
        _switch(store, workspace, manifest)


def abandon(store: Store, workspace: Workspace) -> None:
    """Remove what a failed save wrote, unless it was committed after all: an answer may be lost on its way."""
    committed = None if store.renames else read_manifest(store, workspace.final)
    if committed is None or committed.save_id != workspace.save_id:
        store.remove_folder(workspace.working)


def erase(store: Store, final: str) -> None:
    """Remove a checkpoint whose manifest is gone. A kill leaves what is found to be ours and removed later."""
    if store.renames:
        folder, name = split(final)
        aside = join(folder, hidden(name, DELETED, uuid.uuid4().hex))
        store.rename(final, aside)
        store.remove_folder(aside)
    else:
        # The metadata last: it says whose the data files are.
        _remove_all_but(store, final, {METADATA})
        store.remove_folder(final)


def remove_leftovers(store: Store, final: str) -> None:
    """Remove what killed saves and deletions of ``final`` left, and give back the checkpoint that one was about to replace."""
    folder, name = split(final)
    leftovers = [(entry, hidden_of(entry)) for entry in store.names(folder)] if store.renames else []
    for entry, of in leftovers:
        if of == (name, REPLACED) and not store.exists(final):
            store.rename(join(folder, entry), final)
        elif of is not None and of[0] == name:
            store.remove_folder(join(folder, entry))
            logger.info("Removed %s, which a killed save or deletion left.", join(folder, entry))


def replaced_by_a_killed_save(store: Store, path: str) -> str | None:
    """Where the checkpoint of ``path`` is, if a kill struck between the two renames of a replacement."""
    folder, name = split(path)
    if not store.renames or store.exists(path):
        return None
    aside = [entry for entry in store.names(folder) if hidden_of(entry) == (name, REPLACED)]
    return join(folder, aside[-1]) if aside else None


def _refuse_unless_free(store: Store, final: str, overwrite: bool) -> None:
    if store.is_file(final):
        raise ValueError(f"{final} is a file; a checkpoint is a folder. Give another path, or move the file away.")
    names = store.names(final)
    if not names or (not store.renames and is_remainder(store, final)):
        return
    if not {MANIFEST, METADATA} & set(names):
        raise ValueError(f"{final} holds {names[:3]} and is no checkpoint; it is not replaced. Give another path.")
    if not overwrite:
        raise ValueError(f"{final} already holds a checkpoint. Give another path, or overwrite=True to replace it.")


def _rename(store: Store, workspace: Workspace, manifest: Manifest) -> None:
    store.write(join(workspace.working, MANIFEST), manifest.to_json())
    store.sync_folder(workspace.working)
    folder, name = split(workspace.final)
    replaced = join(folder, hidden(name, REPLACED, workspace.save_id))
    if store.names(workspace.final):
        store.rename(workspace.final, replaced)
    store.rename(workspace.working, workspace.final)
    store.sync_folder(folder)
    store.remove_folder(replaced)


def _switch(store: Store, workspace: Workspace, manifest: Manifest) -> None:
    """Put the two files that have fixed names, and remove the files of the checkpoint before."""
    final = workspace.final
    metadata = store.read(join(workspace.working, METADATA))
    store.remove(join(workspace.working, METADATA))
    before = [(name, _read_if_there(store, join(final, name))) for name in (METADATA, MANIFEST)]
    try:
        # The manifest first: while .metadata is of another save than the manifest, there is no checkpoint.
        store.remove(join(final, MANIFEST))
        store.write(join(final, METADATA), metadata)
        store.write(join(final, MANIFEST), manifest.to_json())
    except BaseException:
        with contextlib.suppress(Exception):  # the error that led here counts
            _put_back(store, final, before)
        raise
    try:
        _remove_all_but(store, final, {METADATA, MANIFEST, split(workspace.working)[1]})
    except Exception as error:
        logger.warning("%s is saved, and not all files of the save before it were removed: %s", final, error)


def _read_if_there(store: Store, path: str) -> bytes | None:
    return store.read(path) if store.is_file(path) else None


def _put_back(store: Store, folder: str, contents: list[tuple[str, bytes | None]]) -> None:
    for name, content in contents:
        if content is None:
            store.remove(join(folder, name))
        else:
            store.write(join(folder, name), content)


def _remove_all_but(store: Store, folder: str, kept: Collection[str]) -> None:
    for name in store.names(folder):
        if name not in kept:
            store.remove_folder(join(folder, name))
