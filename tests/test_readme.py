"""What README shows runs as it stands there."""

import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed.checkpoint as dcp

README = (Path(__file__).parents[1] / "README.md").read_text()
COMMANDS = (
    "pip install -c constraints.txt -e . && python examples/rescaling_demo.py",
    "pip install -c constraints.txt -e '.[test]' && pytest",
    "pip install -c constraints-xla.txt -e '.[test,xla]' && pytest tests/xla",
)


def test_the_example_trains_saves_and_goes_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("corpus").mkdir()
    documents = pa.array([[i % 90 + 3] * (i % 50 + 20) for i in range(500)], pa.list_(pa.int32()))
    pq.write_table(pa.table({"tokens": documents}), "corpus/a.parquet", row_group_size=50)
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    small = example.replace("768", "24").replace("4096", "64")
    names = {"dp_mesh": None, "last_step": 3, "model_state": {}, "optimizer_state": {}}
    exec(small, names)
    assert names["loader"].step == 3
    assert names["batch"]["labels"].shape == (8, 64)

    samples = torch.zeros(96, dtype=torch.int64)
    dcp.load({"loader.shards.samples": samples}, checkpoint_id="checkpoints/3")
    assert samples.sum() == 3 * 24


def test_the_commands_are_those_of_ci():
    script = (Path(__file__).parents[1] / ".ci" / "run").read_text()
    for command in COMMANDS:
        assert f"{command}\n" in README
        assert f"{command}\n" in script
