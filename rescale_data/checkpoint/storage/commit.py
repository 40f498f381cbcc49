"""How a checkpoint comes to exist: written aside, then committed; and what is provably ours, and so may be removed.

    local folder    .step-100.saving-<id>/  --rename-->  step-100/
    object store    step-100/rescale_data-<id>/...  --one request-->  step-100/rescale_data.json

A kill at any moment leaves the checkpoint that was, or the checkpoint that will be; never a mix of the two, or neither.
In an object store step-100/.metadata is stock DCP's copy: put before a first manifest, and after one that replaces another.

What a kill leaves is known by a name that nobody else gives, or by the save id in its metadata:

    .step-100.saving-<id>/        a save; the process that writes it holds the lock of its manifest's file
    .step-100.replaced-<id>/      a checkpoint that a save was about to replace
    .step-100.deleted-<id>/       a deletion
    step-100/                     no manifest, and DCP's files with a save id of ours: a deletion
    step-100/rescale_data-<id>/   object store: the files of a save
"""

from __future__ import annotations

import contextlib
import logging
import re
import time
import uuid
from collections.abc import Collection, Generator
from dataclasses import dataclass

from rescale_data.checkpoint.storage import locks
from rescale_data.checkpoint.storage.dcp import Metadata, save_id_of
from rescale_data.checkpoint.storage.lease import is_read
from rescale_data.checkpoint.storage.manifest import MANIFEST, METADATA, Manifest, read_manifest
from rescale_data.checkpoint.storage.metadata import read_metadata
from rescale_data.checkpoint.storage.store import Store, join, split

logger = logging.getLogger(__name__)

SAVING = "saving"
REPLACED = "replaced"
DELETED = "deleted"
# DCP keeps a save id in its metadata: ours says that a folder without a manifest was never finished.
SAVE_ID_PREFIX = "rescale_data-"
_HIDDEN = re.compile(rf"\.(.+)\.({SAVING}|{REPLACED}|{DELETED})-[0-9a-f]{{32}}")
_OWN_FOLDER = re.compile(rf"{SAVE_ID_PREFIX}[0-9a-f]{{32}}")
# Where there are no locks, what was not committed is taken for abandoned after this long, in seconds.
ABANDONED = 24 * 3600.0


def hidden(name: str, kind: str, save_id: str) -> str:
    """The name beside the checkpoint ``name`` of what is written or taken away."""
    return f".{name}.{kind}-{save_id}"


def hidden_of(entry: str) -> tuple[str, str] | None:
    """The checkpoint's name and the kind that a hidden name of ours was made from; None for any other name."""
    match = _HIDDEN.fullmatch(entry)
    return (match[1], match[2]) if match else None


@dataclass(frozen=True, kw_only=True)
class Workspace:
    """Where the save with this id writes what is going to be ``final``, until it is committed.

    Args:
        prefix: What the names of data files begin with, once the checkpoint is committed.
    """

    final: str
    working: str
    prefix: str = ""
    save_id: str

    @property
    def lock(self) -> str:
        """The file whose lock keeps others from taking a local folder for a leftover: that of its manifest."""
        return join(self.working, MANIFEST)


def prepare(store: Store, final: str, save_id: str, *, overwrite: bool) -> Workspace:
    """Check that ``final`` may be written, remove what earlier saves to it left over, and make the workspace."""
    remove_leftovers(store, final)
    _refuse_unless_free(store, final, overwrite)
    if store.renames:
        return _make_locked(store, final, save_id)
    own = SAVE_ID_PREFIX + save_id
    workspace = Workspace(final=final, working=join(final, own), prefix=f"{own}/", save_id=save_id)
    store.mkdir(workspace.working)
    return workspace


@contextlib.contextmanager
def aside(store: Store, final: str) -> Generator[str]:
    """The path to write to in place of ``final``, a file or a folder, and to rename; what is there in the end is removed.

    In an object store it is ``final``: an object appears when it is whole.
    """
    if not store.renames:
        yield final
        return
    remove_leftovers(store, final)
    workspace = _make_locked(store, final, uuid.uuid4().hex)
    try:
        yield join(workspace.working, "out")
        store.sync_folder(split(final)[0])
    finally:
        abandon(store, workspace)


