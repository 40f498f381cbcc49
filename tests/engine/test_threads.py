"""Background threads: tasks in their order, and an end with the interpreter while a read hangs, and after Ctrl-C.

With the loader that has them: `tests.test_ahead`; that threads stay as few as they are: law 9.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

import rescale_data as rd
from rescale_data.engine.exchanges import STATUS_STOPPED, Exchanges
from rescale_data.engine.feed import BatchFeed, FunctionFeed, InThreadFeed
from rescale_data.engine.micro_batch import MicroBatch
from rescale_data.engine.ranks.ranks import Ranks
from rescale_data.engine.runner import NoSamplesLeft
from rescale_data.engine.segment import EpochSegment
from rescale_data.engine.threads import WaitableFlag
from rescale_data.state import Ints
from tests.test_interrupt import CtrlC

HANGS = """
import threading
import rescale_data as rd

reads = threading.Event()

class Rows:
    def __len__(self):
        return 8

    def __getitem__(self, row):
        if row == 3:
            reads.set()
            threading.Event().wait()
        return row

loader = rd.DataLoader(Rows(), shuffle=False, global_batch_size=1, prefetch=4)
next(iter(loader))
reads.wait()
print("ends")
"""


ENDS = """
from rescale_data.engine.threads import TaskThread, call_at_exit

class Owner:
    def __init__(self, name):
        self.name, self.thread = name, TaskThread("test")
        call_at_exit(self, lambda owner: owner.thread.put(lambda: print(owner.name)))

lives = Owner("lives")
Owner("is gone")
"""


@pytest.mark.parametrize(("program", "printed"), [(HANGS, "ends\n"), (ENDS, "lives\n")], ids=["hangs", "ends"])
def test_a_read_that_hangs_keeps_no_process_alive_and_a_call_at_exit_comes_before_threads_end(
    program: str, printed: str
) -> None:
    """The latter as balanced steps need it, which then tell the other ranks."""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, printed, "")


class OneOfTwo:
    """The processes of two ranks, of which the other one sends what this one does."""

    def __init__(self) -> None:
        self.statuses: list[int] = []

    def begin_gather(self, call: Any, numbers: Ints) -> Callable[[], Ints]:
        del call
        self.statuses.append(int(numbers[0, 0]))
        return lambda: np.stack([numbers, numbers])


@pytest.mark.parametrize("moment", range(1, 12))
def test_ctrl_c_within_stop_leaves_the_other_ranks_informed(moment: int) -> None:
    """The rank informs them once, now or when it is closed, wherever in `Exchanges.stop` Ctrl-C has come."""
    others = OneOfTwo()
    group = Ranks(0, 2, cast(Any, others))
    ranks = cast(Any, SimpleNamespace(rank=0, timeout=60.0, loader=1))
    exchanges = Exchanges(ranks, group, group, 1, None)
    with suppress(KeyboardInterrupt), CtrlC(moment).pressed():
        exchanges.stop()
    exchanges.close()
    assert others.statuses == [STATUS_STOPPED]


class WaitsForOthers(BatchFeed):
    """A feed whose `next` waits for other ranks, until it is stopped."""

    def __init__(self) -> None:
        self.begun, self.stopped = WaitableFlag(), WaitableFlag()

    def begin(self, segment: EpochSegment, table: Ints, first_batch: int) -> None:
        self.stopped = WaitableFlag()

    def next(self) -> MicroBatch:
        self.begun.set()
        self.stopped.wait()
        raise NoSamplesLeft

    def stop(self, *, wait: bool = True) -> None:
        self.stopped.set()


def test_a_thread_ahead_that_waits_for_other_ranks_is_stopped_at_once() -> None:
    loader = rd.DataLoader(list(range(8)), global_batch_size=2, balance=rd.Balance(cost=lambda row: row, over="rank"))
    segment, below = EpochSegment(loader._stream.layout, 0, None), WaitsForOthers()
    ahead = InThreadFeed(FunctionFeed(below, list), 1)
    ahead.begin(segment, loader._stream.table, 0)
    below.begun.wait()
    ahead.stop()  # or it would wait for ever
    balanced: Any = loader._stream.feed
    balanced._exchanges = SimpleNamespace(stop=below.begun.set, is_stopped=False)
    below.begun.is_set = False
    balanced.stop()
    assert below.begun.is_set


# A trainer that is killed


SECONDS = 120.0  # a fork server and two workers start and end within this on a busy machine

TRAINER = """
import multiprocessing, signal, sys
import rescale_data as rd
class Rows:
    def __len__(self): return 1000
    def __getitem__(self, i): return {"i": i}
if __name__ == "__main__":
    with rd.DataLoader(Rows(), global_batch_size=8, num_workers=2, repeat=True, multiprocessing_context=sys.argv[1]) as loader:
        next(iter(loader))
        shared = {line.split("/dev/shm/")[1].split()[0] for line in open("/proc/self/maps") if "/dev/shm/" in line}
        print(*shared, flush=True)
        signal.pause()
"""


@pytest.mark.parametrize(("how", "context"), [(signal.SIGKILL, "forkserver"), (signal.SIGTERM, "spawn")])
def test_a_trainer_that_is_killed_leaves_nothing_behind(tmp_path: Path, how: signal.Signals, context: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAINER)
    trainer = subprocess.Popen(
        [sys.executable, script, context], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert trainer.stdout is not None
    try:
        shared = trainer.stdout.readline().split()
        trainer.send_signal(how)
        assert trainer.wait(SECONDS) == -how
        over, _, _ = select.select([trainer.stdout], [], [], SECONDS)  # all its processes hold the other end
        assert over
        assert trainer.stdout.read() == ""
        assert not [name for name in shared if os.path.exists(f"/dev/shm/{name}")]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(trainer.pid, signal.SIGKILL)
