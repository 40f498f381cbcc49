"""Hosts that reach each other through a network alone: namespaces, where making some takes no rights."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "bench_hosts.py"
OWN = ["unshare", "-Urn"]


def _possible() -> bool:
    if not all(map(shutil.which, ("unshare", "ip", "sh"))):
        return False
    tried = "test -w /dev/net/tun && ip tuntap add dev fabric0 mode tun"
    return subprocess.run([*OWN, "sh", "-c", tried], capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not _possible(), reason="network namespaces cannot be made here without rights")
def test_a_host_vanishes_and_the_others_go_on_without_it() -> None:
    """Its cable is pulled, so that no connection ends; who is gone is said, and no row is read twice or lost."""
    few = ["--inside", "--fork", "--short", "--hosts", "3", "--delay", "0.002", "--rows", "400", "--timeout", "5"]
    found = subprocess.run(
        [*OWN, sys.executable, SCRIPT, *few], capture_output=True, text=True, timeout=240, check=False
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert "because the ranks [2] did not come to it" in found.stdout
    assert "all were told who is gone: True; rows read twice: 0" in found.stdout
