"""The folder of a run for who only reads it: its checkpoints by step."""

from __future__ import annotations

from collections.abc import Iterator

from rescale_data.checkpoint.storage.claims import STEP, Claims, Save, find
from rescale_data.checkpoint.storage.commit import metrics_of
from rescale_data.checkpoint.storage.manifest import METADATA
from rescale_data.checkpoint.storage.store import Store, join, split


class RunFolder:
    """Checkpoints named ``step-<number>`` in one folder."""

    def __init__(self, store: Store, path: str) -> None:
        self.store = store
        self.path = path

    @classmethod
    def existing(cls, store: Store, path: str) -> RunFolder:
        """The folder of a run that holds anything, and is no checkpoint itself."""
        if not (names := store.names(path)):
            raise FileNotFoundError(
                f"No folder at {path}, or an empty one. Give the folder of a run, with step-100 and the like."
            )
        if METADATA in names or any(map(Save.of_manifest, names)):
            raise ValueError(f"{path} is a checkpoint itself; give the folder of the run, {split(path)[0]}.")
        return cls(store, path)

    def checkpoint(self, step: int) -> str:
        return join(self.path, f"step-{step}")

    def named(self) -> list[int]:
        """Steps that have a folder, with or without a checkpoint, in order: one listing."""
        return sorted(int(match[1]) for name in self.store.names(self.path) if (match := STEP.fullmatch(name)))

    def saves(self) -> Iterator[tuple[int, Save]]:
        """Steps that have a checkpoint, the newest first; each is listed when it is asked for."""
        named = self.named()
        claims = Claims.read(self.store, self.path) if named else Claims()
        for step in reversed(named):
            if save := find(self.store, self.checkpoint(step), claims):
                yield step, save

    def steps(self) -> list[int]:
        """Steps with a checkpoint, in order."""
        return sorted(step for step, _ in self.saves())

    def metrics(self) -> dict[int, dict[str, float]]:
        """Metrics by step; a damaged manifest counts as one without metrics."""
        return {step: metrics_of(self.store, self.checkpoint(step), save) for step, save in self.saves()}
