"""What do several hosts do to a run that one machine does not? Network namespaces of this machine are the hosts.

    python benchmarks/bench_hosts.py [--hosts 4] [--delay 0.05] [--loss 0.0] [--vanish 3] [--fork]

Each host has one interface, `fabric0`, by whose name gloo is told its sockets, and nothing else: no loopback between hosts, no
bridge. What is sent through it a thread here carries to the other side, ``--delay`` seconds later each way, and loses as much
as it is told. `torchrun` starts a rank on each host (``--fork``: this process does). Twice they run an epoch of filtered rows,
whose end the ranks must agree on: at once and with the delay. Then one host vanishes without a word, as if its cable were
pulled, and as many hosts as are left go on from the checkpoint. It takes no rights but to make namespaces of one's own.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import heapq
import json
import os
import random
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import rescale_data as rd

GLOBAL_BATCH, SAVE_AT, SECONDS = 24, 5, 240.0
_NEW_NETWORK, _TUN, _NO_HEADER, _SET = 0x40000000, 0x0001, 0x1000, 0x400454CA


class Fabric(threading.Thread):
    """Carries packets between hosts.

    Args:
        ports: A descriptor a host, for its interface.
        delay: Seconds each way.
        loss: Part of the packets that do not arrive.
    """

    def __init__(self, ports: list[int], delay: float, loss: float) -> None:
        super().__init__(daemon=True)
        self._ports, self._delay, self._loss = ports, delay, loss
        self._gone: set[int] = set()
        self._under_way: list[tuple[float, int, int, bytes]] = []
        self.carried = 0

    def pull(self, host: int) -> None:
        """Nothing goes to or from a host any more."""
        self._gone.add(host)

    def run(self) -> None:
        waiting = selectors.DefaultSelector()
        for host, port in enumerate(self._ports):
            waiting.register(port, selectors.EVENT_READ, host)
        while True:
            due = self._under_way[0][0] - time.monotonic() if self._under_way else 0.2
            for key, _ in waiting.select(max(0.0, due)):
                self._take(key.data, os.read(key.fd, 65536))
            while self._under_way and self._under_way[0][0] <= time.monotonic():
                _, _, host, packet = heapq.heappop(self._under_way)
                if host not in self._gone:
                    with contextlib.suppress(OSError):
                        os.write(self._ports[host], packet)

    def _take(self, host: int, packet: bytes) -> None:
        to = packet[19] - 1  # of 10.9.0.1, 10.9.0.2, ...
        is_ours = packet[0] >> 4 == 4 and packet[16:19] == bytes((10, 9, 0)) and 0 <= to < len(self._ports)
        if is_ours and host not in self._gone and random.random() >= self._loss:
            self.carried += 1
            heapq.heappush(self._under_way, (time.monotonic() + self._delay, self.carried, to, packet))


def interface(host: int) -> int:
    """In a network of this process's own from now on: its only interface."""
    if ctypes.CDLL(None, use_errno=True).unshare(_NEW_NETWORK):
        raise OSError(ctypes.get_errno(), "unshare")
    port = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(port, _SET, struct.pack("16sH", b"fabric0", _TUN | _NO_HEADER))
    for command in (f"addr add 10.9.0.{host + 1}/24 dev fabric0", "link set fabric0 mtu 9000 up", "link set lo up"):
        subprocess.run(["ip", *command.split()], check=True)
    return port


def start(host: int, task: dict[str, Any]) -> tuple[int, int]:
    """A host, with a rank on it: its process and the other end of its interface."""
    ours, theirs = socket.socketpair()
    process = os.fork()
    if process == 0:
        try:
            socket.send_fds(theirs, [b"port"], [interface(host)])
            theirs.recv(1)  # all hosts are there
            _be(host, task)
        except BaseException as error:
            print(f"host {host}: {error!r}", file=sys.stderr, flush=True)
        finally:
            os._exit(1)
    _, (port, *_), _, _ = socket.recv_fds(ours, 4, 1)
    task["go"].append(ours)
    return process, port


