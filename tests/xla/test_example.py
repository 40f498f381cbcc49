"""The example that README shows."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.xla.processes import ROOT, needs_torch_xla


@needs_torch_xla
def test_the_example_ends_with_the_batches_of_the_uninterrupted_run() -> None:
    environment = {**os.environ, "CPU_NUM_DEVICES": "4", "PJRT_DEVICE": "CPU", "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [sys.executable, "examples/xla_spmd.py"], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.count("identical") == 12
