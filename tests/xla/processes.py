"""Test bodies in processes of their own, since torch_xla settles its devices when it starts.

pytest ──jobs──► a server that has imported torch_xla (seconds) and started nothing of it ──fork──► one process a job
"""

from __future__ import annotations

import atexit
import faulthandler
import functools
import importlib
import multiprocessing
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
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
    """What ``body`` returns in another process; ``AssertionError`` with its output where it raises."""
    return _ask([Job(body.__module__, body.__name__, devices, devices > 0 and spmd, arguments)])[0]


def run_ranks(
    body: Callable[..., Any], world_size: int, folder: Path, /, *, devices: int = 0, **arguments: Any
) -> None:
    """Run ``body(rank=, world_size=, ...)`` in a gloo group of processes."""
    rendezvous = str(folder / f"rendezvous-{body.__name__}-{world_size}")
    ranks = [{**arguments, "rank": rank, "world_size": world_size} for rank in range(world_size)]
    _ask([Job(body.__module__, body.__name__, devices, devices > 0, given, rendezvous) for given in ranks])


@dataclass(frozen=True)
class Job:
    """A body to run, with the settings of its process."""

    module: str
    name: str
    devices: int
    spmd: bool
    arguments: dict[str, Any]
    rendezvous: str | None = None


def _ask(jobs: list[Job]) -> list[Any]:
    """Run jobs side by side; what they return."""
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        pickle.dump((folder, jobs), server.stdin)
        server.stdin.flush()
        exit_codes = pickle.load(server.stdout)
        outputs = [Path(folder, f"output-{number}").read_text(errors="replace") for number in range(len(jobs))]
        sys.stdout.write("".join(outputs))
        for code, output in zip(exit_codes, outputs, strict=True):
            assert code == 0, output[-6000:]
        return [pickle.loads(Path(folder, f"result-{number}").read_bytes()) for number in range(len(jobs))]


@functools.cache
def _server() -> subprocess.Popen[bytes]:
    settings = {"PJRT_DEVICE": "CPU", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    server = subprocess.Popen(
        [sys.executable, "-c", "from tests.xla.processes import serve; serve()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **settings},
        cwd=ROOT,
    )
    atexit.register(server.communicate)  # it ends with its input
    return server


def serve() -> None:
    """In the server: fork a process for each job of a request, and answer with their exit codes."""
    importlib.import_module("rescale_data.xla")
    importlib.import_module("tests.xla.training")
    context = multiprocessing.get_context("fork")
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)  # nobody else writes to the pipe
        while True:
            try:
                folder, jobs = pickle.load(sys.stdin.buffer)
            except EOFError:
                return
            processes = [context.Process(target=_do, args=(folder, number, job)) for number, job in enumerate(jobs)]
            for process in processes:
                process.start()
            for process in processes:
                process.join()
            pickle.dump([process.exitcode for process in processes], answers)
            answers.flush()


def _do(folder: str, number: int, job: Job) -> None:
    """In the forked process."""
    with Path(folder, f"output-{number}").open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    faulthandler.dump_traceback_later(_SECONDS, exit=True, file=sys.__stderr__)
    os.environ["CPU_NUM_DEVICES"] = str(job.devices)
    if job.spmd:
        import torch_xla.runtime as xr

        xr.use_spmd()
    arguments = dict(job.arguments)
    if job.rendezvous is not None:
        import torch.distributed as dist

        dist.init_process_group(
            "gloo", f"file://{job.rendezvous}", rank=arguments["rank"], world_size=arguments["world_size"]
        )
    body = getattr(importlib.import_module(job.module), job.name)
    result = getattr(body, "body", body)(**arguments)
    if job.rendezvous is not None:
        dist.destroy_process_group()
    Path(folder, f"result-{number}").write_bytes(pickle.dumps(result))
