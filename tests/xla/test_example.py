"""The example that README shows, and the code in rescale_data/xla/README.md."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

import rescale_data as rd
from rescale_data import checkpoint
from tests.xla.processes import ROOT, needs_torch_xla, on_devices


@needs_torch_xla
def test_the_example_ends_with_the_batches_of_the_uninterrupted_run() -> None:
    environment = {**os.environ, "CPU_NUM_DEVICES": "4", "PJRT_DEVICE": "CPU", "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [sys.executable, "examples/xla_spmd.py"], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.count("identical") == 12


@on_devices(4, spmd=False)
def test_the_code_of_the_page(tmp_path: Path) -> None:
    """As it stands there, with a mesh, a pipeline and a model as a user would have, from a checkpoint that a host has saved."""
    text = (ROOT / "rescale_data" / "xla" / "README.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    imports, use_spmd, rest = block.partition("xr.use_spmd()")
    rows = [{"x": np.float32([row])} for row in range(128)]
    os.chdir(tmp_path)

    def state(model: torch.nn.Module) -> dict[str, Any]:
        loader = rd.DataLoader(rows, global_batch_size=64)
        return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1), "loader": loader}

    saved = state(torch.nn.Linear(1, 1))
    next(iter(saved["loader"]))
    checkpoint.save("checkpoints/step-100", saved)
    names: dict[str, Any] = {"pipeline": rows}
    exec(imports + use_spmd, names)
    names["mesh"] = names["xs"].Mesh(np.arange(4), (4,), ("data",))
    names["model"] = torch.nn.Linear(1, 1).to("xla")
    names["optimizer"] = torch.optim.SGD(names["model"].parameters(), 0.1)
    exec(rest, names)
    assert names["state"]["loader"].step == 2
    assert torch.equal(names["model"].weight.cpu(), saved["model"].weight)
    back = state(torch.nn.Linear(1, 1))
    checkpoint.load("checkpoints/step-200", back)
    assert back["loader"].step == 2
