"""Worker processes as such: how they start, tell what they are about, end when the trainer's has, and are seen to have died."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import wait
from multiprocessing.context import BaseContext
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch

from rescale_data.sources.counts import FIELDS, MADE

PRELOAD = ["rescale_data.engine.workers"]
"""What the fork server imports, once, before it forks the first worker: whatever all workers need, and no data."""
_OF_PIPELINES = (
    "rescale_data.nodes.",
    "rescale_data.sources.",
)  # of these, what the trainer has: pyarrow is half a second
LOOK_SECONDS = 1.0
"""So often is looked whether workers live."""
_TEXT_BYTES = 512


def context_of(given: str | BaseContext) -> BaseContext:
    known = multiprocessing.get_all_start_methods()
    if given not in known and not isinstance(given, BaseContext):
        raise ValueError(f"multiprocessing_context={given!r}: give one of {known}, or a multiprocessing context.")
    if given == "forkserver":
        loaded = sorted(name for name in sys.modules if name.startswith(_OF_PIPELINES))
        multiprocessing.set_forkserver_preload([*PRELOAD, *loaded, "__main__"])  # of no effect where the server runs
    return multiprocessing.get_context(given) if isinstance(given, str) else given


def begin_worker(init_fn: Callable[[int], object] | None, number: int) -> None:
    """In a worker, before all else: end when the trainer's process has ended, however it did; then what the user wants.

    Torch's own look is for the process that forked the worker: the fork server, which for its part lives while workers do.
    """
    trainer = multiprocessing.parent_process()
    if trainer is not None:
        threading.Thread(target=_end_after, args=(trainer,), daemon=True).start()
    if init_fn is not None:
        init_fn(number)


def _end_after(trainer: Any) -> None:
    while not wait([trainer.sentinel], LOOK_SECONDS) and _lives(trainer.pid):
        pass
    os._exit(1)


def _lives(pid: int) -> bool:
    """Processes that the trainer forked may hold its end of the sentinel open."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def require_pickle(worker: object, **given: object) -> None:
    """``TypeError`` where workers could not be given the pipeline and the functions, naming the cures."""
    cures = (
        "Make the pipeline a module-level function, functools.partial(pipeline, source) of one, guard the script with "
        "`if __name__ == '__main__':`, or use num_workers=0, which gives the same batches wherever the case is aligned."
    )
    try:
        ForkingPickler.dumps((worker, given))
    except Exception as error:
        raise TypeError(
            f"With num_workers > 0 the {', '.join(given)} must pickle, and do not: {error}. {cures}"
        ) from error
    for name, value in given.items():
        if getattr(value, "__module__", None) == "__main__" and not hasattr(sys.modules["__main__"], "__file__"):
            raise TypeError(f"Worker processes cannot import the {name} from an interactive session. {cures}")


def is_timeout(error: BaseException) -> bool:
    return "DataLoader timed out" in str(error)


def is_death(error: BaseException) -> bool:
    """Whether a worker is gone. Torch says so, unless it was about to fetch the memory of a message from that worker."""
    raised_in_worker = "in DataLoader worker process" in str(error)
    return "exited unexpectedly" in str(error) or (
        isinstance(error, ConnectionError | EOFError | FileNotFoundError) and not raised_in_worker
    )


class Board:
    """Memory that the trainer and its workers see: a line of counts and one of text for each worker, and the wanted leg."""

    def __init__(self, num_workers: int) -> None:
        self._leg = torch.zeros(1, dtype=torch.int64, device="cpu").share_memory_()
        self.counts = torch.zeros(num_workers, len(FIELDS), dtype=torch.float64, device="cpu").share_memory_()
        self._texts = torch.zeros(num_workers, _TEXT_BYTES, dtype=torch.uint8, device="cpu").share_memory_()

    @property
    def leg(self) -> int:
        """The number of the wanted leg: workers drop commands of other legs."""
        return int(self._leg.item())

    @leg.setter
    def leg(self, number: int) -> None:
        self._leg.fill_(number)

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
