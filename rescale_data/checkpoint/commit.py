"""How a checkpoint comes to exist: written aside, then committed by one atomic step.

    local folder    .step-100.saving-<id>/  --rename-->  step-100/
    object store    step-100/...            --last-->    step-100/rescale_data.json

A kill at any moment leaves the checkpoint that was, the checkpoint that will be, or none; never a mix of the two.
"""

from __future__ import annotations

from dataclasses import dataclass

from rescale_data.checkpoint.manifest import MANIFEST, METADATA, Manifest, read_manifest
from rescale_data.checkpoint.store import Store, join, split

SAVING = ".saving-"
REPLACED = ".replaced-"
# DCP keeps a save id in its metadata: ours says that a folder without a manifest was never finished.
SAVE_ID_PREFIX = "rescale_data-"


@dataclass(frozen=True, kw_only=True)
class Workspace:
    """Where one save writes.

    Args:
        final: The checkpoint's path once it is committed.
        working: Where its files are written.
        save_id: Of this save.
    """

    final: str
    working: str
    save_id: str


def prepare(store: Store, final: str, save_id: str, *, overwrite: bool) -> Workspace:
    """Check that ``final`` may be written, remove what earlier saves to it left over, and make the workspace.

    Raises:
        ValueError: ``final`` is a file, holds a checkpoint and ``overwrite`` is False, or holds something else.
    """
    remove_leftovers(store, final)
    _refuse_unless_free(store, final, overwrite)
    folder, name = split(final)
    working = join(folder, f".{name}{SAVING}{save_id}") if store.renames else final
    if not store.renames:
        _uncommit(store, final)
    store.make_folder(working)
    return Workspace(final=final, working=working, save_id=save_id)


def commit(store: Store, workspace: Workspace, manifest: Manifest) -> None:
    """Make the checkpoint exist. All other files are written and synced."""
    store.write(join(workspace.working, MANIFEST), manifest.to_json())
    if not store.renames:
        return
    store.sync_folder(workspace.working)
    folder, name = split(workspace.final)
    replaced = join(folder, f".{name}{REPLACED}{workspace.save_id}")
    if store.names(workspace.final):
        store.rename(workspace.final, replaced)
    store.rename(workspace.working, workspace.final)
    store.sync_folder(folder)
    store.remove_folder(replaced)


def abandon(store: Store, workspace: Workspace) -> None:
    """Remove what a failed save wrote."""
    store.remove_folder(workspace.working)


def remove_leftovers(store: Store, final: str) -> None:
    """Remove what killed saves to ``final`` left, and give back the checkpoint that one of them was about to replace."""
    folder, name = split(final)
    leftovers = [entry for entry in store.names(folder) if is_leftover(entry, name)] if store.renames else []
    for entry in leftovers:
        if entry.startswith(f".{name}{REPLACED}") and not store.exists(final):
            store.rename(join(folder, entry), final)
        else:
            store.remove_folder(join(folder, entry))


def is_leftover(entry: str, name: str) -> bool:
    return entry.startswith((f".{name}{SAVING}", f".{name}{REPLACED}"))


def replaced_by_a_killed_save(store: Store, path: str) -> str | None:
    """Where the checkpoint of ``path`` is, if a kill struck between the two renames of a replacement."""
    folder, name = split(path)
    if not store.renames or store.exists(path):
        return None
    aside = [entry for entry in store.names(folder) if entry.startswith(f".{name}{REPLACED}")]
    return join(folder, aside[-1]) if aside else None


def _refuse_unless_free(store: Store, final: str, overwrite: bool) -> None:
    if store.is_file(final):
        raise ValueError(f"{final} is a file; a checkpoint is a folder. Give another path, or move the file away.")
    names = store.names(final)
    if not names:
        return
    if not {MANIFEST, METADATA} & set(names) and (store.renames or not _is_ours(store, final)):
        raise ValueError(f"{final} holds {names[:3]} and is no checkpoint; it is not replaced. Give another path.")
    if not overwrite and (store.renames or read_manifest(store, final) is not None):
        raise ValueError(f"{final} already holds a checkpoint. Give another path, or overwrite=True to replace it.")


def _is_ours(store: Store, final: str) -> bool:
    """Whether an object store's prefix without metadata holds nothing but the data files of a save that was killed."""
    return all(name.endswith(".distcp") for name in store.names(final))


def _uncommit(store: Store, final: str) -> None:
    # The manifest first: from here on there is no checkpoint, so no reader takes old and new files for one.
    store.remove(join(final, MANIFEST))
    store.remove_folder(final)
