"""torchft: 4 replicas, one is killed within a step; 3 go on at that step, and a new one joins them. Nothing is restarted.

    pip install -c constraints-trainers.txt -e '.[trainers]'
    python examples/trainers/torchft_trainer.py         # half a minute on two cores; exit code 0 only if every row is right

What a user adds to torchft's loop is `Kept` and `regroup`: whenever the replicas have met anew, torch's process group is made
of those that have met, and the loader goes on at the step that torchft counts, from a state that one of them has kept. A step
that was not committed is served again.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from parts.kept import Kept
from parts.rows import VOCABULARY, Batches, Rows, compare
from torchft import Manager, Optimizer, ProcessGroupGloo
from torchft.coordination import LighthouseServer
from torchft.process_group import create_store_client

import rescale_data as rd

GLOBAL_BATCH_SIZE, NUM_ROWS, STEPS = 24, 240, 20  # ten steps an epoch
KILLED_AT, JOINED_AT = 7, 13  # steps
PATIENCE = timedelta(seconds=60)
SIZES: dict[str, Any] = {"global_batch_size": GLOBAL_BATCH_SIZE, "seed": 0}


# copy from here
class Replicas(ProcessGroupGloo):
    """torchft's process group, which knows whom it was made of last."""

    met: tuple[str, int, int] = ("", 0, 0)

    def configure(
        self, store_addr: str, replica_id: str, rank: int, world_size: int, *others: Any, **named: Any
    ) -> None:
        super().configure(store_addr, replica_id, rank, world_size, *others, **named)
        self.met = store_addr, rank, world_size


def regroup(met: tuple[str, int, int], loader: rd.DataLoader | None, kept: Kept, step: int) -> rd.DataLoader:
    """The loader of the replicas that have met, at the step that all of them do next."""
    address, rank, world_size = met
    if dist.is_initialized():
        dist.destroy_process_group()
    store = dist.PrefixStore("loader", create_store_client(address, PATIENCE))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=PATIENCE)
    micro_batch_size = 12 // world_size  # gradients are accumulated over two
    state, delivered = kept.agreed(step) if step else (None, 0)
    if loader is not None and step:
        loader.reopen(state, delivered, micro_batch_size=micro_batch_size)
        return loader
    loader = rd.DataLoader(Rows(NUM_ROWS), micro_batch_size=micro_batch_size, **SIZES)
    if state is not None:
        loader.load_state_dict(state, delivered)
    return loader


# to here


def train(replica: int, lighthouse: str, port: int, folder: Path) -> None:
    own = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    launcher = dist.TCPStore("localhost", port, is_master=False)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(VOCABULARY, 16), torch.nn.Linear(16, VOCABULARY))
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def state_dict() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": adam.state_dict()}

    def load_state_dict(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        adam.load_state_dict(state["optimizer"])

    replicas = Replicas(timeout=PATIENCE)
    if replica == 4:
        launcher.wait([f"step {JOINED_AT}"])
    manager = Manager(
        pg=replicas, load_state_dict=load_state_dict, state_dict=state_dict, min_replica_size=2, use_async_quorum=False,
        init_sync=False, timeout=PATIENCE, rank=0, world_size=1, store_addr="localhost", store_port=own.port,
        lighthouse_addr=lighthouse, replica_id=f"replica_{replica}", hostname="localhost",
    )  # fmt: skip
    optimizer, met, loader, batches, kept = Optimizer(manager, adam), replicas.met, None, iter(()), Kept(every=5)
    meet(launcher, "begin", 4) if replica < 4 else launcher.set("joined", "")
    while manager.current_step() < STEPS:
        optimizer.zero_grad()  # the replicas meet
        step = manager.current_step()
        if replicas.met != met:
            met = replicas.met
            loader = regroup(met, loader, kept, step)
            batches = iter(loader)
        kept.keep(loader)
        rows: list[int] = []
        for _ in range(loader.gradient_accumulation_steps):
            batch = next(batches, None)
            if batch is None:  # an epoch has ended, on all replicas
                batches = iter(loader)
                batch = next(batches)
            rows += batch["row"].tolist()
            F.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten()).backward()
            if (replica, step) == (1, KILLED_AT):
                os.kill(os.getpid(), signal.SIGKILL)
        for parameter in model.parameters():
            manager.allreduce(parameter.grad).wait()
        optimizer.step()
        if manager.current_step() > step:
            with open(folder / f"{replica}", "a") as file:
                file.write(json.dumps([step, met[1], met[2], rows]) + "\n")
        if manager.current_step() == JOINED_AT:
            launcher.set(f"step {JOINED_AT}", "")
            launcher.wait(["joined"])
    manager.shutdown(wait=False)


def meet(store: dist.Store, name: str, number: int) -> None:
    if store.add(name, 1) == number:
        store.set(f"{name} all", "")
    store.wait([f"{name} all"])


def serve() -> None:
    """torchft's lighthouse, where replicas meet: says its address, and lives until its input ends."""
    lighthouse = LighthouseServer(bind="0.0.0.0:0", min_replicas=2, join_timeout_ms=10000, heartbeat_timeout_ms=5000)
    print(f"http://localhost:{lighthouse.address().rsplit(':', 1)[1]}", flush=True)
    sys.stdin.read()


def main() -> int:
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    command, environment = [sys.executable, __file__], {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="torchft-") as name, open(f"{name}/log", "w+") as log:
        popen = functools.partial(subprocess.Popen, env=environment, stderr=log, text=True)
        folder = Path(name) / "steps"
        folder.mkdir()
        lighthouse = popen([*command, "lighthouse"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        address = lighthouse.stdout.readline().strip()
        started = [popen([*command, str(replica), address, str(store.port), str(folder)]) for replica in range(5)]
        try:
            for process in started:
                process.wait(400)  # on a busy machine; it is half a minute else
        except subprocess.TimeoutExpired as error:
            print(error)
        finally:
            for process in [*started, lighthouse]:
                process.kill()
        codes = [process.wait() for process in started]
        lines = sorted(json.loads(line) for file in folder.iterdir() for line in file.read_text().splitlines())
        log.seek(0)
        said = log.read()
    print("exit codes", codes)
    segments: list[tuple[int, Batches]] = []
    for world_size, of_segment in itertools.groupby(lines, lambda line: line[2]):
        segments.append((world_size, {}))
        for step, _, _, rows in of_segment:
            segments[-1][1].setdefault(step, []).extend(rows)
    if compare(segments, NUM_ROWS, STEPS, **SIZES) and codes == [0, -signal.SIGKILL, 0, 0, 0]:
        return 0
    print(said)
    return 1


if __name__ == "__main__":
    if sys.argv[1:] == ["lighthouse"]:
        serve()
    elif sys.argv[1:]:
        train(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))
    else:
        sys.exit(main())
