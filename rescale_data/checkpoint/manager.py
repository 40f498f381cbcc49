"""`CheckpointManager`: saves a run's checkpoints in the background and deletes old ones by rule."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, Self, cast

import torch.distributed as dist
from torch.distributed.distributed_c10d import new_group

from rescale_data.checkpoint.retention import Retention, prune
from rescale_data.checkpoint.run_reader import RunReader
from rescale_data.checkpoint.saving import savable_state_dict, write_checkpoint
from rescale_data.checkpoint.staging import StagedState, Stager
from rescale_data.checkpoint.state import State, entries_of
from rescale_data.checkpoint.storage.commit import Ownership
from rescale_data.checkpoint.storage.manifest import checked_metrics
from rescale_data.checkpoint.storage.store import StrPath
from rescale_data.errors import checks_argument_types

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Saving:
    """A save that may still run in the background.

    Args:
        staged: A future that is done when parameters and optimizer state may change: ``staged.done()``.
        committed: A future that is done when the checkpoint exists. Its failure is raised by the manager's next call, too.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from rescale_data import checkpoint
        >>> with tempfile.TemporaryDirectory() as folder, checkpoint.CheckpointManager(folder) as manager:
        ...     saving = manager.save(100, {"weight": torch.ones(2)})
        ...     saving.committed.result()  # waits
        >>> saving.committed.done()
        True
    """

    staged: Future[None]
    committed: Future[None]


class CheckpointManager(RunReader):
    """Saves a run's checkpoints as ``<folder>/step-<step>``, loads them, and deletes the checkpoints that no rule keeps.

    All ranks make the manager, and all call ``save``, ``load``, ``load_latest`` and ``close``. What is copied when, who
    writes, and what a failure or a kill leaves: the README of this module. Where one rank dies, the save of the others fails,
    or in rare cases waits for the timeout of gloo, 30 minutes: start ranks with what ends all of them, as torchrun does.

    Args:
        folder: The folder of the run: a local path or a URL that fsspec knows.
        keep_latest: Keep this many of the newest; None keeps all.
        keep_every: Keep every step that is a multiple of this.
        keep_best: ``(metric, "min" or "max", count)``: keep the best by a metric given to ``save``.
        async_mode: ``"thread"`` to write in a background thread, ``"disabled"`` to write within ``save``.
        process_group: The ranks of the run; default all.
        storage_options: Passed on to fsspec.

    Attributes:
        num_waits: The number of calls that had to wait for the save before them.
        wait_seconds: The seconds that these calls waited, in all.

    Raises:
        ValueError: a rule that keeps nothing, an ``async_mode`` that is unknown or differs between ranks, or another manager
            saves to the folder.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from rescale_data import checkpoint
        >>> state = {"weight": torch.ones(2)}
        >>> with tempfile.TemporaryDirectory() as folder, checkpoint.CheckpointManager(folder, keep_latest=2) as manager:
        ...     saving = manager.save(100, state)
        ...     manager.load_latest(state)  # waits for the save
        100
    """

    @checks_argument_types
    def __init__(
        self,
        folder: StrPath,
        *,
        keep_latest: int | None = 3,
        keep_every: int | None = None,
        keep_best: tuple[str, str, int] | None = None,
        async_mode: Literal["thread", "disabled"] = "thread",
        process_group: dist.ProcessGroup | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(folder, process_group=_separate_group(process_group), storage_options=storage_options)
        self._rules = self._ranks.on_all(
            lambda: Retention(keep_latest=keep_latest, keep_every=keep_every, keep_best=keep_best)
        )
        if len(async_modes := set(self._ranks.on_each(lambda: _require_mode(async_mode)))) > 1:
            raise ValueError(f"async_mode= differs between the ranks, {sorted(async_modes)}: give all the same.")
        self._owner: Ownership | None = None
        self._ranks.run_on_first(self._become_owner)
        self._writes_in_background = async_mode != "disabled"
        self._stager = Stager()
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoints")
        self._running_save: Future[None] | None = None
        self._prune_task = _done_future()
        self._warned: set[str] = set()
        self._is_closed = False
        self.num_waits, self.wait_seconds = 0, 0.0
        if self._owner is not None:
            self._pool.submit(self._owner.remove_obsolete)

    def _become_owner(self) -> None:
        self._store.mkdir(self._folder.path)
        self._owner = Ownership(self._store, self._folder.path)

    def save(self, step: int, state: State, *, metrics: Mapping[str, float] | None = None) -> Saving:
        """Save ``state`` as the checkpoint of ``step``, then delete the checkpoints that no rule keeps.

        Waits for the save before, and raises what it failed with. A checkpoint of this step is replaced.

        Args:
            state: The same as for ``rescale_data.checkpoint.save``, whose errors it has.
            metrics: Numbers for ``keep_best``, the same on all ranks: those of the first count, and others are a warning.
        """
        self.wait()
        if not self._writes_in_background:
            checked = self._ranks.on_all(lambda: _checked_arguments(step, metrics))
            self._wait_until_idle()  # of deletions
            self._write(savable_state_dict(state, self._ranks), *checked)
            return Saving(_done_future(), _done_future())
        try:
            staging_done, get_copies = self._stager.stage(entries_of(state, self._ranks.rank))
            checked = _checked_arguments(step, metrics)  # after the loader's collective, in which the other ranks wait
        except Exception as error:
            # The other ranks have begun: this one takes part, so that they fail now and not at a timeout.
            failed_copy = Future[StagedState]()
            failed_copy.set_exception(error)
            self._pool.submit(self._write_in_background, failed_copy.result, 0, {}).exception()
            raise
        self._running_save = self._pool.submit(self._write_in_background, get_copies, *checked)
        return Saving(staging_done, self._running_save)

    def warm_up(self, state: State) -> None:
        """Allocate the host memory for copies of a state, which the first ``save`` allocates otherwise; save nothing.

        Call it when the model and the optimizer's state are there, after ``load_latest`` or the first step.
        """
        self.wait()
        if self._writes_in_background:
            self._stager.stage(entries_of(state, self._ranks.rank))[0].result()

    def wait_for_staging(self) -> None:
        """Wait until parameters and optimizer state may change. ``optimizer.step()`` of torch waits by itself."""
        self._stager.wait()

    def wait(self) -> None:
        """Wait until the running save is committed; raise its error if it failed."""
        if self._is_closed:
            raise ValueError("This CheckpointManager is closed; make another.")
        running_save = self._running_save
        if running_save is None:
            return
        if not running_save.done():
            start_time = time.perf_counter()
            self.num_waits += 1
            running_save.exception()
            self.wait_seconds += time.perf_counter() - start_time
        self._running_save = None  # not before: after Ctrl-C in this wait, the next call waits for it again
        try:
            running_save.result()
        except BaseException as error:
            error.add_note("This save failed in the background. The checkpoints before it are untouched.")
            raise

    @checks_argument_types
    def delete(self, step: int) -> bool:
        """Delete the checkpoint of ``step``; False if there is none or it is being read. All ranks call it.

        If the step is a link, only the link is removed.
        """
        self.wait()
        self._wait_until_idle()
        return self._ranks.run_on_first(lambda: self._delete(step))

    def _delete(self, step: int) -> bool:
        return self._owner is not None and step in self.steps() and self._owner.delete(f"step-{step}") == "gone"

    def close(self) -> None:
        """Wait for all background work and release the folder; raise the error of a failed save. May be called again."""
        if self._is_closed:
            return
        with contextlib.ExitStack() as stack:
            if self._owner is not None:
                stack.callback(self._owner.close)
            stack.callback(self._stager.close)
            stack.callback(self._pool.shutdown)
            try:
                self.wait()
                if self._owner is not None:
                    self._pool.submit(self._owner.remove_obsolete)  # what the lease of a load has covered meanwhile
            finally:
                self._is_closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _prepare_load(self) -> None:
        self.wait()
        self._prune_task.exception()  # which would leave alone what the lease of a load covers

    def _wait_until_idle(self) -> None:
        """Wait until all queued background work is done."""
        with contextlib.suppress(RuntimeError):  # the interpreter exits
            self._pool.submit(int).result()

    def _write_in_background(self, get_copies: Callable[[], StagedState], step: int, metrics: dict[str, float]) -> None:
        try:
            self._write(self._ranks.on_all(get_copies), step, metrics)
        except BaseException as error:
            logger.error("In the background: %s: %s", type(error).__name__, error)
            raise

    def _write(self, state_dict: StagedState, step: int, metrics: dict[str, float]) -> None:
        path = self._folder.checkpoint_path(step)
        write_checkpoint(
            self._store, path, state_dict, self._ranks, run=self._owner, overwrite=True, step=step, metrics=metrics
        )
        if self._owner is not None:
            with contextlib.suppress(RuntimeError):  # the interpreter exits: the next run deletes them
                self._prune_task = self._pool.submit(prune, self._owner, self._folder, self._rules, step, self._warned)


@checks_argument_types
def _checked_arguments(step: int, metrics: Mapping[str, float] | None) -> tuple[int, dict[str, float]]:
    if step < 0:
        raise ValueError(f"step={step!r}: give an integer of at least 0.")
    return step, checked_metrics(metrics)


def _done_future() -> Future[None]:
    future: Future[None] = Future()
    future.set_result(None)
    return future


def _require_mode(async_mode: str) -> str:
    """Return ``async_mode``; raise ``ValueError`` if it is unknown."""
    if async_mode not in ("thread", "disabled"):
        raise ValueError(f"async_mode={async_mode!r}: choose one of 'thread', 'disabled'.")
    return async_mode


def _separate_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Return a separate gloo group over the same ranks, because training may use its group at the same time."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    ranks = None if group is None else dist.get_process_group_ranks(group)
    # Not dist.new_group, which torch_xla replaces by one that takes less.
    gloo_group = new_group(ranks, backend="gloo", use_local_synchronization=ranks is not None)
    return cast(dist.ProcessGroup, gloo_group)
