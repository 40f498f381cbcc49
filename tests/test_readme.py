"""What README shows runs as it stands there."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch.distributed.checkpoint as dcp

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
COMMANDS = (
    "pip install -c constraints.txt -e . && python examples/rescaling_demo.py",
    "pip install -c constraints.txt -e '.[test]' && pytest",
)
XLA = "pip install -c constraints-xla.txt -e '.[test,xla]' && pytest tests/xla"


def torchrun(script: str, folder: Path, ranks: int, steps: int) -> None:
    (folder / "train.py").write_text(script.replace("1000", str(steps)))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "train.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr


def small_script(folder: Path) -> str:
    """README's script with small numbers, in a folder with documents."""
    (folder / "corpus").mkdir()
    documents = pa.array([[i % 90 + 3] * (i % 50 + 20) for i in range(500)], pa.list_(pa.int32()))
    pq.write_table(pa.table({"tokens": documents}), folder / "corpus" / "a.parquet", row_group_size=50)
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    return example.replace("768", "24").replace("4096", "64").replace("32_000", "128").replace("% 100", "% 2")


def test_the_script_trains_saves_and_goes_on_with_fewer_ranks(tmp_path):
    script = small_script(tmp_path)
    torchrun(script, tmp_path, 3, 2)
    torchrun(script, tmp_path, 1, 5)
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*")) == ["step-2", "step-4"]
    for step in (2, 4):
        state = {"loader": {"header": ""}}
        dcp.load(state, checkpoint_id=tmp_path / "checkpoints" / f"step-{step}")
        assert json.loads(state["loader"]["header"])["samples"] == step * 24


def test_it_is_read_in_two_minutes():
    assert len(README.splitlines()) <= 120


def test_the_commands_are_those_of_ci():
    script = (ROOT / ".ci" / "run").read_text().replace("&& check", "&& pytest")  # its own function around pytest
    for command in COMMANDS:
        assert f"{command}\n" in README
        assert f"{command}\n" in script
    assert f"{XLA}\n" in (ROOT / "rescale_data" / "xla" / "README.md").read_text()
    assert f"{XLA}\n" in script
