"""README's script, changed as README says for GPUs, goes on where it stopped without one."""

from pathlib import Path

import pytest

from rescale_data import checkpoint
from tests.states import opened
from tests.test_readme import small_script, torchrun

TO_A_GPU = {
    'init_device_mesh("cpu"': 'init_device_mesh("cuda"',
    "  # yours": '.to("cuda")',
    "batch = next(batches)": 'batch = {name: value.to("cuda", non_blocking=True) for name, value in next(batches).items()}',
    "repeat=True)": "repeat=True, pin_memory=True)",
}


@pytest.mark.parametrize("backend", ["cpu:gloo,cuda:nccl", "nccl"])
def test_a_run_that_began_on_three_cpus_goes_on_on_a_gpu(tmp_path: Path, backend: str) -> None:
    script = small_script(tmp_path)
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
