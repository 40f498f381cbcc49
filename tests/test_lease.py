"""Leases: whether their holder is still there, seen from its host, from a container, and from another host."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractFileSystem

from rescale_data import lease as leases
from rescale_data.lease import Lease, LeaseLostError, LeaseObserver, is_running, this_process


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The observer's clock, as a list of one number that the test sets."""
    now = [1000.0]
    monkeypatch.setattr(leases.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture(params=["local", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[AbstractFileSystem, str]]:
    if request.param == "local":
        yield LocalFileSystem(), str(tmp_path / "a.lease")
        return
    files = fsspec.filesystem("memory")
    yield files, f"/{tmp_path.name}/a.lease"
    files.store.clear()


def elsewhere() -> dict[str, Any]:
    """A process in another container of this host, under the same host name."""
    return this_process() | {"namespace": "pid:[1]"}


def test_a_holder_of_this_host_is_seen_at_once(place: tuple[AbstractFileSystem, str]) -> None:
    files, path = place
    with Lease(files, path, {"step": 7}):
        assert LeaseObserver(files).observe_holder(path)[0] == "alive"
        assert LeaseObserver(files).observe_holder(path)[1]["step"] == 7
    assert LeaseObserver(files).observe_holder(path) == ("gone", {})


HOLDER = """
import sys; from fsspec.implementations.local import LocalFileSystem; from rescale_data.lease import Lease
lease = Lease(LocalFileSystem(), sys.argv[1]); print("held", flush=True); sys.stdin.read()
"""
CONTAINER = ["unshare", "-Ur", "--pid", "--fork", "--kill-child"]


def held_by(path: str, *command: str) -> subprocess.Popen[bytes]:
    """Start a process that holds a lease."""
    command = (*command, sys.executable, "-c", HOLDER, path)
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"held\n"
    return process


def test_a_killed_process_and_one_that_has_its_number(tmp_path: Path) -> None:
    path, watch = str(tmp_path / "a.lease"), LeaseObserver(LocalFileSystem())
    with held_by(path) as process:
        assert watch.observe_holder(path)[0] == "alive"
        os.kill(process.pid, signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert watch.observe_holder(path)[0] == "gone", "although nobody has waited for it"
    assert is_running(this_process() | {"start": "1"}) is False


@pytest.mark.skipif(
    shutil.which("unshare") is None or subprocess.run([*CONTAINER, "true"], check=False).returncode != 0,
    reason="namespaces cannot be made here without rights",
)
def test_a_holder_in_a_container_with_process_numbers_of_its_own(tmp_path: Path) -> None:
    path = str(tmp_path / "a.lease")
    with held_by(path, *CONTAINER) as process:
        assert LeaseObserver(LocalFileSystem()).observe_holder(path)[0] == "undecided"
        process.communicate()


def test_a_holder_elsewhere_is_judged_by_two_looks(place: tuple[AbstractFileSystem, str], clock: list[float]) -> None:
    files, path = place
    watch = LeaseObserver(files)
    for renewed in range(3):
        files.pipe_file(path, json.dumps({"holder": elsewhere(), "renewed": renewed}).encode())
        assert watch.observe_holder(path)[0] == ("alive" if renewed else "undecided")
        clock[0] += 1000.0
    assert watch.observe_holder(path)[0] == "gone"
    assert LeaseObserver(files).observe_holder(path)[0] == "undecided", "an observer that looks once knows nothing"


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"holder": 3}', b'{"holder": {"pid": "x"}}'])
def test_a_lease_that_cannot_be_read_counts_until_it_stands_still(
    place: tuple[AbstractFileSystem, str], clock: list[float], content: bytes
) -> None:
    files, path = place
    files.pipe_file(path, content)
    watch = LeaseObserver(files)
    assert watch.observe_holder(path)[0] == "undecided"
    clock[0] += leases.DEAD_SECONDS + 1
    assert watch.observe_holder(path)[0] == "gone"


def test_a_holder_learns_that_it_cannot_renew(place: tuple[AbstractFileSystem, str], clock: list[float]) -> None:
    """Before any observer takes it for gone."""
    files, path = place
    with Lease(files, path) as lease:
        lease.require_not_lost()
        clock[0] += leases.LOST_SECONDS + 1
        with pytest.raises(LeaseLostError, match="could not be renewed for 31 seconds"):
            lease.require_not_lost()
        lease.rewrite({})
        lease.require_not_lost()
    assert leases.LOST_SECONDS + leases.RENEW_SECONDS < leases.DEAD_SECONDS


def test_a_lease_is_renewed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "RENEW_SECONDS", 0.01)
    files, path = LocalFileSystem(), str(tmp_path / "a.lease")
    with Lease(files, path, exclusive=True):
        with pytest.raises(FileExistsError):
            Lease(files, path, exclusive=True)
        while json.loads(files.cat_file(path) or b'{"renewed": 0}')["renewed"] < 3:
            pass
    assert not os.path.exists(path)


def test_a_forked_child_leaves_the_lease_of_its_parent(tmp_path: Path) -> None:
    """Also where a thread of the parent has the lock of an event when it forks: nobody gives that back in the child."""
    with Lease(LocalFileSystem(), str(tmp_path / "a.lease")) as lease:
        with lease._release_event._cond:  # type: ignore[attr-defined]
            child = os.fork()
            if child == 0:
                signal.alarm(30)
                lease.release()
                os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert os.path.exists(tmp_path / "a.lease")
