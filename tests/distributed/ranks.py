"""A function on W ranks: real processes of one gloo group, which never outlive the test."""

import pickle
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

SECONDS = 90.0
"""What the ranks of one call may take."""


def run_ranks(world_size: int, folder: Path, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Run ``function(*args)`` on each rank of a process group.

    If one rank fails the others are killed, and the error holds its traceback.

    Args:
        function: Of a module, so that a rank can import it.

    Returns:
        What it returned, by rank; `None` for a rank that ended before it returned, but without an error.
    """
    own = Path(tempfile.mkdtemp(dir=folder))
    started = start_processes(_rank, (world_size, own, function, args), world_size, False, start_method="forkserver")
    deadline = time.monotonic() + SECONDS
    try:
        while not started.join(timeout=1.0):
            assert time.monotonic() < deadline, f"{world_size} ranks have not ended {function} after {SECONDS} s"
    finally:
        for process in started.processes:
            process.kill()
    files = [own / str(rank) for rank in range(world_size)]
    return [pickle.loads(file.read_bytes()) if file.exists() else None for file in files]


def _rank(rank: int, world_size: int, own: Path, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{own}/rendezvous", rank=rank, world_size=world_size)
    try:
        result = function(*args)
    except BaseException as failure:
        if isinstance(failure, Exception):
            raise
        raise RuntimeError(
            str(failure)
        ) from failure  # DCP's and pytest's failures would end the process without a word
    (own / str(rank)).write_bytes(pickle.dumps(result))
    dist.destroy_process_group()
