"""The folder of a run: its checkpoints by step, what killed saves left in it, and how one is deleted."""

from __future__ import annotations

import contextlib
import logging
import time
from typing import Any

from rescale_data.checkpoint.storage.commit import erase, remove_leftovers
from rescale_data.checkpoint.storage.lease import STEP, is_read
from rescale_data.checkpoint.storage.manifest import MANIFEST, METADATA, read_manifest
from rescale_data.checkpoint.storage.ownership import hidden_of, is_remainder
from rescale_data.checkpoint.storage.store import Store, join, split

logger = logging.getLogger(__name__)

LOCK = ".writer.lock"
# An object store has no locks: what was not committed there is taken for abandoned after this long, in seconds.
ABANDONED = 24 * 3600.0


class RunFolder:
    """Checkpoints named ``step-<number>`` in one folder."""

    def __init__(self, store: Store, path: str) -> None:
        self.store = store
        self.path = path
        self._lock: Any = None

    @classmethod
    def existing(cls, store: Store, path: str) -> RunFolder:
        """The folder of a run that is there.

        Raises:
            FileNotFoundError: no such folder.
            ValueError: a checkpoint, and not a folder of checkpoints.
        """
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
        """Remove what killed saves left over, unless another process saves to this folder now."""
        self.store.make_folder(self.path)
        if not self._take_lock():
            logger.warning("Another process saves to %s: what killed saves left there is not removed.", self.path)
            return
        for name in self._names_of_leftovers():
            remove_leftovers(self.store, join(self.path, name))
        for step in sorted(set(self._named()) - set(self.steps())):
            if self._is_abandoned(step) and self.delete(step):
                logger.info("Removed %s, which a killed save or deletion left.", self.checkpoint(step))

    def close(self) -> None:
        if self._lock is not None:
            import fcntl

            # Closing would not do: a process that this one has forked keeps a copy of the file open.
            fcntl.flock(self._lock, fcntl.LOCK_UN)
            self._lock.close()
            self._lock = None

    def delete(self, step: int) -> bool:
        """Delete a checkpoint; False where someone reads it, and it is tried again later."""
        path = self.checkpoint(step)
        if is_read(self.store, path):
            return False
        self.store.remove(join(path, MANIFEST))
        if is_read(self.store, path):
            return False
        erase(self.store, path)
        return True

    def _named(self) -> list[int]:
        return sorted(int(match[1]) for name in self.store.names(self.path) if (match := STEP.fullmatch(name)))

    def _names_of_leftovers(self) -> set[str]:
        names = {of[0] for entry in self.store.names(self.path) if (of := hidden_of(entry))}
        return {name for name in names if STEP.fullmatch(name)}

    def _is_abandoned(self, step: int) -> bool:
        """Whether an uncommitted folder is what a killed save or deletion of ours left, and nobody is saving it now."""
        path = self.checkpoint(step)
        return is_remainder(self.store, path) and (self.store.renames or _age(self.store, path) > ABANDONED)

    def _take_lock(self) -> bool:
        if not self.store.renames:
            return True
        import fcntl

        lock = open(join(self.path, LOCK), "ab")  # noqa: SIM115 - held until close, or until the process ends
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            return False
        self._lock = lock
        return True


def _age(store: Store, path: str) -> float:
    """Seconds since the last change of a file in a folder, or in a folder in there."""
    folders = [path, *(join(path, name) for name in store.names(path))]
    files = [file for folder in folders for name in store.names(folder) if store.is_file(file := join(folder, name))]
    return time.time() - max((store.modified(file) for file in files), default=0.0)
