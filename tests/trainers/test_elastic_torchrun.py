"""Real `torchrun` agents: one is killed, two join, and the rows are those of a run that never stopped."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "trainers" / "elastic_torchrun.py"


@pytest.mark.timeout(900)
def test_four_ranks_then_three_then_five():
    run = subprocess.run([sys.executable, EXAMPLE], capture_output=True, text=True, timeout=880)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "2400 of 2400 rows trained, 0 twice" in run.stdout
    assert "40 of 40 global batches are those of one rank that never stopped" in run.stdout
