"""The examples of trainers, against the real packages: 4 ranks, then 2 with another accumulation, every row compared."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples" / "trainers"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("step", [12, 10], ids=["within an epoch", "at its end"])
@pytest.mark.parametrize("package", ["lightning", "transformers"])
def test_every_row_after_a_rescale(package: str, step: int) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: see constraints-trainers.txt")
    script = EXAMPLES / {"lightning": "lightning_trainer.py", "transformers": "huggingface_trainer.py"}[package]
    run = subprocess.run([sys.executable, script, str(step)], capture_output=True, text=True, timeout=580)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "20 of 20 global batches are those of one rank that never stopped" in run.stdout
