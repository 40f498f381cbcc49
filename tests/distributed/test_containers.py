"""Hosts that share what containers do, a network and a bucket; process numbers, host name, /tmp and /dev/shm are their own."""

from __future__ import annotations

import http.client
import json
import shlex
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import rescale_data as rd
from tests.distributed.container import GLOBAL_BATCH

pytest.importorskip("s3fs", reason="needs the extra s3")
pytest.importorskip("moto", reason="needs the extra s3")

from tests.checkpoint.object_server import BUCKET, Server, serving

ROOT = Path(__file__).parents[2]
STEPS, LOST_AT, RANKS = 12, 5, 2  # ranks of a host
PRIVATE = (
    'mount -t tmpfs own "$0" && mkdir "$0/up" "$0/work" && mount -t tmpfs shm /dev/shm && '
    'mount -t overlay own -o lowerdir=/tmp,upperdir="$0/up",workdir="$0/work" /tmp'
)  # a /tmp of its own that shows what lies in that of the machine, the interpreter perhaps
CONTAINER = [
    "unshare", "-Ur", "--pid", "--fork", "--kill-child", "--uts", "--ipc", "--mount", "--mount-proc", "sh", "-c",
]  # fmt: skip


class Job:
    """The hosts of a job, one after the other meeting: each a container with `RANKS` ranks."""

    def __init__(self, server: Server, store: Any, name: str, folder: Path) -> None:
        self.batches: dict[int, dict[int, list[int]]] = defaultdict(dict)
        self.names, self._folder, self._num_meetings = set[tuple[str, int]](), folder, 0
        self._given = {
            "port": store.port, "options": server.options, "data": f"s3://{BUCKET}/rows.jsonl",
            "run": f"s3://{BUCKET}/{name}/run", "name": name,
        }  # fmt: skip

    def start(self, num_hosts: int, stop: int, lost: int = -1) -> list[subprocess.Popen[str]]:
        """Start the hosts; the ranks of the host ``lost`` wait in `LOST_AT`."""
        waits = {str(rank): LOST_AT for rank in range(lost * RANKS, lost * RANKS + RANKS)} if lost >= 0 else {}
        self._num_meetings += 1
        meeting = f"{self._given['name']} {self._num_meetings}"
        given = {**self._given, "world_size": num_hosts * RANKS, "stop": stop, "waits": waits, "meeting": meeting}
        return [self._host(number, json.dumps(given)) for number in range(num_hosts)]

    def _host(self, number: int, given: str) -> subprocess.Popen[str]:
        python = [sys.executable, "-m", "tests.distributed.container"]
        ranks = range(number * RANKS, number * RANKS + RANKS)
        starts = " & ".join(shlex.join([*python, str(rank), given]) + " <&3" for rank in ranks)
        commands = f"{PRIVATE} && hostname host{number} && exec 3<&0 && {{ {starts} & wait; }}"
        folder = self._folder / f"{self._given['name']}-{number}"
        folder.mkdir(exist_ok=True)
        return subprocess.Popen(
            [*CONTAINER, commands, folder], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def listen(self, host: subprocess.Popen[str], until: int = STEPS) -> None:
        """Keep what a host's ranks have trained, to the end of its output, or until all have begun a step."""
        assert host.stdout is not None
        left = RANKS
        while left and (line := host.stdout.readline()):
            said = json.loads(line)
            self.batches[said["step"]][said["rank"]] = said["rows"]
            self.names.add((said["host"], said["pid"]))
            left -= said["step"] == until


def _possible() -> bool:
    if not all(map(shutil.which, ("unshare", "hostname"))):
        return False
    tried = f'D=$(mktemp -d) && sh -c {shlex.quote(PRIVATE)} "$D" && hostname host0'
    return subprocess.run([*CONTAINER, tried], capture_output=True, check=False).returncode == 0


@pytest.mark.timeout(600)
@pytest.mark.skipif(not _possible(), reason="namespaces cannot be made here without rights")
def test_a_host_is_lost_with_its_disk_and_another_job_has_the_same_names(tmp_path: Path) -> None:
    """Two hosts, of which one is lost; one goes on, then two. All that while the bucket serves a second job of such hosts."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with serving() as server:
        put(server, "rows.jsonl", "".join(json.dumps({"row": i}) + "\n" for i in range(STEPS * GLOBAL_BATCH)))
        job, other = (Job(server, store, name, tmp_path) for name in ("one", "two"))
        hosts, others = job.start(2, STEPS, lost=1), other.start(1, STEPS)
        for host in hosts:
            job.listen(host, until=LOST_AT)
        for host in reversed(hosts):  # whoever starts a job ends its others when one is lost
            host.kill()
            host.wait()
        assert all(len(ranks) == 2 * RANKS for ranks in job.batches.values())
        assert max(job.batches) == LOST_AT
        trained = batches_of(job)
        for num_hosts, stop in ((1, 8), (2, STEPS)):
            job.batches.clear()
            hosts = job.start(num_hosts, stop)
            for host in hosts:
                job.listen(host)
                host.wait()
            trained |= batches_of(job)
        other.listen(others[0])
        others[0].wait()
    expected = alone(tmp_path)
    assert [trained[step] for step in range(STEPS)] == expected
    assert batches_of(other) == dict(enumerate(expected))
    assert other.names & job.names  # the same host name and process number


def batches_of(job: Job) -> dict[int, list[int]]:
    return {step: [row for rank in sorted(ranks) for row in ranks[rank]] for step, ranks in sorted(job.batches.items())}


def put(server: Server, name: str, text: str) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.proxy.server_address[1])
    connection.request("PUT", f"/{BUCKET}/{name}", text)
    assert connection.getresponse().status == 200


def alone(folder: Path) -> list[list[int]]:
    """Return the global batches of one rank that never stopped."""
    (folder / "rows.jsonl").write_text("".join(json.dumps({"row": i}) + "\n" for i in range(STEPS * GLOBAL_BATCH)))
    loader = rd.DataLoader(rd.JsonlSource(folder / "rows.jsonl"), global_batch_size=GLOBAL_BATCH)
    return [batch["row"].tolist() for batch in loader]
