"""`WorkerStatus`: memory in which workers report counts and activity, and the trainer writes the current command's number."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rescale_data.sources.counts import COUNTER_INDICES, MADE_BATCHES

_TEXT_BYTES = 512


class WorkerStatus:
    """Memory shared by the trainer and its workers: counts and a text of each worker, and the number of the current command."""

    def __init__(self, num_workers: int) -> None:
        self._wanted_command_id = torch.zeros(1, dtype=torch.int64, device="cpu").share_memory_()
        self.counts = torch.zeros(num_workers, len(COUNTER_INDICES), dtype=torch.float64, device="cpu").share_memory_()
        self._activity_texts = torch.zeros(num_workers, _TEXT_BYTES, dtype=torch.uint8, device="cpu").share_memory_()

    @property
    def wanted_command_id(self) -> int:
        """The number of the `BeginCommand` that the trainer wants; workers stop making micro batches for any other."""
        return int(self._wanted_command_id.item())

    @wanted_command_id.setter
    def wanted_command_id(self, number: int) -> None:
        self._wanted_command_id.fill_(number)

    def counters(self, worker: int) -> Any:
        """Return the counters of a worker as a view of the shared memory: ``float64[len(FIELDS)]``."""
        return self.counts[worker].numpy()

    @property
    def num_made(self) -> int:
        """The number of micro batches that all workers together have made for the wanted `BeginCommand`."""
        return int(self.counts[:, MADE_BATCHES].sum())

    def write_activity(self, worker: int, text: str) -> None:
        """Write a text that says what a worker is doing; the text is empty unless the work takes long."""
        text_bytes = np.frombuffer(text.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0"), dtype=np.uint8)
        self._activity_texts[worker].numpy()[:] = text_bytes

    def read_activity(self, worker: int) -> str:
        return self._activity_texts[worker].numpy().tobytes().rstrip(b"\0").decode(errors="replace")
