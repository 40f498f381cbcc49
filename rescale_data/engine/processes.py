"""Starts and ends worker processes, sends commands to them, receives their messages, and notices when one dies.

    trainer                 thread of WorkerProcesses              worker
    begin(run) ──────wake─► sends the command once the  ──pipe──►  makes messages, while slabs are free
    run.inboxes[i] ◄─────── worker has answered the one  ◄─pipe──  number and message; number and None: idle
    free[i].release() ────────────────────────────────semaphore─►  one more slab is free

One thread alone starts the workers and uses the pipes, so Ctrl-C never leaves half a process or half a message. Both
directions carry less than 4 kB at a time: larger values lie in shared memory. Nothing is sent to a worker that may be within a
read. So neither side blocks in a send.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
import threading
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.context import BaseContext
from multiprocessing.reduction import ForkingPickler
from typing import Any

from rescale_data.engine.message import Inbox, to_bytes
from rescale_data.engine.threads import WaitableFlag
from rescale_data.engine.workers import BeginCommand, Worker, WorkerStatus
from rescale_data.sources.decoded.cache import share_budget_with

PRELOADED = ["rescale_data.engine.workers"]
"""Modules that the fork server imports once, before it forks the first worker: code that all workers need, and no data."""
# The fork server also imports what the trainer has imported of these: pyarrow takes half a second.
_PIPELINE_MODULES = ("rescale_data.nodes.", "rescale_data.sources.")
_GRACE_SECONDS = 5.0  # time for a worker to end by itself


class WorkerRun:
    """The work of the worker processes for one `BeginCommand`, and an inbox for the messages of each.

    Args:
        begin: The command to the workers; `None` ends them.
        pin_memory: True if batches are to arrive in page-locked memory.
    """

    def __init__(self, begin: BeginCommand | None, num_workers: int, *, pin_memory: bool = False) -> None:
        self.command_id = -1 if begin is None else begin.command_id
        self.packed_command = None
        if begin is not None:
            packed_bytes, start = to_bytes(begin)
            self.packed_command = packed_bytes.share_memory_(), start
        self.inboxes = [Inbox(pin_memory) for _ in range(num_workers)]


class WorkerProcesses:
    """K worker processes, and the thread of the trainer's process that communicates with them.

    Args:
        seed: The seed of random numbers that the user's functions draw in workers.

    Attributes:
        free_slabs: A semaphore for each worker, released when one of its slabs may be written again.
        failure: The error after a worker has died, or has not started; `None` before.
    """

    def __init__(self, context: BaseContext, worker: Worker, num_workers: int, seed: list[int]) -> None:
        self.status = WorkerStatus(num_workers)
        self.failure: Exception | None = None
        self._num_workers, self._trainer_pid = num_workers, os.getpid()
        self.free_slabs = [context.Semaphore(0) for _ in range(num_workers)]
        self._worker_run: WorkerRun | None = None
        self._wake_reader, self._wake_writer = Pipe(duplex=False)
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        self._started_flag = WaitableFlag()
        args = context, worker, seed
        self._thread = threading.Thread(target=self._run_thread, args=args, daemon=True, name="rescale_data-workers")

    def wait_started(self) -> None:
        """Start the workers unless they were started before, and wait for them, or raise the error of their start.

        Ctrl-C leaves the start undisturbed.
        """
        if self._thread.ident is None:
            self._thread.start()
        self._started_flag.wait()
        if self.failure is not None:
            raise self.failure

    def begin(self, run: WorkerRun) -> None:
        """Make the workers drop their current work, and begin another one."""
        if os.getpid() != self._trainer_pid:
            raise RuntimeError(
                f"The worker processes are those of process {self._trainer_pid}, of which this one is a fork. Make another "
                f"loader here, and load the state into it."
            )
        self.status.wanted_command_id = run.command_id
        self._worker_run = run
        self._send_failure()
        self._wake_writer.send_bytes(b".")

    def end(self, seconds: float = _GRACE_SECONDS) -> None:
        """End the worker processes; kill them if they do not end within `seconds`.

        Args:
            seconds: Time for the workers to end by themselves, before they are killed.
        """
        # A forked process has no thread, and the workers are its parent's
        if os.getpid() != self._trainer_pid or not self._thread.is_alive():
            return
        self.begin(WorkerRun(None, self._num_workers))
        if threading.current_thread() is self._thread:  # that thread collects garbage, and ends the workers itself
            return
        self._thread.join(seconds)
        if self._thread.is_alive():
            for process in self._processes:
                process.kill()
            self._thread.join()

    # The thread

    def _run_thread(self, context: BaseContext, worker: Worker, seed: list[int]) -> None:
        """Start the workers, and communicate with them; in the main thread Ctrl-C within a start breaks the fork server."""
        try:
            self._start_processes(context, worker, seed)
        except Exception as error:
            self.failure = error
            for process in self._processes:
                process.kill()
                process.join()
        self._started_flag.set()
        if self.failure is None:
            self._communicate()

    def _start_processes(self, context: BaseContext, worker: Worker, seed: list[int]) -> None:
        for index in range(self._num_workers):
            if self.status.wanted_command_id < 0:  # `end` was called
                break
            trainer_pipe, worker_pipe = context.Pipe()
            args = (index, self._num_workers, worker_pipe, self.free_slabs[index], self.status, [*seed, index])
            process: Any = context.Process(  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
                target=worker.run, args=args, daemon=True, name=f"rescale_data-worker-{index}"
            )
            process.start()
            worker_pipe.close()
            self._pipes.append(trainer_pipe)
            self._processes.append(process)
        share_budget_with(id(self), self._num_workers)

    def _communicate(self) -> None:
        live_workers = {process.sentinel: worker_index for worker_index, process in enumerate(self._processes)}
        open_pipes = {pipe: worker_index for worker_index, pipe in enumerate(self._pipes)}
        idle_workers, workers_to_begin, last_sent_run = set(live_workers.values()), set[int](), None
        while live_workers:
            ready_handles = wait([self._wake_reader, *open_pipes, *live_workers])
            if self._wake_reader in ready_handles:
                self._wake_reader.recv_bytes()
            dead_workers = [live_workers.pop(sentinel) for sentinel in list(live_workers) if sentinel in ready_handles]
            for pipe, worker_index in list(open_pipes.items()):
                while (pipe in ready_handles or worker_index in dead_workers) and pipe.poll():
                    if not self._receive(pipe, worker_index, idle_workers):
                        del open_pipes[pipe]
                        break
            for worker_index in dead_workers:
                self._processes[worker_index].join()
                self._report_dead_worker(worker_index, f"exit code {self._processes[worker_index].exitcode}")
            if self._worker_run is not last_sent_run:
                last_sent_run, workers_to_begin = self._worker_run, set(live_workers.values())
                for worker_index in workers_to_begin - idle_workers:
                    self.free_slabs[worker_index].release()  # a worker that waits for a slab then looks at the status
            for worker_index in workers_to_begin & idle_workers:
                with suppress(OSError):  # the worker is dying, which its sentinel shows later
                    self._pipes[worker_index].send(last_sent_run and last_sent_run.packed_command)
            workers_to_begin, idle_workers = workers_to_begin - idle_workers, idle_workers - workers_to_begin
        share_budget_with(id(self), 0)

    def _receive(self, pipe: Connection, worker_index: int, idle_workers: set[int]) -> bool:
        """Receive one message from a worker; return False at the end of the pipe.

        A message of earlier work is opened, too, so that its memory is closed; then it is dropped.
        """
        try:
            message_bytes = pipe.recv_bytes()
        except (EOFError, OSError):
            return False
        try:
            command_id, message = pickle.loads(message_bytes)
        except Exception as error:  # its memory cannot be mapped here: no file descriptor is left, or the worker died
            self._report_dead_worker(worker_index, f"the memory of its message is lost, {error!r}")
            return True
        if message is None:
            idle_workers.add(worker_index)
        elif self._worker_run is not None and command_id == self._worker_run.command_id:
            self._worker_run.inboxes[worker_index].messages.put(message)
        return True

    def _report_dead_worker(self, number: int, reason: str) -> None:
        self.failure = RuntimeError(
            f"A worker process exited unexpectedly (worker {number}: {reason}). If none ever started, the script needs an `if "
            f"__name__ == '__main__':` guard, because workers import it; else look for its traceback above, or for a process "
            f"killed for want of memory: -9 of all, -7 of shared memory (/dev/shm)."
        )
        self._send_failure()

    def _send_failure(self) -> None:
        if self.failure is not None and self._worker_run is not None:
            for inbox in self._worker_run.inboxes:
                inbox.messages.put(self.failure)


# Before they start


def multiprocessing_context(argument: str | BaseContext) -> BaseContext:
    """Return the multiprocessing context for the start method or the context that the user gave."""
    allowed = multiprocessing.get_all_start_methods()
    if argument not in allowed and not isinstance(argument, BaseContext):
        raise ValueError(f"multiprocessing_context={argument!r}: give one of {allowed}, or a multiprocessing context.")
    if argument == "forkserver":
        used_modules = sorted(name for name in sys.modules if name.startswith(_PIPELINE_MODULES))
        multiprocessing.set_forkserver_preload([*PRELOADED, *used_modules, "__main__"])  # no effect if the server runs
        forkserver.ensure_running()  # the server imports torch while the trainer builds its model
    return multiprocessing.get_context(argument) if isinstance(argument, str) else argument


def require_pickle(worker: object, **argument: object) -> None:
    """Raise ``TypeError`` if the pipeline or a function cannot be pickled for workers; the message names remedies."""
    remedy = (
        "Make the pipeline a module-level function, functools.partial(pipeline, source) of one, guard the script with "
        "`if __name__ == '__main__':`, or use num_workers=0, which gives the same batches wherever the case is aligned."
    )
    try:
        ForkingPickler.dumps((worker, argument))
    except Exception as error:
        raise TypeError(
            f"With num_workers > 0 the {', '.join(argument)} must pickle, and do not: {error}. {remedy}"
        ) from error
    for name, value in argument.items():
        if getattr(value, "__module__", None) == "__main__" and not hasattr(sys.modules["__main__"], "__file__"):
            raise TypeError(f"Worker processes cannot import the {name} from an interactive session. {remedy}")
