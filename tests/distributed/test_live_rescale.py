"""Ranks that leave and ranks that go on, in live processes. Four, then three, then four: `tests.distributed.test_survivors`."""

from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import rescale_data as rd
from tests.distributed.ranks import run_ranks
from tests.states import opened


def leave() -> tuple[list[int], str, str]:
    """All but the first of three ranks leave, and it goes on alone: its rows, and what they are told who ask for more."""
    loader = rd.DataLoader(range(96), global_batch_size=6, micro_batch_size=2, timeout=3.0)
    batches = iter(loader)
    rows, said = next(batches).tolist(), ""
    state = loader.state_dict()
    mesh = DeviceMesh("cpu", [0, 1])
    with pytest.raises(ValueError, match=r"mesh holds the ranks|give state=") as refused:
        loader.reopen(mesh=mesh, micro_batch_size=3)
    if dist.get_rank():
        loader.close()
        with pytest.raises(RuntimeError, match="A state is made by all dp ranks together") as error:
            loader.state_dict()
        said = str(error.value)
    else:
        loader.reopen(state, dp_world_size=1)
        with pytest.raises(RuntimeError, match="no longer valid"):
            next(batches)
        rows += [row for batch in loader for row in batch.tolist()]
        assert loader._stream.layout.micro_batch_size == 2
        assert opened(loader.state_dict())["samples"] == 96
    dist.barrier()
    return rows, said, str(refused.value)


def test_a_state_of_a_loader_that_others_went_on_from_is_refused(tmp_path: Path) -> None:
    ranks = run_ranks(3, tmp_path, leave)
    assert sorted(row for rows, _, _ in ranks for row in rows) == list(range(96))
    assert all("the ranks [0] did not come to it in time" in said for _, said, _ in ranks[1:])
    assert all("give state=, one state_dict() of the old ranks" in refused for _, _, refused in ranks[:2])
    assert "mesh holds the ranks [0, 1]" in ranks[2][2]
