"""Examples of trainers, against the real packages: 4 ranks, then 2 with other accumulation and workers, each row compared."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples" / "trainers"


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("package", "example", "says"),
    [
        ("lightning", "lightning_trainer.py 12", ""),  # within an epoch
        ("lightning", "lightning_trainer.py 10 fsdp2", ""),  # at its end, with sharded checkpoints
        ("lightning", "fabric_trainer.py", "Only PyTorch DataLoader are currently supported in `setup_dataloaders`"),
        ("transformers", "huggingface_trainer.py 12", ""),
        ("transformers", "huggingface_trainer.py 10", ""),
        ("torchtitan", "torchtitan_trainer.py 0", ""),  # repeat=False
        ("torchft", "torchft_trainer.py", "exit codes [0, -9, 0, 0, 0]"),
        ("accelerate", "accelerate_trainer.py", ""),
        ("ray", "ray_trainer.py", "workers, and the step from which they trained: [(2, 0), "),
    ],
)
def test_every_row_after_a_rescale(package: str, example: str, says: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: see constraints-trainers.txt")
    script, *arguments = example.split()
    command = [sys.executable, EXAMPLES / script, *arguments]
    run = subprocess.run(command, capture_output=True, text=True, timeout=580)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "20 of 20 global batches are those of one rank that never stopped" in run.stdout
    assert says in run.stdout
