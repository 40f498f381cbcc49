"""How far a save, a check or a load is that takes long: a line in the log every few seconds."""

from __future__ import annotations

import logging
import time

logger = logging.getLogger(__name__)

EVERY = 5.0  # seconds


class Progress:
    """Counts bytes, and says now and then how many there are. What is done within seconds says nothing.

    Args:
        doing: "Saving /runs/step-100".
        total: Bytes in all, as far as they are known; more may come.
    """

    def __init__(self, doing: str, total: int = 0) -> None:
        self.doing, self.total, self.done = doing, total, 0
        self._said = time.monotonic()

    def add(self, num_bytes: int) -> None:
        """So many more are done."""
        self.done += num_bytes
        now = time.monotonic()
        if now - self._said >= EVERY:
            self._said = now
            logger.info(
                "%s: %.2f of %.2f GB on this rank.", self.doing, self.done / 1e9, max(self.done, self.total) / 1e9
            )
