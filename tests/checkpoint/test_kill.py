"""Kill -9 of one rank, or all, at random moments of a save: what is found afterwards is the newest committed checkpoint, whole.

RESCALE_DATA_KILLS sets how often (default 40; 200 take about a minute). Kills at each request to the store: law 7.
"""

import contextlib
import multiprocessing
import os
import random
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from rescale_data.checkpoint import CheckpointManager
from rescale_data.checkpoint.storage.claims import save_of
from tests.checkpoint.steps import state_at

context = multiprocessing.get_context("forkserver")
KILLS = int(os.environ.get("RESCALE_DATA_KILLS", "40"))


def check(folder, at_least):
    target = state_at(0)
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


def last(reports, committed):
    with contextlib.suppress(EOFError):
        while True:
            committed = reports.recv()
    return committed


def save_for_ever(rank, rendezvous, folder, mode, reports):
    """Save as one of two ranks until it is killed, or fails since the other one is."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{rendezvous}", timedelta(seconds=60), 2, rank)
    with contextlib.suppress(Exception), CheckpointManager(folder, keep_latest=2, async_mode=mode) as manager:
        step = manager.load_latest(state_at(0)) or 0
        while True:
            step += 1
            for _ in range(1 + step % 2):
                manager.save(step, state_at(step))
                manager.wait()
                if rank == 0:
                    reports.send(step)


def end(processes):
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
def test_kills_of_one_rank_or_all(tmp_path, mode):
    rng, committed, stuck = random.Random(KILLS), 0, 0
    for round_ in range(KILLS // 2):
        ours, theirs = context.Pipe(duplex=False)
        given = (tmp_path / f"rendezvous-{round_}", tmp_path / "run", mode, theirs)
        processes = [context.Process(target=save_for_ever, args=(rank, *given)) for rank in range(2)]
        for process in processes:
            process.start()
        theirs.close()
        committed = ours.recv()
        time.sleep(rng.uniform(0, 0.06))  # the random moment
        for victim in processes if round_ % 2 else [rng.choice(processes)]:
            os.kill(victim.pid, signal.SIGKILL)
        stuck += end(processes)
        assert stuck < 3, "a rank that lives raises: its group is broken"
        committed = check(tmp_path / "run", last(ours, committed))
