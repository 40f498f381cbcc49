"""torch_xla that is missing or does not fit torch; and the core never imports it. These run without torch_xla too."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.xla.processes import ROOT


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
