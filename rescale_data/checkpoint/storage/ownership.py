"""What is provably ours, and so may be removed: by a name that nobody else gives, or by the save id in its metadata.

.step-100.saving-<id>/        a save that runs or was killed
.step-100.replaced-<id>/      a checkpoint that a save was about to replace
.step-100.deleted-<id>/       a deletion that runs or was killed
step-100/                     no manifest, and DCP's files with a save id of ours: a deletion was killed
step-100/rescale_data-<id>/   object store: the files of a save
"""

from __future__ import annotations

import re

from rescale_data.checkpoint.storage.manifest import METADATA
from rescale_data.checkpoint.storage.reader import CheckpointReader
from rescale_data.checkpoint.storage.store import Store

SAVING = "saving"
REPLACED = "replaced"
DELETED = "deleted"
# DCP keeps a save id in its metadata: ours says that a folder without a manifest was never finished.
SAVE_ID_PREFIX = "rescale_data-"
_HIDDEN = re.compile(rf"\.(.+)\.({SAVING}|{REPLACED}|{DELETED})-[0-9a-f]{{32}}")
_OWN_FOLDER = re.compile(rf"{SAVE_ID_PREFIX}[0-9a-f]{{32}}")


def hidden(name: str, kind: str, save_id: str) -> str:
    """The name beside the checkpoint ``name`` of what is written or taken away."""
    return f".{name}.{kind}-{save_id}"


def hidden_of(entry: str) -> tuple[str, str] | None:
    """The checkpoint's name and the kind that a hidden name of ours was made from; None for any other name."""
    match = _HIDDEN.fullmatch(entry)
    return (match[1], match[2]) if match else None


def is_saved_by_us(store: Store, path: str) -> bool:
    """Whether the DCP metadata at ``path`` has a save id of ours."""
    try:
        meta = CheckpointReader(store, path, trusted=False).read_metadata().storage_meta
    except Exception:  # whatever it is that cannot be read, it is not provably ours
        return False
    return meta is not None and (meta.save_id or "").startswith(SAVE_ID_PREFIX)


def is_remainder(store: Store, path: str) -> bool:
    """Whether a folder holds what a killed save or deletion of ours left there, and nothing else."""
    names = store.names(path)
    others = [name for name in names if not _OWN_FOLDER.fullmatch(name)]
    if not others:
        return bool(names)
    known = METADATA in others and all(name == METADATA or name.endswith(".distcp") for name in others)
    return known and is_saved_by_us(store, path)