def _be(host: int, task: dict[str, Any]) -> None:
    hosts = task["hosts"]
    os.environ |= {"GLOO_SOCKET_IFNAME": "fabric0", "OMP_NUM_THREADS": "1", "TASK": json.dumps(task | {"go": []})}
    if task["fork"]:
        os.environ |= {"RANK": str(host), "WORLD_SIZE": str(hosts), "MASTER_ADDR": "10.9.0.1", "MASTER_PORT": "29400"}
        work(task)
        signal.pause()  # its store serves others
    nodes = ["--nnodes", str(hosts), "--node-rank", str(host), "--nproc-per-node", "1"]
    where = ["--master-addr", "10.9.0.1", "--master-port", "29400", __file__, "--work"]
    os.execv(sys.executable, [sys.executable, "-m", "torch.distributed.run", *nodes, *where])


def run(folder: Path, name: str, delay: float, given: argparse.Namespace, **task: Any) -> list[dict[str, Any]]:
    """What the ranks of one job tell, after its last one has."""
    task |= {
        "folder": str(folder),
        "name": name,
        "fork": given.fork,
        "filtered": not given.known,
        "rows": given.rows,
        "timeout": given.timeout if "vanish" in task else 60.0,
        "go": [],
    }
    hosts = [start(host, task) for host in range(task["hosts"])]
    fabric = Fabric([port for _, port in hosts], delay, given.loss)
    fabric.start()
    [end.send(b"!") for end in task["go"]]
    lost = task.get("vanish")
    files = {host: folder / f"{name}-{host}.json" for host in range(task["hosts"]) if host != lost}
    until = time.monotonic() + SECONDS
    try:
        while not all(file.exists() for file in files.values()):
            if lost is not None and len(list(folder.glob(f"{name}-ready-*"))) == task["hosts"]:
                fabric.pull(lost)
                (folder / f"{name}-pulled").touch()
            if time.monotonic() > until:
                raise TimeoutError(
                    f"{name}: {[host for host, file in files.items() if not file.exists()]} tell nothing"
                )
            time.sleep(0.05)
    finally:
        ranks = [
            int(file.suffix[1:]) for file in folder.glob(f"{name}-pid.*")
        ]  # torchrun gives them sessions of their own
        for process in (*(process for process, _ in hosts), *ranks):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        [os.waitpid(process, 0) for process, _ in hosts]
    return [json.loads(file.read_text()) for file in files.values()]


# On each host


def keep(row: dict[str, Any]) -> bool:
    return row["row"] % 7 != 0


