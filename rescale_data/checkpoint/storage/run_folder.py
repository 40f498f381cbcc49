"""`RunFolder`: lists the checkpoints in a run's folder, by step."""

from __future__ import annotations

from collections.abc import Iterator

from rescale_data.checkpoint.storage.claims import STEP_PATTERN, Claims, SaveId, find_save
from rescale_data.checkpoint.storage.commit import metrics_of
from rescale_data.checkpoint.storage.manifest import METADATA
from rescale_data.checkpoint.storage.store import Store, join, split


class RunFolder:
    """A run's folder, which holds checkpoints named ``step-<number>``."""

    def __init__(self, store: Store, path: str) -> None:
        self.store = store
        self.path = path

    @classmethod
    def open_existing(cls, store: Store, path: str) -> RunFolder:
        """Return the run folder at ``path``; raise an error if it is missing, empty or a checkpoint itself."""
        if not (names := store.names(path)):
            raise FileNotFoundError(
                f"No folder at {path}, or an empty one. Give the folder of a run, with step-100 and the like."
            )
        if METADATA in names or any(map(SaveId.from_manifest, names)):
            raise ValueError(f"{path} is a checkpoint itself; give the folder of the run, {split(path)[0]}.")
        return cls(store, path)

    def checkpoint_path(self, step: int) -> str:
        return join(self.path, f"step-{step}")

    def steps_with_folder(self) -> list[int]:
        """Return the training steps that have a folder ``step-<number>``, with or without a checkpoint, in order."""
        return sorted(int(match[1]) for name in self.store.names(self.path) if (match := STEP_PATTERN.fullmatch(name)))

    def saves(self) -> Iterator[tuple[int, SaveId]]:
        """Yield ``(step, save)`` for each step that has a checkpoint, the newest first."""
        steps = self.steps_with_folder()
        run_claims = Claims.read(self.store, self.path) if steps else Claims()
        for step in reversed(steps):
            if save := find_save(self.store, self.checkpoint_path(step), run_claims):
                yield step, save

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, in order."""
        return sorted(step for step, _ in self.saves())

    def metrics(self) -> dict[int, dict[str, float]]:
        """Return the metrics of each checkpoint by step; none for a damaged manifest."""
        return {step: metrics_of(self.store, self.checkpoint_path(step), save) for step, save in self.saves()}
