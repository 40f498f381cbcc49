"""A process of the manager's own that writes data files, so that serializing takes nothing from the trainer's interpreter.

It is given tensors in shared memory and knows neither ranks nor plans: planning and committing stay with the trainer. It is
started without running the trainer's main module again, and ends when the trainer's end of the pipe does, however that comes.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.multiprocessing import reductions

from rescale_data.checkpoint.ranks import portable
from rescale_data.checkpoint.storage.commit import Workspace
from rescale_data.checkpoint.storage.store import Store, open_store
from rescale_data.checkpoint.storage.streams import FileRecord
from rescale_data.checkpoint.storage.writer import CheckpointWriter, SaveInfo

_START = "import sys; from rescale_data.checkpoint.writer_process import main; main(int(sys.argv[1]))"


@dataclass(frozen=True)
class Job:
    """The data files of one rank and one save."""

    workspace: Workspace
    storage_options: Mapping[str, Any] | None
    plan: SavePlan
    data: list[torch.Tensor | BytesIO]


class WriterProcess:
    """The trainer's end. A process that died is started anew by the next job."""

    def __init__(self) -> None:
        raise_file_limit()
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        self.start()

    def start(self) -> None:
        ours, theirs = socket.socketpair()
        # No accelerator in there: it would take memory that the trainer needs.
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=environment,
            stdin=subprocess.PIPE,
        )
        theirs.close()
        if self._process.stdin is not None:
            self._process.stdin.write(multiprocessing.current_process().authkey)
            self._process.stdin.close()
        self._pipe = Connection(ours.detach())

    def run(self, job: Job) -> tuple[list[WriteResult], dict[str, FileRecord]]:
        """Write the files; an error of the process is raised here."""
        if self._process is None or self._pipe is None or self._process.poll() is not None:
            self.start()
        process, pipe = self._process, self._pipe
        if process is None or pipe is None:
            raise RuntimeError("The writer process did not start.")
        try:
            pipe.send(job)
            outcome = pipe.recv()
        except (EOFError, OSError) as error:
            code = process.wait()
            raise RuntimeError(
                f"The writer process died with exit code {code}; the next save starts another."
            ) from error
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def close(self) -> None:
        if self._pipe is not None:
            # The end of a pipe would not do: a process that the trainer has forked keeps a copy of it open.
            with contextlib.suppress(OSError):
                self._pipe.send(None)
            self._pipe.close()
        if self._process is not None:
            self._process.wait()
        self._pipe = self._process = None


class ProcessWriter(CheckpointWriter):
    """A writer whose data files the writer process writes."""

    def __init__(
        self,
        store: Store,
        workspace: Workspace,
        info: SaveInfo,
        process: WriterProcess,
        storage_options: Mapping[str, Any] | None,
    ) -> None:
        super().__init__(store, workspace, info)
        self._process = process
        self._storage_options = storage_options

    def write_files(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        data = [planner.resolve_data(item) for item in plan.items]
        job = Job(
            self.workspace,
            self._storage_options,
            plan,
            [d.detach() if isinstance(d, torch.Tensor) else d for d in data],
        )
        results, self.fs.written = self._process.run(job)
        return results


class _Resolved(DefaultSavePlanner):
    """Hands out what the trainer's planner has resolved."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self._data: dict[MetadataIndex, Any] = {item.index: d for item, d in zip(job.plan.items, job.data, strict=True)}

    def resolve_data(self, write_item: WriteItem) -> Any:
        return self._data[write_item.index]


def main(descriptor: int) -> None:
    """Serve jobs until there is None, or the trainer's end closes."""
    reductions.init_reductions()
    multiprocessing.current_process().authkey = sys.stdin.buffer.read()
    raise_file_limit()
    torch.set_num_threads(1)
    # Where cores are short, training goes first.
    os.nice(10)
    # The manifest has a checksum of every file: torch's own, half of the work of writing, would be a second one.
    torch.serialization.set_crc32_options(False)
    pipe = Connection(descriptor)
    with contextlib.suppress(EOFError, KeyboardInterrupt, ConnectionError):
        while (job := pipe.recv()) is not None:
            pipe.send(_attempt(job))


def _attempt(job: Job) -> Any:
    try:
        store, _ = open_store(job.workspace.final, job.storage_options)
        writer = CheckpointWriter(store, job.workspace, SaveInfo())
        return writer.write_files(job.plan, _Resolved(job)), writer.fs.written
    except Exception as error:
        return portable(error)


def raise_file_limit() -> None:
    """Each tensor in shared memory is an open file: allow as many as the system lets this user have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
