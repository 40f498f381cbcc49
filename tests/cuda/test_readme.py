"""README's script, changed as README says for GPUs, goes on where it stopped without one."""

from __future__ import annotations

import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rescale_data import checkpoint
from tests.states import opened
from tests.test_readme import README, torchrun

TO_A_GPU = {
    'init_device_mesh("cpu"': 'init_device_mesh("cuda"',
    "  # yours": '.to("cuda")',
    "batch = next(batches)": 'batch = {name: value.to("cuda", non_blocking=True) for name, value in next(batches).items()}',
    "repeat=True)": "repeat=True, pin_memory=True)",
}


@pytest.mark.parametrize("backend", ["cpu:gloo,cuda:nccl", "nccl"])
def test_a_run_that_began_on_three_cpus_goes_on_on_a_gpu(tmp_path: Path, backend: str) -> None:
    (tmp_path / "corpus").mkdir()
    documents = pa.array([[i % 90 + 3] * (i % 50 + 20) for i in range(500)], pa.list_(pa.int32()))
    pq.write_table(pa.table({"tokens": documents}), tmp_path / "corpus" / "a.parquet", row_group_size=50)
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    script = example.replace("768", "24").replace("4096", "64").replace("32_000", "128").replace("% 100", "% 2")
    torchrun(script, tmp_path, 3, 2)
    for old, new in {'("gloo")': f'("{backend}")', **TO_A_GPU}.items():
        assert old in script, old
        script = script.replace(old, new)
    torchrun(script, tmp_path, 1, 5)
    torchrun(script, tmp_path, 1, 9)
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*")) == ["step-4", "step-6", "step-8"]
    for step in (4, 6, 8):
        state = checkpoint.read_data_state(tmp_path / "checkpoints" / f"step-{step}")
        assert opened(state)["shards"]["samples"].sum() == 24 * step
