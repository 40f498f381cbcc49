"""What no rule keeps is deleted in the background, and what is read or was just saved is left alone."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Generator, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

from rescale_data.checkpoint.retention import Retention
from rescale_data.checkpoint.storage.lease import reading
from rescale_data.checkpoint.storage.run_folder import RunFolder

logger = logging.getLogger(__name__)


class Deletions:
    """Deletes the checkpoints of a run's folder by rule, in a thread, on the rank that commits."""

    def __init__(self, folder: RunFolder, retention: Retention) -> None:
        self._folder, self._retention = folder, retention
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint-deletion")
        self._being_read: set[int] = set()
        self._saved: int | None = None
        self._warned = False
        self._warned_of_metric = False

    @contextlib.contextmanager
    def held_off(self, step: int, *, lease: bool) -> Generator[None]:
        """While this is entered the checkpoint stays; with ``lease`` other processes leave it alone, too."""
        with reading(self._folder.store, self._folder.checkpoint(step), wanted=lease):
            self._being_read.add(step)
            try:
                yield
            finally:
                self._being_read.discard(step)

    def spare(self, step: int) -> None:
        """Leave alone what is about to be saved as ``step``; returns when nothing is being deleted."""
        self._saved = step
        self.wait()

    def start(self) -> None:
        with contextlib.suppress(RuntimeError):  # the interpreter exits: the next run deletes
            self._pool.submit(self._delete)

    def wait(self) -> None:
        """Return when nothing is being deleted."""
        with contextlib.suppress(RuntimeError):
            self._pool.submit(int).result()

    def close(self) -> None:
        self._pool.shutdown()

    def _delete(self) -> None:
        try:
            metrics = self._folder.metrics()
            self._warn_of_later(metrics)
            doomed = self._retention.to_delete(metrics)
            if doomed:
                self._warn_of_missing_metric(metrics)
            for step in doomed:
                if step not in (*self._being_read, self._saved) and self._folder.delete(step):
                    logger.info("Deleted %s.", self._folder.checkpoint(step))
        except Exception as error:
            logger.warning(
                "Old checkpoints in %s were not deleted; the next save tries again: %s", self._folder.path, error
            )

    def _warn_of_later(self, steps: Iterable[int]) -> None:
        later = sorted(step for step in steps if self._saved is not None and step > self._saved)
        if later and not self._warned:
            self._warned = True
            logger.warning(
                "Step %s was saved, and %s holds the later steps %s: load_latest loads the last of them. Delete them if the "
                "run went back to an earlier step, or go on in another folder.",
                *(self._saved, self._folder.path, later),
            )

    def _warn_of_missing_metric(self, metrics: Mapping[int, Mapping[str, float]]) -> None:
        missing = self._retention.missing_metric(metrics)
        if missing and not self._warned_of_metric:
            self._warned_of_metric = True
            logger.warning("In %s %s. Give save() metrics of that name.", self._folder.path, missing)
