"""Test bodies in processes of their own, since torch_xla settles its devices when it starts.

pytest ──► a fork server that has imported torch_xla (seconds) and started nothing of it ──fork──► one process a job
"""

import faulthandler
import functools
import importlib
import multiprocessing
import os
import pickle
import sys
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
needs_torch_xla = pytest.mark.skipif(
    find_spec("torch_xla") is None, reason="torch_xla is not installed (constraints-xla.txt)"
)
_SECONDS = 240


def on_devices(count: int, *, spmd: bool = True) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run the body of a test in a process with ``count`` XLA devices (CPU)."""

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @needs_torch_xla
        @functools.wraps(body)
        def test(**fixtures: Any) -> None:
            run(body, devices=count, spmd=spmd, **fixtures)

        test.body = body  # type: ignore[attr-defined]
        return test

    return decorate


def run(body: Callable[..., Any], *, devices: int = 0, spmd: bool = True, **arguments: Any) -> Any:
    """Return what ``body`` returns in another process; raise ``AssertionError`` with its output where it raises."""
    return _run(body, [arguments], devices, spmd)[0]


def run_ranks(
    body: Callable[..., Any], world_size: int, folder: Path, /, *, devices: int = 0, **arguments: Any
) -> list[Any]:
    """Run ``body(rank=, world_size=, ...)`` in a gloo group of processes, and return the result of each rank."""
    ranks = [{**arguments, "rank": rank, "world_size": world_size} for rank in range(world_size)]
    return _run(body, ranks, devices, True, f"{folder}/rendezvous-{body.__name__}-{world_size}")


def _run(
    body: Callable[..., Any], calls: list[dict[str, Any]], devices: int, spmd: bool, rendezvous: str = ""
) -> list[Any]:
    os.environ["PJRT_DEVICE"] = "CPU"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["rescale_data.xla", "tests.xla.training"])
    where = body.__module__, body.__name__, devices, devices > 0 and spmd, rendezvous
    with tempfile.TemporaryDirectory() as folder:
        paths = [f"{folder}/{number}" for number in range(len(calls))]
        processes = [context.Process(target=_do, args=(*pair, *where)) for pair in zip(paths, calls, strict=True)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        for process, path in zip(processes, paths, strict=True):
            output = Path(f"{path}-output").read_text(errors="replace")
            sys.stdout.write(output)
            assert process.exitcode == 0, output[-6000:]
        return [pickle.loads(Path(path).read_bytes()) for path in paths]


def _do(
    path: str, arguments: dict[str, Any], module: str, name: str, devices: int, spmd: bool, rendezvous: str
) -> None:
    with Path(f"{path}-output").open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    faulthandler.dump_traceback_later(_SECONDS, exit=True, file=sys.__stderr__)
    os.environ["CPU_NUM_DEVICES"] = str(devices)
    if spmd:
        import torch_xla.runtime as xr

        xr.use_spmd()
    if rendezvous:
        import torch.distributed as dist

        rank = {"rank": arguments["rank"], "world_size": arguments["world_size"]}
        dist.init_process_group("gloo", f"file://{rendezvous}", **rank)
    body = getattr(importlib.import_module(module), name)
    result = getattr(body, "body", body)(**arguments)
    if rendezvous:
        dist.destroy_process_group()
    Path(path).write_bytes(pickle.dumps(result))
