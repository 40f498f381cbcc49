"""Kill -9 of a rank at a request of a save to an S3 server: the newest committed checkpoint is there, always."""

from __future__ import annotations

import os
import random
import signal
import uuid
from typing import Any, BinaryIO

import pytest
import torch.distributed as dist

pytest.importorskip("s3fs", reason="needs the extra s3")
pytest.importorskip("moto", reason="needs the extra s3")

from rescale_data.checkpoint import CheckpointManager, RunReader
from rescale_data.checkpoint.storage import open as opening
from rescale_data.checkpoint.storage.store import ObjectStore
from tests.checkpoint.object_server import BUCKET, serving
from tests.checkpoint.processes import context, start
from tests.checkpoint.test_kill import KILLS, end, state_of


class FusedStore(ObjectStore):
    """An object store that kills this process before one of its changes: of rank 0 some ten to a save, of others one."""

    left = 10**9

    def burn(self) -> None:
        type(self).left -= 1
        if type(self).left < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def open_write(self, path: str) -> BinaryIO:
        self.burn()
        return super().open_write(path)

    def rename(self, path: Any, new_path: Any) -> None:
        self.burn()
        super().rename(path, new_path)

    def rm_file(self, path: Any) -> None:
        self.burn()
        super().rm_file(path)

    def remove_folder(self, path: str) -> None:
        self.burn()
        super().remove_folder(path)


def save_with_a_fuse(folder: str, options: Any, mode: Any, first: int, victim: int, fuse: int, reports: Any) -> None:
    opening.ObjectStore = FusedStore  # type: ignore[misc]
    FusedStore.left = fuse if dist.get_rank() == victim else 10**9
    with CheckpointManager(folder, keep_latest=1, async_mode=mode, storage_options=options) as manager:
        for step in (first, first, first + 1):  # a replacement is a save, too, and the last save deletes a step
            manager.save(step, state_of(step))
            manager.wait()
            if dist.get_rank() == 0:
                reports.send(step)


@pytest.mark.timeout(600)  # a rank that is stuck is waited for
def test_kills_at_random_requests() -> None:
    rng, folder, committed, killed, stuck = random.Random(KILLS), f"s3://{BUCKET}/{uuid.uuid4().hex}", 0, 0, 0
    with serving() as server:
        for round_ in range(KILLS // 8):
            # Each rank in each mode, after a first round that commits.
            victim, mode = ((0, "thread"), (0, "disabled"), (1, "thread"), (1, "disabled"))[(round_ - 1) % 4]
            fuse = rng.randrange(3 if victim else 40) if committed else 10**9
            ours, theirs = context.Pipe(duplex=False)
            arguments = (folder, server.options, mode, committed + 1, victim, fuse, theirs)
            processes = start(2, save_with_a_fuse, *arguments)
            theirs.close()
            stuck += end(processes)
            killed += processes[victim].exitcode == -signal.SIGKILL
            try:
                while True:
                    committed = ours.recv()
            except EOFError:
                pass
            target = state_of(0)
            reader = RunReader(folder, storage_options=server.options)
            found = reader.load_latest(target) or 0
            assert found == reader.latest_step() >= committed, "the newest committed one"
            assert target["loader"].step == target["step"] == found
            assert (target["weights"] == found).all()
            committed = found
    assert stuck < 3, "a rank that lives raises: its group is broken"
    assert killed > KILLS // 20
    assert committed > KILLS // 20, "and after commits, in replacements and deletions, too"
