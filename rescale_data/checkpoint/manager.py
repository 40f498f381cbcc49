"""A run's checkpoints: saved beside training, kept by rule, and the newest whole one found again."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Mapping
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Literal, TypeAlias, cast, get_args

import torch.distributed as dist
from torch.distributed.distributed_c10d import new_group

from rescale_data.checkpoint.background import Background
from rescale_data.checkpoint.deletions import Deletions
from rescale_data.checkpoint.entries import State, entries_of
from rescale_data.checkpoint.failures import DamagedCheckpointError
from rescale_data.checkpoint.loading import LoadReport, read, refuse_damaged
from rescale_data.checkpoint.ranks import Ranks
from rescale_data.checkpoint.retention import Retention
from rescale_data.checkpoint.saving import begin, plain_state, write
from rescale_data.checkpoint.staging import Staged, Stager
from rescale_data.checkpoint.storage.integrity import problems
from rescale_data.checkpoint.storage.manifest import checked_metrics
from rescale_data.checkpoint.storage.reader import CheckpointReader
from rescale_data.checkpoint.storage.run_folder import RunFolder
from rescale_data.checkpoint.storage.store import StrPath, open_store
from rescale_data.checkpoint.storage.writer import CheckpointWriter, SaveInfo
from rescale_data.checkpoint.writer_process import ProcessWriter, WriterProcess

logger = logging.getLogger(__name__)

AsyncMode: TypeAlias = Literal["thread", "process", "disabled"]


class CheckpointManager:
    """Saves a run's checkpoints as ``<folder>/step-<step>``, deletes those that no rule keeps, and loads them.

    All ranks make the manager, and all call ``save``, ``load``, ``load_latest`` and ``close``. With an async mode ``save``
    returns when the state is safe: what only an optimizer's step changes is copied while the next forward and backward
    run, and any ``optimizer.step()`` waits for the copy (or ``wait_for_staging``, for what changes parameters otherwise);
    the rest is copied before it returns. Files are then written in the background, by a thread or by a process of the
    manager's own, with collectives on a gloo group of the manager's own. One save runs at a time; the next one waits, and
    counts the wait.

    A failed save is raised by the next call, or by ``close``, and leaves the checkpoints before it. An interpreter that
    exits without ``close`` waits for the save that runs; a killed one leaves nothing that could be taken for a checkpoint.
    Where one rank dies, the save of the others fails, or in rare cases waits for the timeout of gloo, 30 minutes: start ranks
    with what ends all of them when one dies, as torchrun does.

    Args:
        folder: Of the run; a local path or a URL that fsspec knows.
        keep_latest: Keep this many of the newest; None keeps all.
        keep_every: Keep every step that is a multiple of this.
        keep_best: ``(metric, "min" or "max", count)``: keep the best by a metric given to ``save``.
        async_mode: Who writes: ``"thread"``, ``"process"``, or ``"disabled"`` for ``save`` itself.
        process_group: The ranks of the run; default all.
        storage_options: Passed on to fsspec.

    Raises:
        ValueError: a rule that keeps nothing, or an unknown ``async_mode``.
    """

    def __init__(
        self,
        folder: StrPath,
        *,
        keep_latest: int | None = 3,
        keep_every: int | None = None,
        keep_best: tuple[str, str, int] | None = None,
        async_mode: AsyncMode = "thread",
        process_group: dist.ProcessGroup | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        if async_mode not in get_args(AsyncMode):
            raise ValueError(f"async_mode={async_mode!r}: choose one of {', '.join(map(repr, get_args(AsyncMode)))}.")
        retention = Retention(keep_latest=keep_latest, keep_every=keep_every, keep_best=keep_best)
        self._store, path = open_store(folder, storage_options)
        self._folder = RunFolder(self._store, path)
        self._options = storage_options
        self._ranks = Ranks(_own_group(process_group))
        self._ranks.on_first(self._folder.open_for_writing)
        self._process = WriterProcess() if async_mode == "process" else None
        self._stager = Stager(shared=async_mode == "process") if async_mode != "disabled" else None
        self._uploads = Background("checkpoint-upload")
        self._deletions = Deletions(self._folder, retention)
        self._closed = False

    def save(self, step: int, state: State, *, metrics: Mapping[str, float] | None = None) -> None:
        """Save ``state`` as ``step``, and delete what no rule keeps.

        Waits for the save before, if it runs still. A checkpoint of this step is replaced.

        Args:
            state: As for ``rescale_data.checkpoint.save``.
            metrics: Numbers for ``keep_best``.

        Raises:
            What the save before it failed with; then this one was not begun.
            TypeError, ValueError: ``state`` cannot be saved.
        """
        self._settle()
        if self._stager is None:
            info = self._ranks.together(lambda: self._info(step, metrics))
            self._write(plain_state(state, self._ranks), info)
            return
        try:
            info = self._info(step, metrics)
            staged = self._stager.stage(entries_of(state))
        except Exception as error:
            # The other ranks have begun: this one takes part, so that they fail now and not at a timeout.
            staged = Future[Staged]()
            staged.set_exception(error)
            self._uploads.submit(lambda: self._upload(staged, SaveInfo()))
            self._uploads.forget()
            raise
        self._uploads.submit(lambda: self._upload(staged, info))

    def wait_for_staging(self) -> None:
        """Return when parameters and optimizer state may change. ``optimizer.step()`` of torch calls it by itself."""
        if self._stager is not None:
            self._stager.wait()

    def wait(self) -> None:
        """Return when the save that runs is committed; raise what it failed with."""
        self._settle()

    def load(
        self, step: int, state: State, *, strict: bool = True, checksums: bool = True, trusted: bool = True
    ) -> LoadReport:
        """Load the checkpoint of ``step`` into ``state``: ``rescale_data.checkpoint.load``."""
        self._settle()
        path = self._folder.checkpoint(step)
        with self._deletions.held_off(step, lease=self._ranks.is_first):
            refuse_damaged(self._store, path, self._ranks, checksums=checksums)
            return self._read(path, state, strict, trusted)

    def load_latest(
        self, state: State, *, strict: bool = True, checksums: bool = True, trusted: bool = True
    ) -> int | None:
        """Load the newest checkpoint whose files are in order, and return its step; None where there is no checkpoint.

        A damaged checkpoint is passed over with a warning and an error in the log. One that is whole and does not
        fit ``state`` is an error, or with ``strict=False`` a warning in the log that names what was not loaded.

        Raises:
            ValueError: there are checkpoints, and all are damaged; or the newest whole one does not fit.
        """
        self._settle()
        steps = self._ranks.on_first(self._folder.steps)
        for step in reversed(steps):
            path = self._folder.checkpoint(step)
            with self._deletions.held_off(step, lease=self._ranks.is_first):
                found = self._problems(path, checksums)
                if not found:
                    self._warn_of_misfits(path, self._read(path, state, strict, trusted))
                    return step
            self._warn_of_damage(path, found)
        if steps:
            raise DamagedCheckpointError(
                f"All checkpoints in {self._folder.path} are damaged: steps {steps}. Nothing was loaded."
            )
        return None

    def steps(self) -> list[int]:
        """Steps with a committed checkpoint, in order. Any rank may ask."""
        return self._folder.steps()

    @property
    def num_waits(self) -> int:
        """How often a call had to wait for the save before it."""
        return self._uploads.num_waits

    @property
    def wait_seconds(self) -> float:
        """How long calls have waited for the save before them, in all."""
        return self._uploads.wait_seconds

    def close(self) -> None:
        """Wait for what runs in the background; raise what it failed with. May be called again."""
        if self._closed:
            return
        self._closed = True
        with contextlib.ExitStack() as stack:
            stack.callback(self._folder.close)
            stack.callback(self._deletions.close)
            if self._process is not None:
                stack.callback(self._process.close)
            if self._stager is not None:
                stack.callback(self._stager.close)
            self._uploads.close()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _info(self, step: int, metrics: Mapping[str, float] | None) -> SaveInfo:
        if type(step) is not int or step < 0:
            raise ValueError(f"step={step!r}: give an integer of at least 0.")
        return SaveInfo(world_size=self._ranks.size, step=step, metrics=checked_metrics(metrics))

    def _settle(self) -> None:
        if self._closed:
            raise ValueError("This CheckpointManager is closed; make another.")
        try:
            self._uploads.settle()
        except BaseException as error:
            error.add_note("This save failed in the background. The checkpoints before it are untouched.")
            raise

    def _upload(self, staged: Future[Staged], info: SaveInfo) -> None:
        self._ranks.on_each(lambda: staged.result() and None)
        self._write(staged.result(), info)

    def _write(self, plain: Staged, info: SaveInfo) -> None:
        step = info.step or 0
        self._deletions.spare(step)
        workspace = begin(self._store, self._folder.checkpoint(step), self._ranks, overwrite=True)
        if self._process is None:
            writer = CheckpointWriter(self._store, workspace, info)
        else:
            writer = ProcessWriter(self._store, workspace, info, self._process, self._options)
        write(plain, writer, self._ranks)
        if self._ranks.is_first:
            self._deletions.start()

    def _read(self, path: str, state: State, strict: bool, trusted: bool) -> LoadReport:
        reader = CheckpointReader(self._store, path, trusted=trusted)
        return read(reader, path, state, self._ranks, strict=strict, trusted=trusted)

    def _problems(self, path: str, checksums: bool) -> list[str]:
        try:
            return problems(self._store, path, self._ranks, checksums=checksums)
        except FileNotFoundError as error:
            return [str(error)]

    def _warn_of_damage(self, path: str, found: list[str]) -> None:
        listed = "\n  ".join(found)
        text = f"The checkpoint {path} is damaged and is passed over:\n  {listed}\nFalling back to the checkpoint before it."
        if self._ranks.is_first:
            logger.error(text)
            warnings.warn(text, RuntimeWarning, stacklevel=3)

    def _warn_of_misfits(self, path: str, report: LoadReport) -> None:
        if self._ranks.is_first and (report.missing or report.unexpected or report.mismatched):
            logger.warning(
                "%s does not fit the state, and was loaded in part. "
                "Missing in the checkpoint: %s. Not asked for: %s. Different: %s.",
                *(path, *(list(names) or "none" for names in (report.missing, report.unexpected, report.mismatched))),
            )


def _own_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """A gloo group over the same ranks, for nothing but checkpoints: training may use its own at the same time."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    ranks = None if group is None else dist.get_process_group_ranks(group)
    # Not dist.new_group, which torch_xla replaces by one that takes less.
    own = new_group(ranks, backend="gloo", use_local_synchronization=ranks is not None)
    return cast(dist.ProcessGroup, own)
