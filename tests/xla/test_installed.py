"""README's example, the code of rescale_data/xla/README.md, and a torch_xla that is missing or does not fit torch."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rescale_data as rd
from rescale_data import checkpoint
from tests.xla.processes import ROOT, needs_torch_xla, on_devices


def test_the_core_imports_neither_torch_xla_nor_the_adapter() -> None:
    program = (
        "import sys, rescale_data, rescale_data.checkpoint, rescale_data.testing; "
        "print([name for name in sys.modules if 'xla' in name.split('.') or name.startswith('torch_xla')])"
    )
    output = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert output.stdout.strip() == "[]"


def test_both_environments_are_pinned_alike_but_for_torch() -> None:
    pins, xla_pins = (set((ROOT / name).read_text().split()) for name in ("constraints.txt", "constraints-xla.txt"))
    assert {pin for pin in pins - xla_pins if not pin.startswith("torch==")} == set()
    assert {"torch==2.9.0", "torch_xla==2.9.0"} <= xla_pins


@pytest.mark.skipif(find_spec("torch_xla") is not None, reason="torch_xla is installed")
def test_a_missing_torch_xla_is_named_with_the_cure() -> None:
    with pytest.raises(ImportError, match=r"pip install 'rescale_data\[xla\]'"):
        import rescale_data.xla  # noqa: F401


def test_a_torch_xla_for_another_torch_is_named_with_the_cure(tmp_path: Path) -> None:
    (tmp_path / "torch_xla.py").write_text("raise ImportError('_XLAC.so: undefined symbol: _ZN5torch')")
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import rescale_data.xla"
    output = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert "the release of torch that it is built for (_XLAC.so: undefined symbol: _ZN5torch)" in output.stderr


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
