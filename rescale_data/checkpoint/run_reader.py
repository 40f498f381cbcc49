"""A run's checkpoints for who only reads them: listed, and the newest whole one found."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from typing import Any, Literal

import torch.distributed as dist

from rescale_data.checkpoint.loading import LoadReport, load
from rescale_data.checkpoint.ranks import Ranks
from rescale_data.checkpoint.retention import ranked
from rescale_data.checkpoint.state import State
from rescale_data.checkpoint.storage.open import open_store
from rescale_data.checkpoint.storage.run_folder import RunFolder
from rescale_data.checkpoint.storage.store import StrPath
from rescale_data.errors import DamagedCheckpointError, checks_kinds

logger = logging.getLogger(__name__)


class RunReader:
    """A run's checkpoints, ``<folder>/step-<step>``, for who only reads them: takes no lock, and needs no permission to write.

    All ranks make the reader, and all call ``load`` and ``load_latest``. Where it may write, it has a lease while it loads,
    so that the run leaves the checkpoint alone.

    Args:
        folder: Of the run; a local path or a URL that fsspec knows.
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

    @checks_kinds
    def __init__(
        self,
        folder: StrPath,
        *,
        process_group: dist.ProcessGroup | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._store, path = open_store(folder, storage_options)
        self._folder = RunFolder(self._store, path)
        self._options = storage_options
        self._ranks = Ranks(process_group)

    def steps(self) -> list[int]:
        """Steps with a committed checkpoint, in order. Any rank may ask."""
        return self._folder.steps()

    def latest_step(self) -> int | None:
        """The highest step with a committed checkpoint; None where there is none. Any rank may ask."""
        return max(self.steps(), default=None)

    @checks_kinds
    def best_step(self, metric: str, mode: Literal["min", "max"]) -> int | None:
        """The step that is best by a metric that was given to ``save``; None where none has it. Any rank may ask."""
        if mode not in ("min", "max"):
            raise ValueError(f'mode={mode!r}: give "min" or "max".')
        return next(iter(ranked(self._folder.metrics(), metric, mode)), None)

    def load(
        self, step: int, state: State, *, strict: bool = True, checksums: bool = True, trusted: bool = False
    ) -> LoadReport:
        """Load the checkpoint of ``step`` into ``state``: ``rescale_data.checkpoint.load``."""
        self._prepare_load()
        return self._load(step, state, strict=strict, checksums=checksums, trusted=trusted)

    def load_latest(
        self, state: State, *, strict: bool = True, checksums: bool = True, trusted: bool = False
    ) -> int | None:
        """Load the newest checkpoint whose files are in order, and return its step; None where there is no checkpoint.

        A damaged checkpoint is passed over with a warning and an error in the log. One that is whole and does not
        fit ``state`` is an error, or with ``strict=False`` a warning in the log that names what was not loaded.

        Raises:
            ValueError: there are checkpoints, and all are damaged; or the newest whole one does not fit.
        """
        self._prepare_load()
        steps = self._ranks.on_first(self._folder.steps)
        for step in reversed(steps):
            try:
                report = self._load(step, state, strict=strict, checksums=checksums, trusted=trusted)
            except DamagedCheckpointError as error:
                self._warn_of_damage(step, error.problems)
            except FileNotFoundError as error:  # deleted since
                self._warn_of_damage(step, [str(error)])
            else:
                self._warn_of_misfits(step, report)
                return step
        if steps:
            raise DamagedCheckpointError(
                f"All checkpoints in {self._folder.path} are damaged: steps {steps}. Nothing was loaded."
            )
        return None

    def _load(self, step: int, state: State, **how: bool) -> LoadReport:
        path, group = self._folder.checkpoint(step), self._ranks.group
        return load(path, state, process_group=group, storage_options=self._options, **how)

    def _prepare_load(self) -> None:
        """Before a load."""

    def _warn_of_damage(self, step: int, found: list[str]) -> None:
        listed, path = "\n  ".join(found), self._folder.checkpoint(step)
        text = f"The checkpoint {path} is damaged and is passed over:\n  {listed}\nFalling back to the checkpoint before it."
        if self._ranks.is_first:
            logger.error(text)
            warnings.warn(text, RuntimeWarning, stacklevel=3)

    def _warn_of_misfits(self, step: int, report: LoadReport) -> None:
        if self._ranks.is_first and (report.missing or report.unexpected or report.mismatched):
            logger.warning(
                "%s does not fit the state, and was loaded in part. "
                "Missing in the checkpoint: %s. Not asked for: %s. Different: %s.",
                self._folder.checkpoint(step),
                *(list(names) or "none" for names in (report.missing, report.unexpected, report.mismatched)),
            )
