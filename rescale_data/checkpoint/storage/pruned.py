"""What a run's folder remembers of checkpoints that were deleted: a small file each, in ``.pruned``.

For people who look at the run later. Nothing that is saved or loaded depends on it; a file that cannot be written or read is
left out. One file each, so that neither two who delete at once nor a kill loses the others'.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rescale_data.checkpoint.storage.manifest import Manifest
from rescale_data.checkpoint.storage.store import Store, join

FOLDER = ".pruned"
logger = logging.getLogger(__name__)


def remember(store: Store, run: str, step: int, manifest: bytes) -> None:
    """Note the checkpoint of ``step``, which is about to be deleted; never raises."""
    try:
        store.make_folder(join(run, FOLDER))
        store.write(
            join(run, FOLDER, f"step-{step}.json"), json.dumps(_note(step, Manifest.from_json(manifest))).encode()
        )
    except Exception as error:
        logger.warning("step-%s of %s is deleted without a note of it: %s", step, run, error)


def pruned(store: Store, run: str) -> list[dict[str, Any]]:
    """What is known of deleted checkpoints, by step; the keys are those of `_note`.

    Of one that is about to be deleted, or was saved again, there is a note beside it: whoever shows both leaves the note out.
    """
    known = _note(0, Manifest(save_id=""))

    def read(name: str) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            note = json.loads(store.read(join(run, FOLDER, name)))
            return {key: note[key] for key in known}
        return {}

    names = [name for name in store.names(join(run, FOLDER)) if name.endswith(".json")]
    with ThreadPoolExecutor(16) as pool:
        return sorted(filter(None, pool.map(read, names)), key=lambda note: note["step"])


def _note(step: int, manifest: Manifest) -> dict[str, Any]:
    return {
        "step": step,
        "bytes": manifest.num_bytes,
        "created": manifest.created,
        "pruned": time.time(),
        "world_size": manifest.world_size,
        "metrics": dict(manifest.metrics),
    }
