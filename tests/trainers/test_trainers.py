"""The examples of trainers, against the real packages: 4 ranks, then 2 with another accumulation, every row compared."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples" / "trainers"


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("package", "argument"),
    [
        ("lightning", "12"),  # within an epoch
        ("lightning", "10 fsdp2"),  # at its end, with sharded checkpoints
        ("transformers", "12"),
        ("transformers", "10"),
        ("torchtitan", "0"),  # repeat=False
        ("accelerate", ""),
    ],
)
def test_every_row_after_a_rescale(package: str, argument: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: see constraints-trainers.txt")
    name = {"transformers": "huggingface"}.get(package, package)
    command = [sys.executable, EXAMPLES / f"{name}_trainer.py", *argument.split()]
    run = subprocess.run(command, capture_output=True, text=True, timeout=580)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "20 of 20 global batches are those of one rank that never stopped" in run.stdout
