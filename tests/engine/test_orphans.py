"""A trainer that is killed leaves no process and no shared memory behind. Real processes: only they can be killed."""

import contextlib
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

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
