"""Real gloo processes for tests of checkpoints: ranks whose results are compared, and ranks that are killed."""

import atexit
import contextlib
import multiprocessing
import os
import shutil
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.distributed.ranks import run_ranks

context = multiprocessing.get_context("forkserver")


def run(world_size: int, work: Callable[..., Any], *args: Any) -> list[Any]:
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        return run_ranks(world_size, Path(folder), work, *args)


def start(world_size: int, work: Callable[..., Any], *args: Any) -> list[Any]:
    """Start ranks of a gloo group that run ``work(*args)`` until they are killed, or fail since another one is."""
    folder = tempfile.mkdtemp(prefix="rendezvous-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    given = world_size, os.path.join(folder, "file"), work, args
    processes = [context.Process(target=_main, args=(rank, *given)) for rank in range(world_size)]
    for process in processes:
        process.start()
    return processes


def _main(rank: int, world_size: int, rendezvous: str, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", f"file://{rendezvous}", limit, world_size, rank)
    with contextlib.suppress(Exception):
        work(*args)
        dist.barrier()
        dist.destroy_process_group()