def _make_locked(store: Store, final: str, save_id: str) -> Workspace:
    """Make a workspace beside ``final``, with its lock."""
    folder, name = split(final)
    own = hidden(name, SAVING, save_id)
    workspace = Workspace(final=final, working=join(folder, own), save_id=save_id)
    while not locks.is_held(workspace.lock):
        store.mkdir(workspace.working)
        # Taken away before it was locked: made again.
        with contextlib.suppress(FileNotFoundError, locks.HeldError):
            locks.take(workspace.lock)
            if not store.is_file(workspace.lock):
                locks.release(workspace.lock)
    for entry in store.names(folder):
        others = hidden_of(entry) == (name, SAVING) and entry != own
        if others and (who := locks.holder(join(folder, entry, MANIFEST))):
            abandon(store, workspace)
            raise ValueError(f"{final} is being saved by {who}. Wait until that has ended, or give another path.")
    return workspace


def commit(store: Store, workspace: Workspace, manifest: Manifest) -> None:
    """Make the checkpoint exist. All other files are written and synced."""
    (_rename if store.renames else _switch)(store, workspace, manifest)


def abandon(store: Store, workspace: Workspace) -> None:
    """Remove what a failed save wrote, unless it was committed after all: an answer may be lost on its way."""
    final = workspace.final
    try:
        if not _is_committed(store, workspace):
            store.remove_folder(workspace.working)
            if not store.renames and store.names(final) == [METADATA] and _is_saved_by_us(store, final):
                store.rm_file(join(final, METADATA))
    finally:
        locks.release(workspace.lock)


def _is_committed(store: Store, workspace: Workspace) -> bool:
    manifest = None if store.renames else read_manifest(store, workspace.final)
    return manifest is not None and manifest.save_id == workspace.save_id


def erase(store: Store, final: str) -> None:
    """Remove a checkpoint whose manifest is gone, or a link. A kill leaves what is found to be ours and removed later."""
    if store.renames:
        take_away(store, final)
    else:
        # The metadata last: it says whose the data files are.
        _remove_all_but(store, final, {METADATA})
        store.remove_folder(final)


def take_away(store: Store, path: str) -> None:
    """Remove a local folder, or a link to one, under another name: who writes into it fails, and commits nothing."""
    folder, name = split(path)
    of = hidden_of(name)
    aside = join(folder, hidden(of[0] if of else name, DELETED, uuid.uuid4().hex))
    store.rename(path, aside)
    store.remove_folder(aside)


def remove_leftovers(store: Store, final: str) -> None:
    """Remove what killed saves and deletions of ``final`` left, and give back the checkpoint that one was about to replace."""
    folder, name = split(final)
    for entry in store.names(folder) if store.renames else []:
        of, path = hidden_of(entry), join(folder, entry)
        if of is None or of[0] != name or not _is_dead(store, join(folder, hidden(name, SAVING, entry[-32:]))):
            continue
        with contextlib.suppress(FileNotFoundError):  # somebody else removes it
            if of[1] == REPLACED and not (store.exists(final) or store.is_link(final)):
                store.rename(path, final)
            else:
                take_away(store, path)
                logger.info("Removed %s, which a killed save or deletion left.", path)


def _is_dead(store: Store, workspace: str) -> bool:
    """Whether nobody writes into a workspace, or it is gone."""
    who = locks.holder(join(workspace, MANIFEST))
    return who == "" or (who is None and age(store, workspace) > ABANDONED)


def clear(store: Store, final: str) -> None:
    """Remove what is left of killed saves in a checkpoint, or of one that is ours, not committed, and nobody's just now."""
    if store.is_file(join(final, MANIFEST)):
        _remove_abandoned_files(store, final)
    elif store.is_link(final) or not is_remainder(store, final) or is_read(store, final):
        return
    elif store.renames or age(store, final) > ABANDONED:
        erase(store, final)
        logger.info("Removed %s, which a killed save or deletion left.", final)


