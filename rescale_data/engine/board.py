"""`Board`: what worker processes tell the trainer's without a message, in memory that both see."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rescale_data.sources.counts import FIELDS, MADE

_TEXT_BYTES = 512


class Board:
    """A line of counts and a line of text for each worker."""

    def __init__(self, num_workers: int) -> None:
        self.counts = torch.zeros(num_workers, len(FIELDS), dtype=torch.float64, device="cpu").share_memory_()
        self._texts = torch.zeros(num_workers, _TEXT_BYTES, dtype=torch.uint8, device="cpu").share_memory_()

    def line(self, worker: int) -> Any:
        """``float64[FIELDS]``, a view."""
        return self.counts[worker].numpy()

    @property
    def made(self) -> int:
        return int(self.counts[:, MADE].sum())

    def write(self, worker: int, text: str) -> None:
        data = np.frombuffer(text.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0"), dtype=np.uint8)
        self._texts[worker].numpy()[:] = data

    def read(self, worker: int) -> str:
        return self._texts[worker].numpy().tobytes().rstrip(b"\0").decode(errors="replace")
