"""`RunReader`: lists a run's checkpoints and loads them, without saving or deleting any."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from typing import Any, Literal

import torch.distributed as dist

from rescale_data.checkpoint.loading import LoadReport, load_folder
from rescale_data.checkpoint.ranks import Ranks
from rescale_data.checkpoint.retention import best_first
from rescale_data.checkpoint.state import State
from rescale_data.checkpoint.storage.open import NoCheckpointError, open_store
from rescale_data.checkpoint.storage.run_folder import RunFolder
from rescale_data.checkpoint.storage.store import StrPath
from rescale_data.errors import DamagedCheckpointError, checks_argument_types

logger = logging.getLogger(__name__)


class RunReader:
    """Lists and loads a run's checkpoints, ``<folder>/step-<step>``; takes no lock and needs no permission to write.

    All ranks make the reader, and all call ``load`` and ``load_latest``. Where it may write, it has a lease while it loads,
    so that the run leaves the checkpoint alone.

    Args:
        folder: The folder of the run: a local path or a URL that fsspec knows.
        process_group: The ranks that load; default all.
        storage_options: Passed on to fsspec.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from rescale_data import checkpoint
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     checkpoint.save(f"{folder}/step-100", {"weight": torch.ones(2)})
        ...     checkpoint.RunReader(folder).latest_step()
        100
    """

    @checks_argument_types
    def __init__(
        self,
        folder: StrPath,
        *,
        process_group: dist.ProcessGroup | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._store, path = open_store(folder, storage_options)
        self._folder = RunFolder(self._store, path)
        self._storage_options = storage_options
        self._ranks = Ranks(process_group)

    def steps(self) -> list[int]:
        """Return the steps that have a committed checkpoint, in order. Any rank may call it."""
        return self._folder.steps()

    def latest_step(self) -> int | None:
        """Return the highest step that has a committed checkpoint, or None. Any rank may call it."""
        return next((step for step, _ in self._folder.saves()), None)

    @checks_argument_types
    def best_step(self, metric: str, mode: Literal["min", "max"]) -> int | None:
        """Return the best step by a metric that was given to ``save``; None if no step has it. Any rank may call it."""
        if mode not in ("min", "max"):
            raise ValueError(f'mode={mode!r}: give "min" or "max".')
        return next(iter(best_first(self._folder.metrics(), metric, mode)), None)

    def load(self, step: int, state: State, *, strict: bool = True) -> LoadReport:
        """Load the checkpoint of ``step`` into ``state``, as ``rescale_data.checkpoint.load`` does."""
        self._prepare_load()
        return self._load(step, state, strict=strict)

    def load_latest(self, state: State, *, strict: bool = True) -> int | None:
        """Load the newest checkpoint that is not damaged, and return its step; None if there is no checkpoint.

        A damaged checkpoint is passed over with a warning and an error in the log. One that is whole and does not
        fit ``state`` is an error, or with ``strict=False`` a warning in the log that names what was not loaded.

        Raises:
            ValueError: there are checkpoints, and all are damaged; or the newest whole one does not fit.
        """
        self._prepare_load()
        steps, steps_before = self._ranks.run_on_first(self._folder.steps_with_folder), None
        skipped: dict[int, Exception] = {}
        while steps != steps_before:  # retention may have deleted all that were listed while newer ones were saved
            for step in reversed(steps):
                try:
                    report = self._load(step, state, strict=strict, allow_other_tools=False)
                except (DamagedCheckpointError, NoCheckpointError) as error:
                    # Deleted since, and loaded in part before
                    if not isinstance(skipped.get(step), DamagedCheckpointError):
                        skipped[step] = error
                except Exception as error:
                    for other_step, reason in skipped.items():
                        error.add_note(f"Before that, step {other_step} was passed over: {reason}")
                    raise
                else:
                    if self._ranks.is_first:
                        self._warn(step, report, {newer: reason for newer, reason in skipped.items() if newer > step})
                    return step
            steps, steps_before = self._ranks.run_on_first(self._folder.steps_with_folder), steps
        damaged = {step: str(reason) for step, reason in skipped.items() if isinstance(reason, DamagedCheckpointError)}
        if damaged:
            damage_text = "\n".join(damaged.values())
            raise DamagedCheckpointError(
                f"All checkpoints in {self._folder.path} are damaged: steps {sorted(damaged)}.\n{damage_text}"
            )
        if skipped and self._ranks.is_first:
            logger.warning("No step of %s was loaded, all were passed over: %s", self._folder.path, _describe(skipped))
        return None

    def _load(self, step: int, state: State, **options: bool) -> LoadReport:
        checkpoint_path = self._folder.checkpoint_path(step)
        return load_folder(checkpoint_path, state, self._ranks, storage_options=self._storage_options, **options)

    def _prepare_load(self) -> None:
        """Do nothing; a subclass may override it to run code before each load."""

    def _warn(self, step: int, report: LoadReport, errors_by_step: Mapping[int, Exception]) -> None:
        """Log the newer steps that were not loaded, with a Python warning if one is damaged, and the state's mismatches."""
        if errors_by_step:
            warning_text = (
                f"Step {step} of {self._folder.path} was loaded, and newer steps were passed over: "
                f"{_describe(errors_by_step)}"
            )
            logger.warning(warning_text)
            if any(isinstance(reason, DamagedCheckpointError) for reason in errors_by_step.values()):
                warnings.warn(warning_text, RuntimeWarning, stacklevel=3)
        if report.missing or report.unexpected or report.mismatched:
            logger.warning(
                "%s does not fit the state, and was loaded in part. "
                "Missing in the checkpoint: %s. Not asked for: %s. Different: %s.",
                self._folder.checkpoint_path(step),
                *(list(names) or "none" for names in (report.missing, report.unexpected, report.mismatched)),
            )


def _describe(skipped_steps: Mapping[int, Exception]) -> str:
    return "; ".join(f"step {step}: {' '.join(str(reason).split())}" for step, reason in skipped_steps.items())