def _remove_abandoned_files(store: Store, final: str) -> None:
    """In an object store, of killed saves, and of what one of them has just replaced."""
    own = [] if store.renames else [name for name in store.names(final) if _OWN_FOLDER.fullmatch(name)]
    manifest = read_manifest(store, final) if len(own) > 1 else None
    for name in own:
        path = join(final, name)
        if manifest is not None and name != SAVE_ID_PREFIX + manifest.save_id and age(store, path) > ABANDONED:
            if manifest.metadata != METADATA:
                store.write(join(final, METADATA), store.read(join(final, manifest.metadata)))
            store.remove_folder(path)
            logger.info("Removed %s, which a killed save left.", path)


def age(store: Store, path: str) -> float:
    """Seconds since the last change of a file in a folder, or in a folder in there."""
    folders = [path, *(join(path, name) for name in store.names(path))]
    files = [file for folder in folders for name in store.names(folder) if store.is_file(file := join(folder, name))]
    return time.time() - max((store.modified(file) for file in files), default=0.0)


def is_remainder(store: Store, path: str) -> bool:
    """Whether a folder holds what a killed save or deletion of ours left there, and nothing else."""
    names = store.names(path)
    others = [name for name in names if not _OWN_FOLDER.fullmatch(name)]
    if not others:
        return bool(names)
    known = METADATA in others and all(name == METADATA or name.endswith(".distcp") for name in others)
    return known and _is_saved_by_us(store, path)


def _is_saved_by_us(store: Store, path: str) -> bool:
    try:
        return is_ours(read_metadata(store.read(join(path, METADATA))))
    except Exception:  # whatever it is that cannot be read, it is not provably ours
        return False


def is_ours(metadata: Metadata) -> bool:
    return save_id_of(metadata).startswith(SAVE_ID_PREFIX)


def replaced_by_a_killed_save(store: Store, path: str) -> str | None:
    """Where the checkpoint of ``path`` is, if a kill struck between the two renames of a replacement."""
    folder, name = split(path)
    if not store.renames or store.exists(path):
        return None
    aside = [entry for entry in store.names(folder) if hidden_of(entry) == (name, REPLACED)]
    return join(folder, aside[-1]) if aside else None


def _refuse_unless_free(store: Store, final: str, overwrite: bool) -> None:
    if store.is_link(final) and overwrite:
        return  # a link is replaced, and what it points to stays
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
    # Into the file whose lock this process holds.
    store.write(workspace.lock, manifest.to_json())
    store.sync_folder(workspace.working)
    folder, name = split(workspace.final)
    replaced = join(folder, hidden(name, REPLACED, workspace.save_id))
    if store.is_link(workspace.final) or store.names(workspace.final):
        store.rename(workspace.final, replaced)
    store.rename(workspace.working, workspace.final)
    store.sync_folder(folder)
    store.remove_folder(replaced)
    locks.release(workspace.lock)


def _switch(store: Store, workspace: Workspace, manifest: Manifest) -> None:
    """Put the manifest and stock DCP's copy of the metadata, and remove the files of the checkpoint before."""
    final = workspace.final
    copy, metadata = join(final, METADATA), store.read(join(workspace.working, METADATA))
    is_first = not store.is_file(copy)
    if is_first:
        store.write(copy, metadata)
    try:
        store.write(join(final, MANIFEST), manifest.to_json())
    except Exception:
        if not _is_committed(store, workspace):  # else the answer alone was lost
            raise
    try:
        if not is_first:
            store.write(copy, metadata)
        _remove_all_but(store, final, {METADATA, MANIFEST, split(workspace.working)[1]})
    except Exception as error:
        logger.warning("%s is saved, and not all files of the save before it were replaced: %s", final, error)


def _remove_all_but(store: Store, folder: str, kept: Collection[str]) -> None:
    for name in store.names(folder):
        if name not in kept:
            store.remove_folder(join(folder, name))
