"""The folder of a run: its checkpoints by step, what killed saves left in it, how one is deleted, and what is noted of it."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rescale_data.checkpoint.storage import locks
from rescale_data.checkpoint.storage.commit import clear, erase, hidden_of, remove_leftovers
from rescale_data.checkpoint.storage.lease import STEP, is_read
from rescale_data.checkpoint.storage.manifest import MANIFEST, METADATA, Manifest, read_manifest
from rescale_data.checkpoint.storage.store import Store, join, split

logger = logging.getLogger(__name__)

LOCK = ".writer.lock"
PRUNED = ".pruned"
"""Of notes of checkpoints that were deleted, for people: a small file each, so that two who delete at once lose none."""


class RunFolder:
    """Checkpoints named ``step-<number>`` in one folder."""

    def __init__(self, store: Store, path: str) -> None:
        self.store = store
        self.path = path
        self._lock: Callable[[], object] | None = None

    @classmethod
    def existing(cls, store: Store, path: str) -> RunFolder:
        """The folder of a run that is there, and no checkpoint itself."""
        if not store.is_folder(path):
            raise FileNotFoundError(f"No folder at {path}.")
        if {MANIFEST, METADATA} & set(store.names(path)):
            raise ValueError(f"{path} is a checkpoint itself; give the folder of the run, {split(path)[0]}.")
        return cls(store, path)

    def checkpoint(self, step: int) -> str:
        return join(self.path, f"step-{step}")

    def steps(self) -> list[int]:
        """Committed steps, in order."""
        return [step for step in self._named() if self.store.is_file(join(self.checkpoint(step), MANIFEST))]

    def metrics(self) -> dict[int, dict[str, float]]:
        """Metrics by committed step; a damaged manifest counts as one without metrics."""
        found: dict[int, dict[str, float]] = {}
        for step in self.steps():
            found[step] = {}
            with contextlib.suppress(ValueError, OSError):
                manifest = read_manifest(self.store, self.checkpoint(step))
                found[step] = dict(manifest.metrics) if manifest else {}
        return found

    def open_for_writing(self) -> None:
        """Take the folder's lock, which no other process may have, and remove what killed saves left over."""
        self.store.mkdir(self.path)
        if not self._take_lock():
            return
        hidden = {of[0] for entry in self.store.names(self.path) if (of := hidden_of(entry))}
        for name in filter(STEP.fullmatch, hidden):
            self._tried(name, lambda name=name: remove_leftovers(self.store, join(self.path, name)))
        for step in self._named():
            self._tried(f"step-{step}", lambda step=step: clear(self.store, self.checkpoint(step)))

    def close(self) -> None:
        if self._lock is not None:
            self._lock()

    def delete(self, step: int) -> bool:
        """Delete a checkpoint; False where someone reads it, and it is tried again later. Of a link the link alone goes."""
        path = self.checkpoint(step)
        if self.store.is_link(path):
            self.store.rm_file(path)
            return True
        if is_read(self.store, path):
            return False
        manifest = join(path, MANIFEST)
        content = self.store.read(manifest) if self.store.is_file(manifest) else None
        if content is not None:
            remember(self.store, self.path, step, content)
        self.store.rm_file(manifest)
        if is_read(self.store, path):
            if content is not None:
                self.store.write(manifest, content)
            return False
        erase(self.store, path)
        return True

    def _tried(self, name: str, work: Callable[[], None]) -> None:
        """What cannot be read or removed stops nothing else."""
        try:
            work()
        except (OSError, ValueError) as error:
            logger.warning("What was left over of %s is not removed: %s", join(self.path, name), error)

    def _named(self) -> list[int]:
        return sorted(int(match[1]) for name in self.store.names(self.path) if (match := STEP.fullmatch(name)))

    def _take_lock(self) -> bool:
        """Take the folder for this object, until it is closed or dropped; whether nobody else can be saving here."""
        lock = join(self.path, LOCK)
        if locks.is_held(lock):
            gc.collect()  # a manager that was dropped may wait for that
        try:
            alone = locks.take(lock, file=self.store.renames)
        except locks.HeldError as error:
            raise ValueError(
                f"{self.path} is held by {error}, which saves to it. End that first (a CheckpointManager of this process by "
                f"close()), or give this run another folder; to read the checkpoints there use RunReader."
            ) from error
        self._lock = weakref.finalize(self, locks.release, lock)
        return alone or not self.store.renames


def remember(store: Store, run: str, step: int, manifest: bytes) -> None:
    """Note the checkpoint of ``step``, which is about to be deleted; never raises."""
    try:
        store.mkdir(join(run, PRUNED))
        store.write(
            join(run, PRUNED, f"step-{step}.json"), json.dumps(_note(step, Manifest.from_json(manifest))).encode()
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
            note = json.loads(store.read(join(run, PRUNED, name)))
            return {key: note[key] for key in known}
        return {}

    names = [name for name in store.names(join(run, PRUNED)) if name.endswith(".json")]
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
