"""A function on W ranks: real processes of one gloo group, which never outlive the test."""

import pickle
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

SECONDS = 240.0
"""What the ranks of one call may take."""


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any, forks: bool = False) -> list[Any]:
    """Run ``function(*args)`` on each rank of a process group.

    If one rank fails the others are killed, and the error holds its traceback.

    Args:
        function: Of a module, so that a rank can import it.
        forks: Whether ranks fork: a store in a file counts who uses it, and is gone with the first child that ends.

    Returns:
        What it returned, by rank; `None` for a rank that ended before it returned, but without an error.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if forks else None
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        given = (world_size, folder, store and store.port, function, args)
        started = start_processes(_rank, given, world_size, False, start_method="forkserver")
        deadline = time.monotonic() + SECONDS
        try:
            while not started.join(timeout=1.0):
                assert time.monotonic() < deadline, f"{world_size} ranks have not ended {function} after {SECONDS} s"
        finally:
            for process in started.processes:
                process.kill()
        files = [Path(folder, str(rank)) for rank in range(world_size)]
        return [pickle.loads(file.read_bytes()) if file.exists() else None for file in files]


def fails(words: str, call: Callable[..., Any], *args: Any, kind: Any = BaseException, **kwargs: Any) -> None:
    """Assert that a call raises an error of a kind that says so."""
    with pytest.raises(kind, match=words):
        call(*args, **kwargs)


def gathered(value: Any) -> list[Any]:
    """Return the value of each rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _rank(rank: int, world_size: int, folder: str, port: int | None, function: Callable[..., Any], args: Any) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/rendezvous", world_size) if port is None else dist.TCPStore("127.0.0.1", port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    try:
        result = function(*args)
    except BaseException as failure:
        if isinstance(failure, Exception):
            raise
        raise RuntimeError(str(failure)) from failure  # DCP's and pytest's would end the process without a word
    Path(folder, str(rank)).write_bytes(pickle.dumps(result))
    dist.destroy_process_group()
