"""Folders on a disk and in memory, and processes elsewhere, for all tests of checkpoints."""

import fsspec
import pytest

from rescale_data import lease as leases
from rescale_data.checkpoint.storage import commit


@pytest.fixture(params=["local", "memory"])
def folder(request, tmp_path):
    if request.param == "local":
        yield str(tmp_path / "run")
        return
    yield f"memory://{tmp_path.name}/run"
    fsspec.filesystem("memory").store.clear()


@pytest.fixture
def elsewhere(monkeypatch):
    """Once called, this is a process in another container, which cannot see the ones before."""

    def move():
        process = leases.this_process() | {"namespace": "pid:[1]"}
        for module in (commit, leases):
            monkeypatch.setattr(module, "this_process", lambda: process)

    return move
