"""Functions for rank processes, in a module that imports little, so that they start quickly."""

import os
import signal
import time


def fail_on_rank_1(rank: int, how: str) -> None:
    """Rank 1 raises or is killed; the others would take a minute."""
    if rank == 1 and how == "raise":
        raise ValueError("no such luck")
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
