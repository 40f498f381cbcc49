"""Elastic `torchrun` agents on this machine, and what their workers say after each step."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
from collections import defaultdict
from dataclasses import dataclass, field
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist

PATIENCE = 240  # seconds without a word from any worker
RENDEZVOUS = "is_host=false,join_timeout=300,last_call_timeout=4,keep_alive_interval=2,keep_alive_max_attempt=5"
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""The second: torch 2.9 to 2.14 keep the address of the first meeting's store, which an agent that joins later never learns."""


class Line:
    """A worker's line to the watcher: says what a step has trained, and waits until the run may go on."""

    def __init__(self, folder: str) -> None:
        meeting: list[Any] = [os.urandom(8).hex()]  # one name for all ranks that have met
        dist.broadcast_object_list(meeting)
        self._connection = Client(f"{folder}/watcher")
        self._connection.send((meeting[0], dist.get_world_size(), dist.get_rank(), os.getpid(), os.getppid()))

    def report(self, step: int, rows: list[int]) -> None:
        self._connection.send((step, rows))
        self._connection.recv()


@dataclass(eq=False)
class Meeting:
    """The ranks between two rendezvous."""

    world_size: int
    lines: dict[int, Connection] = field(default_factory=dict)
    pids: dict[int, tuple[int, int]] = field(default_factory=dict)
    rows: dict[int, dict[int, list[int]]] = field(default_factory=lambda: defaultdict(dict))

    def global_batch(self, step: int) -> list[int] | None:
        """The rows of a step in the order of the ranks, when all of them have trained it."""
        parts = self.rows[step]
        return (
            [row for rank in range(self.world_size) for row in parts[rank]] if len(parts) == self.world_size else None
        )

    def go_on(self) -> None:
        for line in self.lines.values():
            with contextlib.suppress(OSError):  # that worker is gone
                line.send(None)


class Watcher:
    """Starts and kills agents, lets their workers go on, and hears what each step has trained.

    The agents meet in a store of the watcher's, for a store that one of them hosts ends with that agent.
    """

    def __init__(self, script: str, folder: str) -> None:
        self._script, self._folder = script, folder
        self._agents: list[subprocess.Popen[bytes]] = []
        self._meetings: dict[str, Meeting] = {}
        self._said: queue.SimpleQueue[tuple[Meeting, int, int, list[int]]] = queue.SimpleQueue()
        self._listener = Listener(f"{folder}/watcher")
        threading.Thread(target=self._accept, daemon=True).start()
        self._store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)

    def __enter__(self) -> Watcher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        for agent in self._agents:
            if agent.poll() is None:
                agent.terminate()
        for agent in self._agents:
            agent.wait()
        self._listener.close()

    def start_agents(self, number: int) -> None:
        for _ in range(number):
            command = [
                sys.executable, "-m", "torch.distributed.run", "--nnodes=2:6", "--nproc-per-node=1", "--max-restarts=10",
                "--monitor-interval=0.5", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{self._store.port}",
                f"--rdzv-conf={RENDEZVOUS}", "--rdzv-id=example", self._script, self._folder,
            ]  # fmt: skip
            environment = {**os.environ, **ENVIRONMENT}
            with open(f"{self._folder}/agent{len(self._agents)}.log", "wb") as log:
                self._agents.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment))

    def watch(self, world_size: int, stop: int) -> tuple[Meeting, dict[int, list[int]]]:
        """Let ``world_size`` ranks train up to the step before ``stop``; then they wait. Others wait at once.

        Returns:
            The meeting, and the global batch of each step that it trained.
        """
        batches: dict[int, list[int]] = {}
        while True:
            meeting, rank, step, rows = self._hear()
            meeting.rows[step][rank] = rows
            batch = meeting.global_batch(step)
            if meeting.world_size != world_size or batch is None:
                continue
            batches[step] = batch
            if step + 1 == stop:
                return meeting, batches
            meeting.go_on()

    def kill(self, meeting: Meeting) -> None:
        """`kill -9` for an agent and its worker."""
        worker, agent = meeting.pids[0]
        for pid in (agent, worker):
            os.kill(pid, signal.SIGKILL)
        meeting.go_on()  # the others find that one is missing

    def finish(self, meeting: Meeting) -> list[int]:
        """Let the last ranks end; the exit codes of all agents, negative where a signal ended one."""
        meeting.go_on()
        return [agent.wait(PATIENCE) for agent in self._agents]

    def _hear(self) -> tuple[Meeting, int, int, list[int]]:
        try:
            return self._said.get(timeout=PATIENCE)
        except queue.Empty:
            last = "".join(Path(f"{self._folder}/agent{i}.log").read_text()[-3000:] for i in range(len(self._agents)))
            raise TimeoutError(f"no worker has said anything for {PATIENCE} s. The agents say:\n{last}") from None

    def _accept(self) -> None:
        while True:
            try:
                line = self._listener.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._read, args=(line,), daemon=True).start()

    def _read(self, line: Connection) -> None:
        try:
            name, world_size, rank, worker, agent = line.recv()
            meeting = self._meetings.setdefault(name, Meeting(world_size))
            meeting.lines[rank], meeting.pids[rank] = line, (worker, agent)
            while True:
                step, rows = line.recv()
                self._said.put((meeting, rank, step, rows))
        except (EOFError, OSError):
            return  # the worker has ended, or was killed
