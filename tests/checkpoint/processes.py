"""Real gloo processes for tests: started from a server that has torch imported already, joined with a time limit."""

from __future__ import annotations

import atexit
import faulthandler
import multiprocessing
import os
import pickle
import shutil
import tempfile
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

LIMIT = 90.0
context = multiprocessing.get_context("forkserver")


def join_group(rank: int, world_size: int, rendezvous: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size, timeout=timedelta(seconds=60)
    )


def _main(
    rank: int, world_size: int, rendezvous: str, out: Connection, work: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    faulthandler.enable()  # says where, if torch ends the process
    try:
        join_group(rank, world_size, rendezvous)
        # Plain bytes: a tensor sent as shared memory is gone when its process ends before it is read.
        out.send_bytes(pickle.dumps((True, work(*args))))
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
    except BaseException:
        out.send_bytes(pickle.dumps((False, traceback.format_exc())))


def start(world_size: int, work: Callable[..., Any], *args: Any) -> tuple[list[Any], list[Connection]]:
    """Processes and the ends of their pipes."""
    folder = tempfile.mkdtemp(prefix="rendezvous-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    rendezvous = os.path.join(folder, "file")
    processes, ends = [], []
    for rank in range(world_size):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_main, args=(rank, world_size, rendezvous, theirs, work, args))
        process.start()
        theirs.close()
        processes.append(process)
        ends.append(ours)
    return processes, ends


def run(world_size: int, work: Callable[..., Any], *args: Any) -> list[Any]:
    """What ``work(*args)`` returns on each rank of a gloo group; the first traceback where one fails."""
    processes, ends = start(world_size, work, *args)
    results: dict[int, Any] = {}
    try:
        while len(results) < world_size:
            ready = wait([end for rank, end in enumerate(ends) if rank not in results], timeout=LIMIT)
            assert ready, f"ranks {sorted(set(range(world_size)) - set(results))} hang"
            for end in ready:
                rank = ends.index(end)
                ok, results[rank] = _receive(end, processes[rank])
                assert ok, f"rank {rank}:\n{results[rank]}"
        for process in processes:
            process.join(LIMIT)
    finally:
        for process in processes:
            process.kill()
            process.join()
    return [results[rank] for rank in range(world_size)]


def _receive(end: Connection, process: Any) -> tuple[bool, Any]:
    try:
        return pickle.loads(end.recv_bytes())
    except EOFError:
        process.join(LIMIT)
        return False, f"died with {process.exitcode}"
