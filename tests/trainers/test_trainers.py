"""Examples of trainers, against the real packages, on 4, 2 and 3 ranks: each row, and the output in docs/trainers.md."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("package", "example"),
    [
        ("lightning", "lightning_trainer.py"),
        ("lightning", "lightning_trainer.py fsdp2"),  # sharded checkpoints
        ("lightning", "fabric_trainer.py"),
        ("transformers", "huggingface_trainer.py"),
        ("trl", "trl_trainer.py"),
        ("torchtitan", "torchtitan_trainer.py"),
        ("torchft", "torchft_trainer.py"),
        ("accelerate", "accelerate_trainer.py"),
        ("ray", "ray_trainer.py"),
        ("deepspeed", "deepspeed_trainer.py"),
    ],
)
def test_every_row_after_a_rescale(package: str, example: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: see docs/trainers.md")
    script, *arguments = example.split()
    command = [sys.executable, ROOT / "examples" / "trainers" / script, *arguments]
    run = subprocess.run(command, capture_output=True, text=True, timeout=580)
    assert run.returncode == 0, run.stdout + run.stderr
    shown = printed(script)
    assert shown[-2:] == ["ok    480 of 480 rows trained: 0 lost, 0 repeated", LAST]
    if script in ("torchft_trainer.py", "ray_trainer.py"):  # which ranks train which step is a matter of time
        shown = [line for line in shown if "steps" not in line]
    assert [line for line in run.stdout.splitlines() if line in shown] == shown


LAST = "ok    20 of 20 global batches are those of one rank that never stopped"


def printed(script: str) -> list[str]:
    """Return the lines that docs/trainers.md says a script prints: the first indented block behind its command."""
    page = (ROOT / "docs" / "trainers.md").read_text()
    behind = page[page.index(f"python examples/trainers/{script}`") :]
    return re.findall(r"^    (.*)", re.search(r"(?:^    .*\n)+", behind, re.MULTILINE)[0], re.MULTILINE)
