"""One rank of a job whose hosts are containers: `python -m tests.distributed.container ARGUMENTS`, see `test_containers`.

It writes what it trains to its standard output, for its host's disk goes with the host.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist

import rescale_data as rd
from rescale_data.checkpoint import CheckpointManager

GLOBAL_BATCH, SAVE_EVERY = 12, 2
OUTPUT = os.dup(1)
os.dup2(2, 1)  # gloo of torch 2.9 writes lines of its own to the standard output


def train(data: str, run: str, options: dict[str, Any], stop: int, waits_at: int) -> None:
    model = torch.nn.Linear(1, 1)
    source = rd.JsonlSource(data, storage_options=options, index_dir=f"{tempfile.gettempdir()}/index")
    sizes = {"global_batch_size": GLOBAL_BATCH, "micro_batch_size": GLOBAL_BATCH // dist.get_world_size()}
    loader = rd.DataLoader(source, **sizes, num_workers=2)
    with CheckpointManager(run, keep_latest=2, storage_options=options) as manager, loader:
        manager.load_latest({"model": model, "loader": loader})
        for step, batch in zip(range(loader.step, stop), loader, strict=False):
            say(step=step, rows=batch["row"].tolist(), host=socket.gethostname(), pid=os.getpid())
            if step == waits_at:
                sys.stdin.readline()  # until the host is lost
            dist.all_reduce(model.weight.data)  # a host that is lost is noticed here
            model.weight.data /= dist.get_world_size()
            if (step + 1) % SAVE_EVERY == 0:
                manager.save(step + 1, {"model": model, "loader": loader})


def say(**what: Any) -> None:
    os.write(OUTPUT, json.dumps({"rank": dist.get_rank(), **what}).encode() + b"\n")  # at once: ranks share the pipe


def main() -> None:
    rank, given = int(sys.argv[1]), json.loads(sys.argv[2])
    store = dist.TCPStore("127.0.0.1", given["port"], is_master=False)
    store = dist.PrefixStore(given["meeting"], store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=given["world_size"])
    train(given["data"], given["run"], given["options"], given["stop"], given["waits"].get(str(rank), -1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
