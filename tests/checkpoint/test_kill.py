"""Kill -9 at random moments of a save: what is found afterwards is a whole checkpoint, the newest committed one.

RESCALE_DATA_KILLS sets how often ranks of a group are killed (default 40; 200 take about a minute).
"""

from __future__ import annotations

import os
import random
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
import torch.distributed as dist

from rescale_data.checkpoint import CheckpointManager
from rescale_data.checkpoint.storage import open as opening
from rescale_data.checkpoint.storage.claims import save_of
from rescale_data.checkpoint.storage.store import DiskStore
from tests.checkpoint.processes import context, start
from tests.checkpoint.stand_in import StandInLoader

KILLS = int(os.environ.get("RESCALE_DATA_KILLS", "40"))


def state_of(step: int) -> dict[str, Any]:
    loader = StandInLoader()
    loader.advance(step)
    return {"loader": loader, "weights": torch.full((1000,), float(step)), "step": step}


def check(folder: Path, at_least: int) -> int:
    """Load the newest checkpoint, which is whole, and not older than what was reported as committed."""
    target = state_of(0)
    with CheckpointManager(folder) as manager:
        steps = manager.steps()
        found = manager.load_latest(target) or 0
        assert found == (steps[-1] if steps else 0), "the newest committed one"
    assert found >= at_least
    assert target["loader"].step == target["step"] == found
    assert (target["weights"] == found).all()
    for step in folder.glob("step-*"):
        assert sum(save_of(name) is not None for name in os.listdir(step)) in (0, 2), "a manifest and its data"
    return found


def last(reports: Connection, committed: int) -> int:
    """Return the last number that a process reported before its end; `committed` if there is none."""
    try:
        while True:
            committed = reports.recv()
    except EOFError:
        return committed


class FusedDisk(DiskStore):
    """A disk that kills this process at one of its operations, or in the middle of a file: some 15 to a save."""

    left = 10**9

    def burn(self) -> None:
        FusedDisk.left -= 1
        if FusedDisk.left < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def open_write(self, path: str) -> BinaryIO:
        self.burn()
        return FusedStream(super().open_write(path), self)  # type: ignore[return-value]

    def rename(self, path: str, new_path: str) -> None:
        self.burn()
        super().rename(path, new_path)
        self.burn()

    def rm_file(self, path: Any) -> None:
        self.burn()
        super().rm_file(path)

    def remove_folder(self, path: str) -> None:
        self.burn()
        super().remove_folder(path)

    def sync_folder(self, path: str) -> None:
        self.burn()
        super().sync_folder(path)


class FusedStream:
    """A file in whose first write the process may be killed: DCP's many small ones would leave no kill for what comes after."""

    def __init__(self, raw: BinaryIO, disk: FusedDisk) -> None:
        self.raw, self.disk, self.is_first = raw, disk, True

    def write(self, data: Any) -> int:
        if self.is_first:
            if FusedDisk.left == 0:
                self.raw.write(memoryview(data)[: len(data) // 2])
                self.raw.flush()
            self.disk.burn()
            self.is_first = False
        return self.raw.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)


FUSE = 200
"""Operations of four steps, of which two are saved twice, and of the deletions: all are struck."""


def save_with_a_fuse(folder: str, mode: Any, first: int, fuse: int, out: Connection) -> None:
    torch.set_num_threads(1)
    opening.DiskStore = FusedDisk  # type: ignore[misc]
    FusedDisk.left = fuse
    with CheckpointManager(folder, keep_latest=2, async_mode=mode) as manager:
        for step in range(first, first + 4):
            for _ in range(1 + step % 2):  # a replacement is a save, too
                manager.save(step, state_of(step))
                manager.wait()
                out.send(step)


@pytest.mark.parametrize(("mode", "kills"), [("disabled", FUSE // 2), ("thread", 30)])
def test_a_hundred_kills_at_random_operations(tmp_path: Path, mode: str, kills: int) -> None:
    """Without a thread, at half of them."""
    committed, survived = 0, 0
    for fuse in random.Random(kills).sample(range(FUSE), kills):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=save_with_a_fuse, args=(str(tmp_path), mode, committed + 1, fuse, theirs))
        process.start()
        theirs.close()
        committed = last(ours, committed)
        process.join()
        assert process.exitcode in (0, -signal.SIGKILL)
        survived += process.exitcode == 0
        committed = check(tmp_path, committed)
    assert survived < kills / 3, "most fuses burnt while saving"
    assert committed > kills, "and after a commit, in replacements and in deletions, too"


def save_for_ever(folder: str, mode: Any, reports: Any) -> None:
    torch.manual_seed(0)
    with CheckpointManager(folder, keep_latest=2, async_mode=mode) as manager:
        target = state_of(0)
        step = manager.load_latest(target) or 0
        while True:
            step += 1
            for _ in range(1 + step % 2):
                manager.save(step, state_of(step))
                manager.wait()
                if dist.get_rank() == 0:
                    reports.send(step)


def end(processes: list[Any]) -> int:
    """Wait for ranks that have lost one, kill those that do not end, as a launcher does, and return their number.

    A rank raises at once when its peer is gone, but for a race in gloo: where the peer dies after it asked for a message
    and before that is written, ``Pair::write`` takes the broken connection for a full one, and the message waits in
    ``tx_``, whose unbound buffers ``Pair::signalException`` leaves out. Its sender waits for the timeout of the group, half
    an hour. That is one kill in 1,500; three in a test mean that our ranks wait for each other.
    """
    for process in processes:
        process.join(120)
    stuck = [process for process in processes if process.exitcode is None]
    for process in stuck:
        process.kill()
        process.join()
    return len(stuck)


@pytest.mark.timeout(600)  # a rank that is stuck is waited for
@pytest.mark.parametrize("mode", ["thread", "disabled"])
def test_kills_of_one_rank_or_all(tmp_path: Path, mode: str) -> None:
    rng, committed, stuck = random.Random(KILLS), 0, 0
    for round_ in range(KILLS // 2):
        ours, theirs = context.Pipe(duplex=False)
        processes = start(2, save_for_ever, str(tmp_path), mode, theirs)
        theirs.close()
        committed = ours.recv()
        time.sleep(rng.uniform(0, 0.06))  # the random moment
        for victim in processes if round_ % 2 else [rng.choice(processes)]:
            os.kill(victim.pid, signal.SIGKILL)
        stuck += end(processes)
        assert stuck < 3, "a rank that lives raises: its group is broken"
        committed = check(tmp_path, last(ours, committed))
