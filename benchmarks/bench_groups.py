"""How does making the group of a loader's ranks grow with their number, and what do torch's own switches change?

    python benchmarks/bench_groups.py [--ranks 2,4,8,16,32,64] [--rounds 3]

Each rank is a process, forked when torch is imported, and all are on this machine: what many hosts would do at once, a few
cores do one after another. So CPU seconds of all ranks together are told beside the wall time, and sockets, which do not
depend on the machine. `meet_at_barrier` is what comes before the group is made (who is missing?), `first` the first all-reduce.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

from rescale_data.engine.ranks.meeting import meet_at_barrier

SWITCHES = {
    "eager": {},
    "eager, GLOO_ENABLE_STORE_V2_API=1": {"GLOO_ENABLE_STORE_V2_API": "1"},
    "eager, GLOO_ENABLE_RANK_AS_SEQUENCE_NUMBER=1": {"GLOO_ENABLE_RANK_AS_SEQUENCE_NUMBER": "1"},
    "TORCH_GLOO_LAZY_INIT=1": {"TORCH_GLOO_LAZY_INIT": "1"},
}
WAIT = datetime.timedelta(seconds=300)


def rank(me: int, ranks: int, port: int, switches: dict[str, str]) -> dict[str, float]:
    """One rank's part; seconds of wall and CPU, and sockets."""
    os.environ.update(switches)
    store: Any = TCPStore("127.0.0.1", port, is_master=False, timeout=WAIT)
    store = PrefixStore("circle", store)
    together(store, "begin", ranks)
    found: dict[str, float] = {"sockets of the store": sockets()}
    cpu, began = time.process_time(), time.perf_counter()
    meet_at_barrier(PrefixStore("meet", store), me, list(range(ranks)), 300.0)
    met = time.perf_counter()
    group = ProcessGroupGloo(PrefixStore("gloo", store), me, ranks, WAIT)
    made = time.perf_counter()
    found |= {"meet": met - began, "group": made - met, "cpu": time.process_time() - cpu, "sockets": sockets()}
    together(store, "made", ranks)
    began = time.perf_counter()
    group.allreduce([torch.ones(64)], dist.AllreduceOptions()).wait()
    found |= {"first": time.perf_counter() - began, "sockets then": sockets()}
    together(store, "end", ranks)
    return found


def together(store: Any, name: str, ranks: int) -> None:
    if store.add(name, 1) == ranks:
        store.set(f"{name}/all", "")
    store.wait([f"{name}/all"], WAIT)


def sockets() -> int:
    links = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
    return sum(os.path.islink(link) and os.readlink(link).startswith("socket:") for link in links)


def measure(ranks: int, switches: dict[str, str]) -> dict[str, float]:
    """The slowest rank's times, the CPU seconds of all, the most sockets of one."""
    store_pipe, ends = os.pipe(), []
    server = os.fork()
    if server == 0:  # of its own, so that nobody is forked beside its thread
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=WAIT)
        os.write(store_pipe[1], str(store.port).encode())
        time.sleep(600)
    port = int(os.read(store_pipe[0], 16))
    for me in range(ranks):
        read, write = os.pipe()
        if os.fork() == 0:
            try:
                os.write(write, json.dumps(rank(me, ranks, port, switches)).encode())
            finally:
                os._exit(0)
        os.close(write)
        ends.append(read)
    found = [json.loads(os.read(end, 4096)) for end in ends]
    [os.waitpid(-1, 0) for _ in range(ranks)]
    os.kill(server, 9)
    os.waitpid(server, 0)
    [os.close(end) for end in (*ends, *store_pipe)]
    return {key: (sum if key == "cpu" else max)(each[key] for each in found) for key in found[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4,8,16,32,64")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, medians of {given.rounds} rounds; seconds")
    for ranks in map(int, given.ranks.split(",")):
        rounds: dict[str, list[dict[str, float]]] = {name: [] for name in SWITCHES}
        for _ in range(given.rounds):
            for name, switches in SWITCHES.items():
                rounds[name].append(measure(ranks, switches))
        for name, found in rounds.items():
            median = {key: statistics.median(each[key] for each in found) for key in found[0]}
            print(
                f"{ranks:3d} ranks, {name:46s} meet {median['meet']:.3f}, group {median['group']:.3f}, CPU of all "
                f"{median['cpu']:.2f}, first {median['first']:.4f}; sockets a rank {median['sockets']:.0f}, "
                f"after the first exchange {median['sockets then']:.0f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
