"""torch_xla that is missing or does not fit torch; and the core never imports it. These run without torch_xla too."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

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


@pytest.mark.parametrize(
    ("torch", "xla", "message"),
    [
        ("2.9.0", None, r"which is not installed"),
        ("2.13.0+cpu", "2.9.0", r"torch 2\.13\.0\+cpu and torch_xla 2\.9\.0 do not match.*torch==2\.9\.\*"),
        ("2.9.1", "2.9.0", None),
    ],
)
def test_versions_are_compared_before_anything_is_imported(torch: str, xla: str | None, message: str | None) -> None:
    program = (
        "import importlib.metadata as metadata, sys\n"
        f"versions = {{'torch': {torch!r}, 'torch_xla': {xla!r}}}\n"
        "def version(name):\n"
        "    if versions[name] is None: raise metadata.PackageNotFoundError(name)\n"
        "    return versions[name]\n"
        "metadata.version = version\n"
        "import importlib.util\n"
        "spec = importlib.util.spec_from_file_location('installed', 'rescale_data/xla/installed.py')\n"
        "installed = importlib.util.module_from_spec(spec); spec.loader.exec_module(installed)\n"
        "installed.require_torch_xla()\n"
    )
    output = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    if message is None:
        assert output.returncode == 0, output.stderr
    else:
        with pytest.raises(AssertionError, match=message):
            raise AssertionError(output.stderr.strip().splitlines()[-1])