class Numbers(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return int(json.loads(os.environ["TASK"])["rows"])

    def __getitem__(self, index: int) -> Any:
        return {"row": index}


NUMBERS = Numbers()


def pipeline(shard: rd.Shard) -> rd.BaseNode[Any]:
    rows = rd.Reader(NUMBERS, shard)
    return rd.Filter(rows, keep) if json.loads(os.environ["TASK"])["filtered"] else rows


def work(task: dict[str, Any]) -> None:
    seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def timed(what: str) -> Generator[None]:
        began = time.perf_counter()
        yield
        seconds[what] = time.perf_counter() - began

    folder, name = Path(task["folder"]), task["name"]
    (folder / f"{name}-pid.{os.getpid()}").touch()
    with timed("process group"):
        dist.init_process_group("gloo")
    me = dist.get_rank()
    rd.DataLoader(pipeline, global_batch_size=GLOBAL_BATCH, dp_world_size=1)  # imports do not count
    with timed("loader"):
        sizes = {"global_batch_size": GLOBAL_BATCH, "micro_batch_size": GLOBAL_BATCH // dist.get_world_size()}
        loader = rd.DataLoader(pipeline, **sizes, timeout=task["timeout"])
    if "from" in task:
        with timed("load"):
            dcp.load({"loader": loader}, checkpoint_id=folder / task["from"])
    rows, waits, said, batches = [], [], "", iter(loader)
    while True:
        began = time.perf_counter()
        batch = next(batches, None)
        waits.append(time.perf_counter() - began)
        if batch is None:
            break
        rows += batch["row"].tolist()
        if loader.step == SAVE_AT and "save" in task:
            with timed("state_dict"):
                loader.state_dict()
            with timed("save"):
                dcp.save({"loader": loader}, checkpoint_id=folder / task["save"])
            if "vanish" in task:
                said = left_alone(folder, name, me, loader, seconds)
                break
    seconds |= {"a batch": sorted(waits)[len(waits) // 2], "the end of the epoch": sum(sorted(waits)[-8:])}
    result = folder / f"{name}-{me}.part"
    result.write_text(json.dumps({"seconds": seconds, "rows": rows, "said": said}))
    result.rename(folder / f"{name}-{me}.json")


def left_alone(folder: Path, name: str, me: int, loader: Any, seconds: dict[str, float]) -> str:
    """What a rank is told that saves although another is gone."""
    (folder / f"{name}-ready-{me}").touch()
    while not (folder / f"{name}-pulled").exists():
        time.sleep(0.05)
    began = time.perf_counter()
    try:
        loader.state_dict()
    except Exception as error:
        seconds["told who is gone"] = time.perf_counter() - began
        return f"{type(error).__name__}: {error}"
    return ""


def report(what: str, found: list[dict[str, Any]]) -> None:
    for key in found[0]["seconds"]:
        values = [each["seconds"][key] for each in found]
        print(f"  {what:34s} {key:22s} {min(values):8.3f} to {max(values):8.3f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--delay", type=float, default=0.05, help="seconds each way")
    parser.add_argument("--loss", type=float, default=0.0)
    parser.add_argument("--vanish", type=int, help="which host, by default the last")
    parser.add_argument("--rows", type=int, default=1200)
    parser.add_argument("--timeout", type=float, default=20.0, help="where a host vanishes")
    parser.add_argument("--fork", action="store_true", help="no torchrun")
    parser.add_argument("--known", action="store_true", help="rows are not filtered: ranks know when an epoch ends")
    parser.add_argument("--short", action="store_true", help="only with the delay")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        work(json.loads(os.environ["TASK"]))
        return
    if not given.inside:
        os.execvp("unshare", ["unshare", "-Urn", sys.executable, __file__, *sys.argv[1:], "--inside"])
    vanish = given.hosts - 1 if given.vanish is None else given.vanish
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        print(
            f"{given.hosts} hosts, {given.delay:g} s each way, {given.loss:.1%} lost, torch {torch.__version__}",
            flush=True,
        )
        if not given.short:
            report("near", run(folder, "near", 0.0, given, hosts=given.hosts, save="near"))
            report("far", run(folder, "far", given.delay, given, hosts=given.hosts, save="far"))
        before = run(folder, "lost", given.delay, given, hosts=given.hosts, save="lost", vanish=vanish)
        report(f"host {vanish} vanishes", before)
        print(f"  {before[0]['said']}", flush=True)
        after = run(folder, "after", given.delay, given, hosts=given.hosts - 1, **{"from": "lost"})
        report(f"on {given.hosts - 1} hosts", after)
        who = f"[{vanish}]" if vanish else "rank 0 of the job"
        told = all(who in each["said"] for each in before)
        later = Counter(row for each in after for row in each["rows"])
        earlier = {row for each in before for row in each["rows"]}
        twice = [row for row, count in later.items() if count > 1 or row in earlier]
        wanted = {row for row in range(given.rows) if row % 7 or given.known}
        missing = len(wanted) - len(later) - GLOBAL_BATCH * SAVE_AT  # the lost host took its part of what came before
        print(f"  all were told who is gone: {told}; rows read twice: {len(twice)}; left in the tail: {missing}")
        if not told or twice or not 0 <= missing < GLOBAL_BATCH or not {*later} <= wanted:
            sys.exit(1)


if __name__ == "__main__":
    main()
